"""Copies behind an exit's drafts: exact, as many as pay, and learned from."""

import random

import pytest
import torch
from conftest import AGREEMENT, EXIT, greedy, prompt, tiny_llama
from head_tools import assert_reads_as_forced, close_in_double, own_head, record

from selfspec import SelfSpecModel
from selfspec.decoder import Decoder
from selfspec.drafters.auto import Auto
from selfspec.drafters.copying import CopyingStop
from selfspec.drafters.suffix_lookup import Lookup, Match
from selfspec.schedule import OptimalStop
from selfspec.schedule.pace import Pace
from selfspec.schedule.policy import Policy

IDS, MASK = prompt(4, 11, 7)
DRAFT = {"drafter": "auto", "exit_layer": EXIT, "num_draft_tokens": 6}


@pytest.fixture
def copies(monkeypatch):
    """Behind one draft of a chain two tokens are copied, in every other row.

    Filled with what the schedule is told at the end of each round.
    """
    monkeypatch.setattr(Auto, "_repeats", lambda auto, state: False)
    monkeypatch.setattr(Policy, "choose", lambda policy, ways: next(iter(ways)))
    monkeypatch.setattr(OptimalStop, "goes_on", lambda stop, scores, *_: stop._clock.mark())
    monkeypatch.setattr(
        CopyingStop, "count", lambda stop: bool(stop._find) * min(2, stop._most - 1)
    )
    ends, end = [], CopyingStop.end
    monkeypatch.setattr(CopyingStop, "end", lambda *args: ends.append(args[1:]) or end(*args))
    behind = Lookup.behind

    def every_other(lookup, drafts):
        found = behind(lookup, drafts)
        none = Match(0, 0)
        return [none if n % 2 else max(match, Match(1, 1)) for n, match in enumerate(found)]

    monkeypatch.setattr(Lookup, "behind", every_other)
    return ends


def assert_some_stood(ends):
    assert {drafted for drafted, *_ in ends} == {1}
    assert any(copied and copied == [2, 0, 2][: len(copied)] for _, _, copied in ends)
    assert any(max(kept) > 1 for _, kept, _ in ends)


@pytest.mark.parametrize("agreement", AGREEMENT)
@pytest.mark.parametrize("rows", [slice(0, 1), slice(0, 3)], ids=["one row", "ragged"])
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2}], ids=["plain", "penalised"])
def test_greedy_text_is_the_models_own(copies, agreement, rows, options):
    model = tiny_llama(agreement)
    ids, mask = IDS[rows], MASK[rows]
    spec = SelfSpecModel(model)
    out = spec.generate(ids, attention_mask=mask, max_new_tokens=60, draft=DRAFT, **options)
    assert torch.equal(out, greedy(model, ids, mask, max_new_tokens=60, **options))
    for index, row in enumerate(spec.last_trace.rows):
        # The padding of a row that copies nothing is no draft of its own.
        assert {len(step.drafted) for step in row[1:5]} <= ({1} if index == 1 else {1, 3})
    if agreement == "always" and not options:
        assert_some_stood(copies)


@pytest.mark.parametrize("rows", [slice(0, 1), slice(0, 3)], ids=["one row", "ragged"])
@pytest.mark.parametrize(("kind", "layer"), [("fused", 0), ("fused", 2), ("block", 2), ("lens", 1)])
def test_heads_read_a_text_that_was_copied_as_fitting_read_it(
    copies, monkeypatch, kind, layer, rows
):
    """A copy behind a head's drafts is none of its own."""
    model = tiny_llama("sometimes")
    head = own_head(Decoder(model), kind, layer)
    seen = record(monkeypatch)
    spec = SelfSpecModel(model, [head])
    ids, mask = IDS[rows], MASK[rows]
    out = spec.generate(ids, attention_mask=mask, max_new_tokens=60, draft="auto")
    assert torch.equal(out, greedy(model, ids, mask, max_new_tokens=60))
    assert any(copied for *_, copied in copies)
    if kind != "lens":
        assert_reads_as_forced(spec.engine.decoder, head, seen, close_in_double)


def test_drawn_drafts_go_without_copies(copies):
    spec = SelfSpecModel(tiny_llama("sometimes"))
    for rule in ("block", "coupled"):
        draft = {**DRAFT, "rule": rule}
        spec.generate(IDS, attention_mask=MASK, max_new_tokens=30, draft=draft, do_sample=True)
    assert copies and not any(copied for *_, copied in copies)


# How many pay


def write(
    stop,
    clock,
    tokens,
    chance=0.7,
    copy=0.8,
    verify_seconds=0.01,
    follow=0.5,
    seed=0,
    copy_cost=1.0,
    said=3,
):
    """Tokens per second of chains that lead into what was said before; drafts and copies made."""
    source, began, emitted, made = random.Random(seed), clock.now, 0, []
    scores, drawn = torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.long)
    while emitted < tokens:
        match = Match(said, 0) if source.random() < follow else Match(0, 0)
        stop.prepare(lambda drafts, match=match: [match], 12)
        stop.begin(lambda drafts, first: [[chance]] * len(drafts))
        drafted = 0
        while drafted < 12:
            clock.now += 0.1
            drafted += 1
            if not stop.goes_on(scores, drawn, None):
                break
        copies = stop.count()
        clock.now += 1.0 + verify_seconds * (drafted + copy_cost * copies)
        kept = 0
        while kept < drafted + copies:
            if source.random() >= (chance if kept < drafted else copy):
                break
            kept += 1
        stop.end(drafted, [kept], [copies])
        emitted += kept + 1
        made.append((drafted, copies))
    return emitted / (clock.now - began), made


def usual(made, last=None):
    """Drafts and copies of a round, on average, once something is known."""
    rounds = made[200:] if last is None else made[-last:]
    return [sum(counts) / len(rounds) for counts in zip(*rounds, strict=True)]


class NoCopies(CopyingStop):
    def goes_on(self, *args):
        return OptimalStop.goes_on(self, *args)


@pytest.mark.parametrize("chance", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("copy", [0.3, 0.6, 0.9])
def test_copies_pay_and_never_cost(clock, chance, copy):
    rate, _ = write(CopyingStop(Pace()), clock, 8000, chance, copy)
    without, _ = write(NoCopies(Pace()), clock, 8000, chance, copy)
    assert rate > {0.3: 0.99, 0.6: 1.0, 0.9: 1.02}[copy] * without


def test_fewer_are_copied_where_they_fall_or_their_verification_is_dear(clock):
    def copies(**options):
        return usual(write(CopyingStop(Pace()), clock, 6000, follow=1.0, **options)[1])[1]

    assert copies(copy=0.9) > 2 * copies(copy=0.5)
    assert copies(copy=0.5, verify_seconds=0.01) > 1.5 * copies(copy=0.5, verify_seconds=0.15)
    assert copies(copy=0.05, verify_seconds=0.15) < 0.2


def test_a_chain_ends_where_copies_stand_as_often_as_drafts(clock):
    def drafts(stop, **options):
        return usual(write(stop, clock, 6000, chance=0.85, follow=1.0, **options)[1])[0]

    alone = drafts(NoCopies(Pace()))
    assert alone > 4
    assert drafts(CopyingStop(Pace()), copy=0.85) < 1.2
    assert drafts(CopyingStop(Pace()), copy=0.3) > 0.8 * alone, "a draft passes where copies fall"


def test_a_chain_that_leads_nowhere_is_as_long_as_without_copies(clock):
    _, made = write(CopyingStop(Pace()), clock, 6000, follow=0.0)
    _, alone = write(NoCopies(Pace()), clock, 6000, follow=0.0)
    assert made == [(drafts, 0) for drafts, _ in alone]


def test_more_is_copied_behind_more_that_was_said_before(clock):
    """A phrase goes on as it did more often than a word does."""
    pace = Pace()
    stop = CopyingStop(pace)
    for seed in range(10):
        write(stop, clock, 400, copy=0.3, follow=1.0, seed=seed, said=2)
        write(stop, clock, 400, copy=0.9, follow=1.0, seed=seed, said=6)
    assert pace.copy_falls.usual(2) > 0.4 and pace.copy_falls.usual(6) < 0.15

    def copies(said):
        return usual(write(stop, clock, 40, copy=0.6, follow=1.0, said=said)[1], last=8)[1]

    assert copies(said=6) > 1.5 * copies(said=2)


def test_what_did_not_pay_is_seen_to_pay_again_in_short_calls(clock):
    pace = Pace()

    def copies(calls, **options):
        made = [
            counts
            for seed in range(calls)
            for counts in write(CopyingStop(pace), clock, 20, seed=seed, **options)[1]
        ]
        return usual(made, last=200)[1]

    assert copies(200, copy=0.0, verify_seconds=0.02) < 0.2
    assert copies(400, copy=0.95, verify_seconds=0.1) > 1


def test_the_first_copy_to_fall_does_not_end_it(clock):
    stop = CopyingStop(Pace())
    write(stop, clock, 100, copy=0.0)
    assert stop.pace.copy_falls.fell.value == 1
    _, made = write(stop, clock, 3, follow=1.0)
    assert made[0][1] > 0


def test_a_copy_that_was_not_made_may_have_become_worth_it():
    """Where the first stands as often as before, and now the second does, too."""
    pace = Pace()
    for said in (3, 4) * 200:
        pace.copy_falls.add(said, fell=said == 4)
    before = pace.copy_falls.usual(4)
    stop = CopyingStop(pace)
    for _ in range(200):
        stop._learn_copies(3, stand=1, count=1)
    assert before > 0.8 and pace.copy_falls.usual(4) < 0.2


def test_copies_that_stand_behind_long_matches_are_believed():
    """One at a time, as what did not pay is tried: each is of the place that the next is of."""
    stop = CopyingStop(Pace())
    for _ in range(50):
        stop._learn_copies(9, stand=0, count=1)
    assert stop.pace.copy_falls.usual(8) > 0.6
    for _ in range(200):
        stop._learn_copies(9, stand=1, count=1)
    assert stop.pace.copy_falls.places[8].weighed > 90
    assert stop.pace.copy_falls.usual(8) < 0.2


@pytest.mark.parametrize("cut", [True, False])
def test_drafts_that_copies_came_instead_of_are_still_known(clock, cut):
    """Chains that end because drafting does not pay forget what it was to draft on."""
    stop = CopyingStop(Pace())
    falls = stop.pace.falls[False]
    for _ in range(80):
        falls.add(1, fell=False)
    for _ in range(60):
        stop.begin(lambda drafts, first: [[0.9]] * len(drafts))
        stop._end(1, [1], cut=cut)
    assert falls.places[1].weighed == (79 if cut else 19)


@pytest.mark.parametrize("copy_cost", [1.0, 2.0])
def test_drafts_are_not_blamed_for_what_copies_take(clock, copy_cost):
    """A copy goes through all layers, a draft's verification through those above the exit."""
    pace = Pace()
    options = {"verify_seconds": 0.1, "copy": 0.9, "copy_cost": copy_cost}
    write(CopyingStop(pace, copy_cost), clock, 6000, **options)
    assert 0.08 < pace.verifying(1) < 0.115
    assert pace.fixed_seconds.value == pytest.approx(1.0, rel=0.15)
