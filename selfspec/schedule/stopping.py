"""When a chain of drafts ends: after a fixed number, when the draft is unsure, or optimally."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from selfspec.config import DraftConfig
from selfspec.heads import Calibrator, Confidence
from selfspec.sampling.processors import is_at_hand
from selfspec.schedule.rounds import Rounds, Way


class Schedule:
    """Decides after each drafted token whether to draft another; this one always does."""

    def begin(self, confidence: Confidence, rows: int, sampled: bool) -> None:
        """A round of so many rows begins; `confidence` tells the chance of each draft."""

    def pause(self) -> None:
        """The next round belongs to another drafter."""

    def goes_on(self, scores: Tensor, tokens: Tensor, probs: Tensor | None) -> bool:
        """Whether to draft another token.

        Args:
            scores: `[rows, 1, n]` processed scores of the tokens that can be drafted.
            tokens: `[rows, 1]` indices in the scores of those just drafted.
            probs: `[rows, 1, n]` the probabilities of all, if tokens are sampled.
        """
        return True

    def end(self, drafted: int, accepted: Sequence[int]) -> None:
        """The round is verified: `accepted` of the `drafted` tokens in each row."""


class ConfidenceStop(Schedule):
    """Stops once the draft is unsure of its own token in every row (Kangaroo, Liu et al. 2024)."""

    def __init__(self, threshold: float):
        self.threshold = threshold

    def goes_on(self, scores: Tensor, tokens: Tensor, probs: Tensor | None) -> bool:
        """Whether some row's token has at least the threshold's probability."""
        known = scores.softmax(-1) if probs is None else probs
        confidence = known.gather(-1, tokens[..., None])
        return bool((confidence >= self.threshold).any())


class OptimalStop(Schedule):
    """Stops once another draft is expected to bring less than its time is worth.

    A draft brings a token if it and all drafts before it are accepted, on average over rows. Time
    is worth the tokens per second of the better of plain steps and chains (the marginal value
    theorem, Charnov 1976). The head's confidence in a draft is read only on a CPU: elsewhere it
    would wait for the device. What is known of `rounds` outlives the call.
    """

    def __init__(self, rounds: Rounds):
        self.rounds, self._began, self._made = rounds, 0.0, list[float]()
        self._done: tuple[Way, int] | None = None
        # Of the round in progress:
        self._batch, self._confidence = rounds.batch(1, sampled=False), uncalibrated()
        self._price, self._reach, self._drafted = 0.0, [1.0], 0
        self._read: list[list[float]] = []  # confidences of each draft, of each row

    def begin(self, confidence: Confidence, rows: int, sampled: bool) -> None:
        """Time the round from here."""
        self.pause()
        self._batch, self._confidence = self.rounds.batch(rows, sampled), confidence
        self._price, self._reach, self._drafted = self._batch.price, [1.0] * rows, 0
        self._read = []

    def pause(self) -> None:
        """The last round is over, and another one begins."""
        now = self.rounds.clock()
        if self._done is not None:
            way, drafts = self._done
            made = [at - self._began for at in self._made]
            self.rounds.learn(way, drafts, now - self._began, made)
        self._began, self._made, self._done = now, [], None

    def goes_on(self, scores: Tensor, tokens: Tensor, probs: Tensor | None) -> bool:
        """Whether the next draft is worth its time."""
        acceptance, position = self._batch.chain.acceptance, self._drafted
        self._drafted += 1
        chances = [acceptance.rate(position)] * len(self._reach)
        if is_at_hand(scores):
            self._made.append(self.rounds.clock())
            self._read.append(self._confidence(scores, probs, position))
            chances = [acceptance.chance(position, read) for read in self._read[-1]]
        self._reach = [reach * chance for reach, chance in zip(self._reach, chances, strict=True)]
        reach = sum(self._reach) / len(self._reach)
        return reach * acceptance.rate(position + 1) > self._price

    def end(self, drafted: int, accepted: Sequence[int]) -> None:
        """Learn from the round: `accepted` of the `drafted` tokens in each row."""
        chain = self._batch.chain
        self.verified(chain, [drafted] * len(accepted), accepted)
        for position, read in enumerate(self._read):
            for confidence, count in zip(read, accepted, strict=True):
                if position <= count:
                    chain.acceptance.learn_confidence(position, confidence, position < count)

    def verified(self, way: Way, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """The round, which lasts until the next one begins, was made in that way.

        Args:
            way: the way.
            drafted: drafts of each row.
            accepted: how many of them were accepted.
        """
        way.verified(drafted, accepted)
        self._done = way, max(drafted)


def make_schedule(config: DraftConfig, rounds: Rounds) -> Schedule:
    """The schedule that a config names, for a drafter of whose rounds that is known."""
    if config.schedule == "confidence":
        return ConfidenceStop(config.confidence)
    if config.schedule == "optimal":
        return OptimalStop(rounds)
    return Schedule()


def uncalibrated() -> Confidence:
    """The confidence in drafts of a model without a fitted calibrator."""
    return Calibrator().confidence()
