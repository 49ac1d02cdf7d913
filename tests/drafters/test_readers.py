"""`selfspec.drafters.readers`: what a reader remembers of verified tokens, without any model.

The states of a token are its position (at the exit) and ten times that (the stream that features
are made of); those of a rejected draft are garbage. Whatever was drafted, accepted, deferred,
selected and joined: a reader has to give back the positions.
"""

from __future__ import annotations

import random

import pytest
import torch

from selfspec.drafters.readers.verified import OwnKV, VerifiedStates, accepted_indices

_GARBAGE = -1.0


def _fuse(streams: list[torch.Tensor]) -> torch.Tensor:
    return streams[0] + 1


def _block(starts: list[int], counts: list[int], width: int) -> list[torch.Tensor]:
    """`width` tokens from `starts` on, of which each row's first `counts` will be accepted."""
    at = torch.arange(width)
    positions = torch.tensor(starts)[:, None] + at
    accepted = at < torch.tensor(counts)[:, None]
    states = torch.where(accepted, positions, _GARBAGE).float()[..., None]
    return [states, 10 * states]


class _Text:
    """Rows that grow round by round, as the slots count them, and what a reader keeps of them."""

    def __init__(self, prompts: list[int], chunk: int, features: bool):
        self.lengths = prompts
        self.states = VerifiedStates(_fuse if features else None)
        self.features = features
        for offset in range(0, max(prompts), chunk):
            left = [length - offset for length in prompts]
            kept = _block([offset] * len(prompts), left, min(chunk, max(prompts) - offset))
            before = self.states.read_prompt(kept, offset == 0, left, prompts)
            assert (before is not None) == features

    def round(self, source: random.Random, others: bool) -> None:
        width = source.randint(1, 5)
        counts = [source.randint(1, width) for _ in self.lengths]
        block = _block(self.lengths, counts, width)
        (self.states.note if others else self.states.replace)(self.lengths, block)
        self.lengths = [length + n for length, n in zip(self.lengths, counts, strict=True)]

    def check(self) -> None:
        self.states.merge()
        pending = torch.full((len(self.lengths), 1, 1), 7777.0)
        width = 1 + max(
            n - start for n, start in zip(self.lengths, self.states.starts, strict=True)
        )
        exits = self.states.exit_from(self.states.starts, width, pending)
        for row, (start, end) in enumerate(zip(self.states.starts, self.lengths, strict=True)):
            assert exits[row, : end - start, 0].tolist() == list(range(start, end))
        if not self.features:
            return
        fused = self.states.features_before(self.states.starts, width)
        for row, (start, end) in enumerate(zip(self.states.starts, self.lengths, strict=True)):
            expected = [10 * position + 1 for position in range(start - 1, end)]
            assert fused[row, : end - start + 1, 0].tolist() == expected


@pytest.mark.parametrize("features", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_states_of_verified_tokens_are_given_back_by_position(seed, features):
    source = random.Random(seed)
    prompts = [source.randint(1, 9) for _ in range(source.randint(1, 3))]
    text = _Text(prompts, source.randint(2, 12), features)
    for _ in range(6):
        text.round(source, others=source.random() < 0.6)
        if source.random() < 0.3:
            text.check()
    text.check()


def test_features_of_a_prompt_are_those_of_the_token_before():
    states = VerifiedStates(_fuse)
    first = states.read_prompt(_block([0, 0], [3, 5], 4), True, [3, 5], [3, 5])
    assert first is not None and first[1, :, 0].tolist() == [0, 1, 11, 21]
    second = states.read_prompt(_block([4, 4], [0, 1], 1), False, [-1, 1], [3, 5])
    assert second is not None and second[1, :, 0].tolist() == [31]
    assert states.features_before([3, 5])[:, 0, 0].tolist() == [21, 41]


@pytest.mark.parametrize("deferred", [True, False])
def test_rows_leave_and_join_with_their_states(deferred):
    source = random.Random(0)
    one, other = _Text([4, 2, 6], 16, True), _Text([3], 16, True)
    for text in (one, other):
        text.round(source, others=False)
        text.round(source, others=deferred)
    one.states.select([2, 0])
    one.lengths = [one.lengths[2], one.lengths[0]]
    one.states.join(other.states)
    one.lengths = one.lengths + other.lengths
    one.check()


def test_accepted_tokens_of_successive_blocks():
    starts = [[0, 0], [2, 1], [4, 4]]
    assert accepted_indices(starts, [3, 3, 1]) == [[0, 1, 3, 4, 6], [0, 3, 4, 5, 6]]


def test_kv_is_final_up_to_the_first_token_that_was_not_verified():
    kv = OwnKV()
    kv.written([5, 3])
    assert kv.missing([5, 3]) == ([5, 3], [0, 0])
    kv.written([9, 7])  # four drafts each, of which two and all are accepted
    assert kv.missing([7, 7]) == ([7, 7], [0, 0])
    assert kv.missing([7, 10]) == ([7, 7], [0, 3])
    kv.rejected([7, 10])  # then another drafter's tokens follow in the first row
    assert kv.missing([12, 11]) == ([7, 7], [5, 4])
    other = OwnKV()
    other.written([4])
    kv.select([1])
    kv.join(other)
    assert kv.missing([11, 4]) == ([7, 4], [4, 0])
