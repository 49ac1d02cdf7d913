"""When a chain of drafts ends: after a fixed number, when the draft is unsure, or optimally."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from selfspec.config import DraftConfig
from selfspec.heads import Calibrator, Confidence
from selfspec.schedule.rounds import Rounds, RoundTimer

_CLEAR = 2.0  # what a draft is worth decides alone if it is so far above or below its price


class Schedule:
    """Decides after each drafted token whether to draft another; this one always does."""

    def begin(self, confidence: Confidence, rows: int, sampled: bool) -> None:
        """A round of so many rows begins; `confidence` tells the chance of each draft."""

    def pause(self) -> None:
        """The next round belongs to another drafter."""

    def goes_on(self, scores: Tensor, tokens: Tensor, probs: Tensor | None) -> bool:
        """Whether to draft another token.

        Args:
            scores: `[rows, 1, vocab]` processed draft scores.
            tokens: `[rows, 1]` the tokens just drafted from them.
            probs: `[rows, 1, vocab]` their probabilities, if tokens are sampled.
        """
        return True

    def end(self, drafted: int, accepted: Sequence[int]) -> None:
        """The round is verified: `accepted` of the `drafted` tokens in each row."""


class ConfidenceStop(Schedule):
    """Stops once the draft is unsure of its own token in every row (Kangaroo, Liu et al. 2024).

    Args:
        threshold: the probability below which a row is unsure.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold

    def goes_on(self, scores: Tensor, tokens: Tensor, probs: Tensor | None) -> bool:
        """Whether some row's token has at least the threshold's probability."""
        known = scores.softmax(-1) if probs is None else probs
        confidence = known.gather(-1, tokens[..., None])
        return bool((confidence >= self.threshold).any())


class OptimalStop(Schedule):
    """Stops once another draft is expected to bring less than its time is worth.

    A draft brings a token if it and all drafts before it are accepted. Time is worth the tokens per
    second of the better of plain steps and chains (the marginal value theorem, Charnov 1976).
    Tokens are averaged over rows. The head's confidence in a draft is read only where what is
    known of its position does not decide, because reading takes time; and only on a CPU, because
    elsewhere it would wait for the device.

    Args:
        rounds: what is known of rounds, which outlives the call.
    """

    def __init__(self, rounds: Rounds):
        self.rounds, self.timer = rounds, RoundTimer(rounds.clock)
        self._confidence = uncalibrated()
        self._batch, self._acceptance = rounds.batch(1, False), rounds.acceptance[False]
        self._made, self._price, self._reach = 0, 0.0, [1.0]
        self._read: dict[int, list[float]] = {}  # confidences by position, of each row

    def begin(self, confidence: Confidence, rows: int, sampled: bool) -> None:
        """Time the round from here."""
        self.timer.begin()
        self._batch = self.rounds.batch(rows, sampled)
        self._acceptance, self._price = self.rounds.acceptance[sampled], self._batch.price
        self._confidence, self._made, self._reach, self._read = confidence, 0, [1.0], {}

    def pause(self) -> None:
        """End the timing of the last round."""
        self.timer.begin()

    def goes_on(self, scores: Tensor, tokens: Tensor, probs: Tensor | None) -> bool:
        """Whether the next draft is worth its time."""
        at_hand = is_at_hand(scores)
        if at_hand:
            self.timer.mark()
        position, self._made = self._made, self._made + 1
        following = self._acceptance.rate(position + 1)
        chances = [self._acceptance.rate(position)]
        worth = self._mean_reach() * chances[0] * following
        if at_hand and self._price / _CLEAR < worth < self._price * _CLEAR:
            self._read[position] = self._confidence(scores, probs, position)
            chances = [self._acceptance.chance(position, read) for read in self._read[position]]
        reach = self._reach * len(chances) if len(self._reach) == 1 else self._reach
        chances = chances * len(reach) if len(chances) == 1 else chances
        self._reach = [so_far * chance for so_far, chance in zip(reach, chances, strict=True)]
        return self._mean_reach() * following > self._price

    def _mean_reach(self) -> float:
        """Chance that all drafts so far are accepted, on average over rows."""
        return sum(self._reach) / len(self._reach)

    def end(self, drafted: int, accepted: Sequence[int]) -> None:
        """Learn from the round: `accepted` of the `drafted` tokens in each row."""
        self.timer.end(self._batch.chain, drafted, accepted)
        self._acceptance.fade()
        for row, count in enumerate(accepted):
            for position in range(min(drafted, count + 1)):
                self._acceptance.learn(position, position < count)
                if position in self._read:
                    read = self._read[position][row]
                    self._acceptance.learn_confidence(position, read, position < count)


def is_at_hand(tensor: Tensor) -> bool:
    """Whether reading a tensor waits for nothing, because its device runs synchronously."""
    return tensor.device.type == "cpu"


def make_schedule(config: DraftConfig, rounds: Rounds) -> Schedule:
    """The schedule that a config names.

    Args:
        config: the draft config.
        rounds: what is known of rounds with the drafter, which outlives the call.
    """
    if config.schedule == "confidence":
        return ConfidenceStop(config.confidence)
    if config.schedule == "optimal":
        return OptimalStop(rounds)
    return Schedule()


def uncalibrated() -> Confidence:
    """The confidence in drafts of a model without a fitted calibrator."""
    return Calibrator().confidence()
