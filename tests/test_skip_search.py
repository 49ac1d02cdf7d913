"""The search for sublayers to skip, on a simulated clock and on a real one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import gates, prompt, tiny_llama

from selfspec import DraftConfig, SelfSpecModel
from selfspec.bench.tune.skips import SkipSearch, SkipTrial, search_skips
from selfspec.bench.tune.validation import Runner
from selfspec.config import SkipConfig
from selfspec.drafters.engine import Engine

pytest.importorskip("optuna")

PROMPTS = [prompt(4)[0][0], prompt(6, seed=2)[0][0]]
# Each of these speeds the simulated target up by one; any other sublayer slows it down.
GOOD = {("attention", 2), ("mlp", 2), ("attention", 4), ("mlp", 5)}
PLAIN_RATE = 10.0
STARTS = 9


def target(layers: int = 6) -> SelfSpecModel:
    return SelfSpecModel(tiny_llama(num_hidden_layers=layers))


def sublayers(skip: SkipConfig) -> set[tuple[str, int]]:
    return {("attention", i) for i in skip.attention} | {("mlp", i) for i in skip.mlp}


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[DraftConfig]:
    """From now on no text is written; what would have been is noted here."""
    ran: list[DraftConfig] = []

    def run(runner: Runner, draft: DraftConfig) -> dict[str, Any]:
        ran.append(draft)
        rate = PLAIN_RATE
        if draft.drafter == "layer_skip":
            skipped = sublayers(draft.skip)
            rate += len(skipped & GOOD) - len(skipped - GOOD)
        return {"tokens_per_second": max(rate, 0.1), "accepted": 3, "drafted": 4}

    monkeypatch.setattr(Runner, "run", run)
    monkeypatch.setattr(Runner, "warm_up", lambda runner, draft: None)
    return ran


def search(trials: int, seed: int = 0, **options: Any) -> SkipSearch:
    return search_skips(target(), PROMPTS, trials, seed, **options)


def test_the_search_finds_what_pays(simulated: list[DraftConfig]) -> None:
    told: list[SkipTrial] = []
    found = search(80, on_trial=told.append)
    assert told == found.trials and len(told) == 80
    starts = max(trial.speedup for trial in found.trials[:STARTS])
    best = max(trial.speedup for trial in found.trials)
    assert found.best.speedup == pytest.approx(best) and best > starts
    skipped = sublayers(found.best.skip)
    assert len(skipped & GOOD) - len(skipped - GOOD) >= 3
    assert found.best.plain_tokens_per_second == pytest.approx(PLAIN_RATE)
    assert found.best.acceptance_rate == 0.75
    assert all(0 not in (*t.skip.attention, *t.skip.mlp) for t in found.trials)


def test_it_starts_from_what_is_missed_least_exits_and_layers_skipped_evenly(
    simulated: list[DraftConfig],
) -> None:
    model = tiny_llama("seldom", num_hidden_layers=6)
    with torch.no_grad():
        model.model.layers[3].self_attn.o_proj.weight.zero_()
        model.model.layers[4].mlp.down_proj.weight.zero_()
    spec = SelfSpecModel(model)
    started = [trial.skip for trial in search_skips(spec, PROMPTS, STARTS, max_new_tokens=8).trials]
    *missed_least, long, _, middle, _, short, _ = started
    counts = [len(skip.attention) + len(skip.mlp) for skip in missed_least]
    assert counts == [8, 6, 4]
    assert all(3 in skip.attention and 4 in skip.mlp for skip in missed_least)
    assert [skip.mlp for skip in (long, middle, short)] == [(2, 3, 4, 5), (3, 4, 5), (5,)]
    assert all(skip.attention == skip.mlp for skip in started[3:])


def test_every_set_runs_beside_plain_decoding(simulated: list[DraftConfig]) -> None:
    search(4, draft=DraftConfig(num_draft_tokens=7, schedule="confidence"))
    pairs = list(zip(simulated[::2], simulated[1::2], strict=True))
    assert all({a.drafter, b.drafter} == {"none", "layer_skip"} for a, b in pairs)
    assert [a.drafter for a, _ in pairs[:4]] == ["none", "layer_skip"] * 2  # first in turn
    skipping = [draft for draft in simulated if draft.drafter == "layer_skip"]
    assert {(d.num_draft_tokens, d.schedule) for d in skipping} == {(7, "confidence")}


def test_lengths_are_searched_where_none_is_given(simulated: list[DraftConfig]) -> None:
    lengths = {trial.draft.num_draft_tokens for trial in search(20).trials}
    assert len(lengths) > 2 and lengths <= set(range(1, 9))


def test_a_seed_gives_one_search(simulated: list[DraftConfig]) -> None:
    assert search(20, seed=1) == search(20, seed=1)
    assert search(20, seed=1) != search(20, seed=2)


def test_an_interrupted_search_goes_on(simulated: list[DraftConfig], tmp_path: Path) -> None:
    whole = search(20)
    simulated.clear()
    seen: list[SkipTrial] = []

    def stop(trial: SkipTrial) -> None:
        seen.append(trial)
        if len(seen) == 9:
            raise KeyboardInterrupt

    work = tmp_path / "skips" / "work.jsonl"
    with pytest.raises(KeyboardInterrupt):
        search(20, on_trial=stop, work=work)
    before = len(simulated)
    assert search(20, work=work) == whole
    measured = [draft for draft in simulated[before:] if draft.drafter == "layer_skip"]
    finalists = {draft for draft in measured if measured.count(draft) >= 3}
    assert not {trial.draft for trial in seen} & (set(measured) - finalists)
    simulated.clear()
    assert search(20, work=work) == whole
    assert simulated == []


def test_only_whole_layers_where_sublayers_are_unknown(
    simulated: list[DraftConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(decoder: Any, skips: Any) -> None:
        if skips.attention != skips.mlp:
            raise ValueError

    monkeypatch.setattr("selfspec.decoder.Decoder.check_skips", refuse)
    assert all(trial.skip.attention == trial.skip.mlp for trial in search(15).trials)


def test_a_real_search_leaves_the_model_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    spec = target(3)
    before = {name: value.clone() for name, value in spec.model.state_dict().items()}
    with caplog.at_level(logging.INFO):
        found = search_skips(spec, PROMPTS, 3, max_new_tokens=6)
    assert found.best.tokens_per_second > 0 and found.best.plain_tokens_per_second > 0
    assert 0 <= found.best.acceptance_rate <= 1
    assert not caplog.records, "one line for every trial"
    assert gates(spec.model) == []
    assert all(torch.equal(before[name], value) for name, value in spec.model.state_dict().items())


@pytest.mark.parametrize(
    ("trials", "prompts", "layers"), [(0, PROMPTS, 3), (2, [], 3), (2, PROMPTS, 1)]
)
def test_a_search_of_nothing_is_refused(trials: int, prompts: Any, layers: int) -> None:
    with pytest.raises(ValueError, match=f"got {trials}, {len(prompts)} and {layers}"):
        search_skips(target(layers), prompts, trials)


def test_without_optuna_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    fail: Callable[..., Any] = lambda *args, **kwargs: pytest.fail("a pass ran")  # noqa: E731
    monkeypatch.setattr(Engine, "prefill", fail)
    with pytest.raises(ImportError, match=r"pip install 'selfspec\[tune\]'"):
        search(3)
