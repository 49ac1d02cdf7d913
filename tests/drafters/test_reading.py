"""Heads with a layer of their own read while decoding what they read while being fitted."""

import pytest
import torch
from conftest import EXIT, equal_to_generate, prompt, tiny_llama
from head_tools import (
    COPIES,
    WITH_LAYER,
    assert_reads_as_forced,
    close_in_double,
    forced_states,
    own_head,
    record,
)

from selfspec import SelfSpecModel
from selfspec.decoder import Decoder
from selfspec.generation import loop
from selfspec.schedule import Schedule

IDS, MASK = prompt(3, 8, 5)
ONE = IDS[1:2]


@pytest.fixture
def reading(monkeypatch):
    """A model with one head, and what it reads from then on."""

    def made(kind, exit_layer=EXIT, **options):
        model = tiny_llama("sometimes")
        head = own_head(Decoder(model), kind, exit_layer, **options)
        spec, seen = SelfSpecModel(model, heads=[head]), record(monkeypatch)
        return spec, head, seen

    return made


def kept_drafts(spec):
    """How many drafts of each round were kept."""
    return {
        (len(step.drafted), step.accepted)
        for row in spec.last_trace.rows
        for step in row
        if step.drafted
    }


@pytest.mark.matrix
@pytest.mark.parametrize("kind", WITH_LAYER)
@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize(
    ("exit_layer", "ids", "mask", "options"),
    [
        (EXIT, IDS, MASK, {}),
        (EXIT, ONE, None, {}),
        (3, IDS, MASK, {"prefill_chunk_size": 2}),
        (0, IDS, MASK, {"prefill_chunk_size": 3}),
    ],
    ids=["ragged", "one row", "chunked", "embedding"],
)
def test_decoding_reads_what_fitting_reads(reading, kind, trimmed, exit_layer, ids, mask, options):
    if kind.startswith("block") and exit_layer == 0:
        exit_layer = 1
    spec, head, seen = reading(kind, exit_layer, trimmed=trimmed, noise=0.02)
    draft = {"head": head.kind, "num_draft_tokens": 3}
    equal_to_generate(spec, ids, mask, max_new_tokens=16, draft=draft, **options)
    assert {read.step for read in seen} == {0, 1, 2}
    assert_reads_as_forced(spec.decoder, head, seen[::4], close_in_double)


@pytest.mark.parametrize("kind", [*COPIES, "eagle3"])  # which agree with the target untrained
def test_after_rounds_of_every_outcome(reading, kind):
    """No draft kept, some, all: the layer's KV is right again in the next round."""
    # Copies the last layer, so that it agrees often.
    spec, head, seen = reading(kind, 3, noise=0.06, **({"place": 3} if kind in COPIES else {}))
    draft = {"head": head.kind, "num_draft_tokens": 3}
    spec.generate(IDS, attention_mask=MASK, max_new_tokens=40, draft=draft)
    assert {(3, kept) for kept in range(4)} <= kept_drafts(spec)
    assert_reads_as_forced(spec.decoder, head, seen, close_in_double)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", WITH_LAYER)
def test_while_sampling_and_as_rows_leave(reading, kind):
    spec, head, seen = reading(kind)
    spec.generate(
        IDS,
        attention_mask=MASK,
        max_new_tokens=24,
        draft={"head": head.kind, "num_draft_tokens": 4, "schedule": "confidence"},
        do_sample=True,
        eos_token_id=list(range(1, 9)),
        pad_token_id=0,
        generator=torch.Generator().manual_seed(2),
    )
    lengths = {len(spec.last_trace.tokens(row)) for row in range(3)}
    assert len(lengths) > 1, "rows should leave apart"
    assert_reads_as_forced(spec.decoder, head, seen, close_in_double)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", WITH_LAYER)
def test_a_round_without_drafts_leaves_no_gap(monkeypatch, reading, kind):
    """What the target alone wrote, the head's layer must see all the same."""
    spec, head, seen = reading(kind)
    limit, rounds = loop._most_drafts, iter(range(100))
    monkeypatch.setattr(
        loop, "_most_drafts", lambda *a: 0 if next(rounds) % 3 in (0, 1) else limit(*a)
    )
    spec.generate(IDS, attention_mask=MASK, max_new_tokens=20, draft={"head": head.kind})
    assert_reads_as_forced(spec.decoder, head, seen, close_in_double)


@pytest.mark.parametrize("kind", [*COPIES, "block parallel", "fused parallel"])
def test_a_schedule_reads_the_confidence_that_fitting_trains(monkeypatch, reading, kind):
    (spec, head, seen), read = reading(kind, confidence=True, noise=0.2), []

    def begin(self, confidence, rows, sampled):
        read.append((confidence, []))

    def goes_on(self, scores, tokens, probs):
        confidence, drafts = read[-1]
        found = confidence(scores, probs, len(drafts))
        drafts.append((seen[-len(found) :], found))
        return True

    monkeypatch.setattr(Schedule, "begin", begin)
    monkeypatch.setattr(Schedule, "goes_on", goes_on)
    draft = {"head": head.kind, "num_draft_tokens": 3}
    options = {"attention_mask": MASK, "max_new_tokens": 16, "do_sample": True}
    spec.generate(IDS, draft=draft, **options)
    found = [
        pair
        for _, drafts in read
        for rows, chances in drafts
        for pair in zip(rows, chances, strict=True)
    ]
    for step in range(3):
        rows = [(row, chance) for row, chance in found if row.step == step]
        states = forced_states(spec.decoder, head, [row.text for row, _ in rows], step)
        odds = head.confidence(head(states)).sigmoid().flatten().tolist()
        assert [chance for _, chance in rows] == pytest.approx(odds, abs=1e-5)
    chances = [chance for _, chance in found]
    assert max(chances) - min(chances) > 0.05


def test_what_tokens_add_to_drafts_follows_the_weights(reading):
    """It is computed once for all tokens, and anew when they were trained further."""
    (spec, head, seen), options = reading("fused parallel"), {"draft": "early_exit"}
    spec.generate(ONE, max_new_tokens=8, **options)
    head.mask.of_token.weight.mul_(-2)
    seen.clear()
    spec.generate(ONE, max_new_tokens=8, **options)
    assert_reads_as_forced(spec.decoder, head, seen, close_in_double)
