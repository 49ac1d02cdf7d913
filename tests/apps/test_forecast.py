"""What a fit is expected to bring: the choice by a model's sizes, and the times behind it."""

import itertools

import pytest
import torch
from families import build
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from selfspec import SelfSpecModel
from selfspec.apps.bench import forecast
from selfspec.apps.bench.forecast import (
    COVERAGE,
    RECORDED,
    Advice,
    DeviceSpeed,
    acceptance,
    assumed_speed,
    device_speed,
    expected_tokens,
    measure_device,
)
from selfspec.apps.bench.shapes import read_shape
from selfspec.decoder import Decoder

CPU = torch.device("cpu")
EVERY = COVERAGE | {0: 1.0}


def gemma():
    """A model of 270 M parameters, two thirds of them embeddings of 262,144 tokens."""
    return Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
    )


def without_weights(config):
    with torch.device("meta"):
        return Decoder(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))


@pytest.fixture
def bandwidth(monkeypatch):
    """Every device reads ten gigabytes a second."""
    monkeypatch.setattr(forecast, "read_bandwidth", lambda *_: 1e10)


@pytest.mark.parametrize(
    "config",
    [*map(read_shape, ("Qwen3-0.6B", "Llama-3.2-1B", "Llama-3.1-8B")), gemma()],
    ids=["Qwen3-0.6B", "Llama-3.2-1B", "Llama-3.1-8B", "270M with 262,144 tokens"],
)
def test_large_vocabularies_are_trimmed_and_drafts_come_from_the_embeddings(config, bandwidth):
    decoder = without_weights(config)
    speed = assumed_speed(decoder, CPU, torch.bfloat16)
    advice = Advice.of(decoder, speed, EVERY, 1e6)
    best = advice.best
    assert (best.kind, best.exit_layer) == ("eagle3", 0)
    assert 0 < best.vocab_size <= 32_000 and best.cost < 0.3
    assert best.speedup > 1.2
    advice.check()
    speeds = {head.vocab_size: head.speedup for head in advice.now if head.exit_layer == 0}
    assert speeds[0] == min(speeds.values())
    assert [head.speedup for head in advice.now] == sorted(
        (head.speedup for head in advice.now), reverse=True
    )


def test_the_larger_the_share_of_the_lm_head_the_smaller_the_vocabulary(bandwidth):
    large, small = (without_weights(c) for c in (read_shape("Llama-3.1-8B"), gemma()))
    sizes = [
        Advice.of(d, assumed_speed(d, CPU, torch.bfloat16), EVERY, 1e6).best.vocab_size
        for d in (large, small)
    ]
    assert sizes[0] >= sizes[1] == min(COVERAGE)


@pytest.mark.parametrize("place", RECORDED)
def test_acceptance_goes_through_the_recorded_fits_and_grows_with_the_text(place):
    kind, deeper = place
    for fit in RECORDED[place]:
        assert acceptance(kind, int(deeper), fit.tokens) == pytest.approx((fit.first, fit.later))
    grown = [acceptance(kind, int(deeper), 10.0**power)[0] for power in range(9)]
    assert all(low <= high for low, high in itertools.pairwise(grown)) and grown[0] < 0.001
    assert grown[-1] == RECORDED[place][-1].first


def test_a_speedup_is_tokens_over_seconds_at_the_best_number_of_drafts():
    decoder = SelfSpecModel(build("llama", "eager")).decoder
    speed = DeviceSpeed(4, 1.0, {1: 0.2, 2: 0.2}, {10: {1: 1.1, 3: 1.3}}, 0.1, 0.0)
    best = Advice.of(decoder, speed, {0: 1.0}, 1e9).best
    tokens = {n: expected_tokens(best.rates, n) / (1 + n / 10) for n in range(1, 7)}
    assert best.exit_layer == 0 and best.cost == pytest.approx(0.1)
    assert best.speedup == pytest.approx(max(tokens.values()))
    assert best.num_draft_tokens == max(tokens, key=lambda n: tokens[n]) > 1


def test_where_no_head_would_pay_the_advice_says_so():
    decoder = SelfSpecModel(build("llama", "eager")).decoder
    slow = DeviceSpeed(4, 1.0, {1: 0.2, 2: 0.2}, {10: {1: 3.0, 3: 9.0}}, 1e-4, 0.0)
    with pytest.raises(ValueError, match="no head would make this model faster"):
        Advice.of(decoder, slow, {0: 1.0}, 1e6).check()


def test_a_slow_fit_is_no_reason_against_a_head_that_would_pay():
    """What an hour brings depends on what else the machine does."""
    decoder = SelfSpecModel(build("llama", "eager")).decoder
    slow = DeviceSpeed(4, 1.0, {1: 0.2, 2: 0.2}, {10: {1: 1.3, 3: 1.9}}, 1.0, 0.0)
    advice = Advice.of(decoder, slow, {0: 1.0}, 10.0)
    assert max(head.speedup for head in (*advice.now, *advice.then)) < 1 < advice.most[0].speedup
    advice.check()


def test_layers_beyond_the_timed_ones_cost_what_these_do(monkeypatch):
    decoder = SelfSpecModel(build("llama", "eager")).decoder
    layer = sum(p.numel() for p in decoder.layers[0].parameters()) * decoder.dtype.itemsize
    monkeypatch.setattr(forecast, "_BYTES", 2 * layer)

    def linear(calls):
        """Half a second beside layers; a layer takes one and a quarter more a draft."""
        return {key: 0.5 + key[0] * _layer(key[1:]) for key in calls}

    def _layer(work):
        return 1.0 if len(work) == 1 else 1 + work[1] / 4

    monkeypatch.setattr(forecast, "_shortest", linear)
    speed = measure_device(decoder, CPU, torch.float32)
    assert speed.plain == pytest.approx(0.5 + decoder.depth)
    (times,) = speed.rounds.values()
    assert times == {n: pytest.approx(0.5 + decoder.depth * (1 + n / 4)) for n in (1, 3, 6)}
    # Below the exit, a draft runs layers that verification then leaves out.
    more = speed.round(1, 10, 3) - speed.round(0, 10, 3)
    assert more == pytest.approx(4 * 1.0 - (1 + 3 / 4))


@pytest.mark.matrix
@pytest.mark.parametrize(
    "family", ["gpt2", "opt", "falcon_alibi", "gemma3_text", "qwen3_moe", "deepseek_v3"]
)
def test_other_families_are_timed_or_judged_by_its_weights(family, monkeypatch, bandwidth):
    once = lambda calls: {key: call() for key, call in calls.items()}  # noqa: E731
    monkeypatch.setattr(forecast, "_shortest", once)
    decoder = SelfSpecModel(build(family, "eager")).decoder
    speed = device_speed(decoder, CPU, torch.float32)
    assert speed.depth == decoder.depth and speed.plain > 0
    assert Advice.of(decoder, speed, {0: 1.0}, 1e6).best.speedup > 0
