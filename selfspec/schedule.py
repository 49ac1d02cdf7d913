"""How long to draft."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from selfspec.config import DraftConfig
from selfspec.heads import Calibrator, Judge
from selfspec.pace import Pace, RoundClock

_FIRST_GUESS = 4  # drafts of the rounds that nothing is known before


class Schedule:
    """Decides after each drafted token whether to draft another; this one always does."""

    def begin(self, judge: Judge) -> None:
        """A round begins, with what says how likely a draft is kept."""

    def goes_on(self, scores: Tensor, tokens: Tensor) -> bool:
        """Whether to draft on.

        Args:
            scores: `[rows, vocab]` processed draft scores.
            tokens: `[rows]` the tokens just drafted from them.
        """
        return True

    def end(self, drafted: int, accepted: Sequence[int]) -> None:
        """The round is decided: `accepted` of the `drafted` tokens stand, in each row."""


class ConfidenceStop(Schedule):
    """Stops once the draft is unsure of its own token in every row (Kangaroo, Liu et al. 2024).

    Args:
        threshold: the probability below which a row is unsure.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold

    def goes_on(self, scores: Tensor, tokens: Tensor) -> bool:
        """Whether some row's token has at least the threshold's probability."""
        confidence = scores.float().softmax(-1).gather(-1, tokens[:, None])
        return bool((confidence >= self.threshold).any())


class OptimalStop(Schedule):
    """Stops once another draft would bring less than the time it takes is worth.

    A draft behind others counts only if all of them are kept: it brings the product of their
    calibrated chances, times its own, which is not known before it is drafted: it is taken for the
    middle between that of the draft before it and what drafts have on average. A head that was
    right more often so far than its chances said (a text that goes in circles) is believed more,
    another less. A draft costs what one has cost so far.

    What time is worth is the rate so far, in tokens per second, so that drafting longer pays as
    long as it would raise that rate (the marginal value rule, Charnov 1976). All is counted for a
    row on average: what is known holds when other rows have ended, and for other batches.

    Args:
        pace: times and gains so far; may outlive the call.
    """

    def __init__(self, pace: Pace):
        self.pace = pace
        self._clock = RoundClock(pace)
        self._judge: Judge | None = None
        self._reach: list[float] = []  # of each row, how likely all drafts so far are kept
        self._foreseen = 0.0
        self._depth = 0

    def begin(self, judge: Judge) -> None:
        """Time the round from here."""
        self._clock.begin()
        self._judge, self._reach, self._foreseen, self._depth = judge, [], 0.0, 0

    def goes_on(self, scores: Tensor, tokens: Tensor) -> bool:
        """Whether a row on average gains enough."""
        self._clock.mark()
        assert self._judge is not None
        chance = self._judge(scores, self._depth)
        before = self._reach or [1.0] * len(chance)
        self._reach = [reach * own for reach, own in zip(before, chance, strict=True)]
        self._depth += 1
        self._foreseen += sum(self._reach) / len(chance)
        if not self.pace.known:
            return self._depth < _FIRST_GUESS
        self.pace.chance.add(sum(chance) / len(chance))
        usual = self.pace.chance.value
        further = [r * (own + usual) / 2 for r, own in zip(self._reach, chance, strict=True)]
        gain = self.pace.bias * sum(further) / len(further)
        return gain > self.pace.draft_seconds.value * self.pace.rate

    def end(self, drafted: int, accepted: Sequence[int]) -> None:
        """Learn from the round."""
        kept = sum(accepted) / len(accepted)
        self._clock.end(1 + kept)
        if drafted:
            self.pace.kept.add(kept)
            self.pace.foreseen.add(self._foreseen)


def make_schedule(config: DraftConfig, pace: Pace | None = None) -> Schedule:
    """The schedule that a config names; `pace` is what is known from earlier calls."""
    if config.schedule == "confidence":
        return ConfidenceStop(config.confidence)
    if config.schedule == "optimal":
        return OptimalStop(pace or Pace())
    return Schedule()


def plain_judge() -> Judge:
    """What to go by where nothing was calibrated."""
    return Calibrator().judge()
