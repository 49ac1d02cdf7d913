"""Copies behind an exit's drafts: exact, as many as pay, and learned from."""

import random

import pytest
import torch
from conftest import AGREEMENT, EXIT, greedy, prompt, tiny_llama

from selfspec import SelfSpecModel
from selfspec.drafters.auto import Auto
from selfspec.lookup import Lookup
from selfspec.pace import Pace
from selfspec.policy import Policy
from selfspec.schedule import OptimalStop

IDS, MASK = prompt(4, 11, 7)
DRAFT = {"drafter": "auto", "exit_layer": EXIT, "num_draft_tokens": 6}


@pytest.fixture
def always(monkeypatch):
    """Behind two drafts of a chain two tokens are copied, in every other row."""
    monkeypatch.setattr(Auto, "_repeats", lambda auto, state: False)
    monkeypatch.setattr(Policy, "choose", lambda policy, ways: f"chain shared@{EXIT}")
    monkeypatch.setattr(OptimalStop, "goes_on", lambda stop, scores, *_: stop._clock.mark())
    monkeypatch.setattr(OptimalStop, "copies", lambda stop, follow, most: min(2, most))
    ends = []
    end = OptimalStop.end
    monkeypatch.setattr(OptimalStop, "end", lambda *args: ends.append(args[1:]) or end(*args))
    monkeypatch.setattr(
        Lookup, "follows", lambda *args: [n % 2 == 0 for n, _ in enumerate(args[-1])]
    )
    return ends


@pytest.mark.parametrize("agreement", AGREEMENT)
@pytest.mark.parametrize("rows", [slice(0, 1), slice(0, 3)], ids=["one row", "ragged"])
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2}], ids=["plain", "penalised"])
def test_greedy_text_is_the_models_own(always, agreement, rows, options):
    model = tiny_llama(agreement)
    ids, mask = IDS[rows], MASK[rows]
    out = SelfSpecModel(model).generate(
        ids, attention_mask=mask, max_new_tokens=40, draft=DRAFT, **options
    )
    assert torch.equal(out, greedy(model, ids, mask, max_new_tokens=40, **options))
    assert {drafted for drafted, *_ in always} == {1}
    assert any(copied == [2, 0, 2][: len(copied)] for _, _, copied in always)


def test_a_seed_gives_the_same_text_with_copies_and_without(always, monkeypatch):
    spec = SelfSpecModel(tiny_llama("sometimes"))
    options = {"attention_mask": MASK, "max_new_tokens": 30, "do_sample": True}

    def text(draft):
        torch.manual_seed(3)
        return spec.generate(IDS, draft={**draft, "rule": "coupled"}, **options)

    assert torch.equal(text(DRAFT), text({"drafter": "none"}))
    assert any(copied for *_, copied in always)
    always.clear()
    spec.generate(IDS, draft=DRAFT, **options)  # drawn drafts go without
    assert not any(copied for *_, copied in always)


# How many pay


def write(stop, clock, tokens, chance=0.7, copy=0.8, verify_seconds=0.01, follow=0.5, seed=0):
    """Tokens per second of chains that lead into what was said before, and copies made a round."""
    source, began, emitted, made = random.Random(seed), clock.now, 0, []
    scores, drawn = torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.long)
    while emitted < tokens:
        stop.begin(lambda drafts, first: [[chance]] * len(drafts))
        drafted = 0
        while drafted < 12:
            clock.now += 0.1
            drafted += 1
            if not stop.goes_on(scores, drawn, None):
                break
        copies = stop.copies([source.random() < follow], 12 - drafted)
        clock.now += 1.0 + verify_seconds * (drafted + copies)
        kept = 0
        while kept < drafted + copies:
            if source.random() >= (chance if kept < drafted else copy):
                break
            kept += 1
        stop.end(drafted, [kept], [copies])
        emitted += kept + 1
        made.append(copies)
    return emitted / (clock.now - began), made


class NoCopies(OptimalStop):
    def copies(self, follow, most):
        return 0


@pytest.mark.parametrize("chance", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("copy", [0.3, 0.6, 0.9])
def test_copies_pay_and_never_cost(clock, chance, copy):
    rate, _ = write(OptimalStop(Pace()), clock, 8000, chance, copy)
    without, _ = write(NoCopies(Pace()), clock, 8000, chance, copy)
    assert rate > {0.3: 0.99, 0.6: 1.0, 0.9: 1.02}[copy] * without


def test_fewer_are_copied_where_they_fall_or_their_verification_is_dear(clock):
    def usual(**options):
        _, made = write(OptimalStop(Pace()), clock, 6000, follow=1.0, **options)
        return sum(made[200:]) / len(made[200:])

    assert usual(copy=0.9) > 2 * usual(copy=0.5)
    assert usual(copy=0.5, verify_seconds=0.01) > 1.5 * usual(copy=0.5, verify_seconds=0.15)
    assert usual(copy=0.05, verify_seconds=0.15) < 0.2


def test_what_did_not_pay_is_seen_to_pay_again(clock):
    stop = OptimalStop(Pace())
    _, before = write(stop, clock, 4000, copy=0.02, verify_seconds=0.1)
    _, after = write(stop, clock, 4000, copy=0.95, verify_seconds=0.1)
    assert sum(before[-200:]) / 200 < 0.2
    assert sum(after[-200:]) / 200 > 1


def test_drafts_are_not_blamed_for_what_copies_take(clock):
    pace = Pace()
    write(OptimalStop(pace), clock, 6000, verify_seconds=0.1, copy=0.9)
    assert 0.05 < pace.verifying(1) < 0.15
    assert pace.fixed_seconds.value == pytest.approx(1.0, rel=0.15)
