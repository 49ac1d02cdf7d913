"""The default draft of checkpoints without heads: fewer bits once, and where, copies pay."""

from __future__ import annotations

import pytest
import torch
from conftest import EXIT, greedy, prompt, tiny_llama
from families import CASES_BY_FAMILY, build
from head_tools import own_head

from selfspec import DraftConfig, SelfSpecModel
from selfspec.decoder.kernels.low_precision import Trial, largest_linears, try_copies
from selfspec.drafters import headless
from selfspec.drafters.headless import expected_speed
from selfspec.schedule.stats import Stats

FIRST = DraftConfig(drafter="auto", rule="coupled")
IDS, MASK = prompt(12, 5, 9, vocab=61)


def after(seconds, rounds=100):
    """What a call of that many seconds leaves behind."""
    stats = Stats(rounds=rounds)
    stats.seconds["total"] = seconds
    return stats


@pytest.fixture
def paying(monkeypatch):
    """A trial says that copies are made in no time, and `int4` is faster than `int8`."""

    def try_copies(linears, precision):
        weights = sum(module.weight.numel() for module in linears)
        return Trial(weights, 1e-3, 1.0, 1.1, 0.3 if precision == "int4" else 0.6)

    monkeypatch.setattr(headless, "try_copies", try_copies)
    monkeypatch.setattr(headless, "expected_speed", lambda trial, *_: 2 - trial.copied)


def decode_long(spec, rows=1):
    """Two calls that took so long that copies cost next to nothing."""
    for _ in range(2):
        spec.engine.headless.decoded(after(1000.0), rows)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma3_text", "opt"])
def test_the_whole_model_drafts_in_fewer_bits_once_that_pays(paying, family):
    model = build(family, CASES_BY_FAMILY[family]).double()
    spec = SelfSpecModel(model)
    assert spec.default_draft == FIRST
    decode_long(spec)
    depth = spec.decoder.depth
    whole = FIRST.model_copy(update={"exit_layer": depth, "precision": "int4"})
    assert spec.default_draft == spec.draft_for(sampled=True) == whole
    options = {"max_new_tokens": 30, "do_sample": False}
    out = spec.generate(IDS, attention_mask=MASK, **options)
    assert torch.equal(out, greedy(model, IDS, MASK, max_new_tokens=30))


def test_copies_wait_until_they_are_a_small_part_of_what_was_decoded(paying, monkeypatch):
    spec, tried = SelfSpecModel(tiny_llama()), []
    own = headless.try_copies
    monkeypatch.setattr(headless, "try_copies", lambda *args: tried.append(args) or own(*args))
    default = spec.engine.headless
    weights = sum(m.weight.numel() for m in largest_linears(spec.decoder.layers[0]))
    default.decoded(after(1.9e-6 * weights), 1)
    assert not tried, "not even a trial"
    default.decoded(after(0.2e-6 * weights), 1)
    assert [precision for _, precision in tried] == ["int8", "int4"] and default.draft == FIRST
    default.decoded(after(1e-5), 1)
    assert default.draft == FIRST
    default.decoded(after(100.0), 1)
    assert default.draft.precision == "int4"


def test_calls_that_tell_nothing_do_not_count(paying):
    spec = SelfSpecModel(tiny_llama())
    decode_long(spec, rows=5)  # copies are read for at most four tokens together
    spec.engine.headless.decoded(after(1e6, rounds=0), 1)
    seconds, counted = [], spec.engine.headless
    counted.decoded = lambda stats, rows: seconds.append(stats.decode_seconds)
    for draft in ("none", "prompt_lookup", FIRST.model_copy()):
        spec.generate(IDS[:1], max_new_tokens=5, draft=draft)
    assert spec.default_draft == FIRST and not seconds
    spec.generate(IDS[:1], max_new_tokens=5)
    assert seconds == [spec.last_stats.decode_seconds]


@pytest.mark.parametrize("reason", ["memory", "slow", "experts", "compiled", "depth"])
def test_nothing_is_copied_where_it_cannot_or_need_not_be(paying, monkeypatch, reason):
    model, kernels = tiny_llama(), "auto"
    if reason == "memory":
        monkeypatch.setattr(headless, "fits", lambda nbytes: False)
    elif reason == "slow":
        monkeypatch.setattr(headless, "expected_speed", lambda *_: 1.05)
    elif reason == "experts":
        model = build("mixtral", CASES_BY_FAMILY["mixtral"])
    elif reason == "compiled":
        kernels = "compiled"
    else:
        model = tiny_llama(num_hidden_layers=1)
    spec = SelfSpecModel(model, kernels=kernels)
    first = spec.default_draft
    decode_long(spec)
    assert spec.default_draft == first


def test_a_checkpoint_with_heads_drafts_with_them(paying):
    model = tiny_llama()
    heads = [own_head(SelfSpecModel(model).decoder, "block", EXIT)]
    spec = SelfSpecModel(model, heads)
    decode_long(spec)
    assert spec.default_draft == DraftConfig(drafter="auto")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_trial_takes_time_and_nothing_else(dtype, precision):
    model = tiny_llama(hidden_size=64, intermediate_size=96).to(dtype)
    spec = SelfSpecModel(model)
    linears = largest_linears(spec.decoder.layers[0])
    assert [module.weight.shape for module in linears] == [(96, 64)] * 2
    before = torch.get_rng_state()
    with spec.decoder:
        trial = try_copies(linears, precision)
        assert spec.decoder.gates.low_precision.nbytes == 0
    assert trial.weights == 2 * 96 * 64 and min(trial) > 0
    assert torch.equal(before, torch.get_rng_state())


def test_the_expected_speed_follows_from_what_products_take():
    """The step is half products; where copies take no time, drafts cost the other half."""
    free = Trial(10, 1.0, own=0.1, several=0.1, copied=0.0)
    assert expected_speed(free, 50, 1.0) == pytest.approx(
        max(sum(0.9**i for i in range(n + 1)) / (1 + n * 0.5) for n in range(1, 13))
    )
    assert expected_speed(free._replace(copied=0.1), 50, 1.0) < 1
    assert expected_speed(free._replace(several=0.4), 50, 1.0) < 1.1 < expected_speed(free, 50, 1.0)
