"""How long to draft."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from torch import Tensor

from selfspec.config import DraftConfig
from selfspec.heads import Calibrator, Judge
from selfspec.pace import Pace, RoundClock

_FIRST_GUESS = 4  # drafts of the rounds that nothing is known before


class Schedule:
    """Decides after each drafted token whether to draft another; this one always does."""

    def begin(self, judge: Judge) -> None:
        """A round begins, with what says how likely a draft is kept."""

    def goes_on(self, scores: Tensor, tokens: Tensor, probs: Tensor | None) -> bool:
        """Whether to draft on.

        Args:
            scores: `[rows, vocab]` processed draft scores.
            tokens: `[rows]` the tokens just drafted from them.
            probs: `[rows, vocab]` their probabilities, where tokens are drawn.
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

    def goes_on(self, scores: Tensor, tokens: Tensor, probs: Tensor | None) -> bool:
        """Whether some row's token has at least the threshold's probability."""
        confidence = _known(probs, scores).gather(-1, tokens[:, None])
        return bool((confidence >= self.threshold).any())


class OptimalStop(Schedule):
    """Stops once another draft would bring less than the time it takes is worth.

    A draft behind others counts only if all of them are kept: it brings the product of their
    chances, times its own, which is not known before it is drafted and taken for what drafts have
    on average. Chances are those that the head's calibrator gives, but for how often drafts have
    fallen so far: where fewer fell than it feared (a text that goes in circles), each is feared
    less. A draft costs what one has cost so far.

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
        self._chances: list[list[float]] = []  # of each draft so far, for each row
        self._reach: list[float] = []  # of each row, how likely all drafts so far are kept

    def begin(self, judge: Judge) -> None:
        """Time the round from here."""
        self._clock.begin()
        self._judge, self._chances, self._reach = judge, [], []

    def goes_on(self, scores: Tensor, tokens: Tensor, probs: Tensor | None) -> bool:
        """Whether a row on average gains enough."""
        self._clock.mark()
        assert self._judge is not None
        pace, given = self.pace, self._judge(_known(probs, scores), len(self._chances))
        risk = pace.risk
        chances = [1 - min(1.0, risk * (1 - chance)) for chance in given]
        before = self._reach or [1.0] * len(given)
        self._reach = [reach * own for reach, own in zip(before, chances, strict=True)]
        self._chances.append(given)
        pace.chance.add(sum(chances) / len(chances))
        if not pace.known:
            return len(self._chances) < _FIRST_GUESS
        gain = pace.chance.value * sum(self._reach) / len(self._reach)
        return gain > pace.draft_seconds.value * pace.rate

    def end(self, drafted: int, accepted: Sequence[int]) -> None:
        """Learn from the round."""
        self._clock.end(1 + sum(accepted) / len(accepted))
        for row, kept in enumerate(accepted):
            for place, chances in enumerate(self._chances[: min(drafted, kept + 1)]):
                self.pace.falls.add(float(place == kept))
                self.pace.feared.add(1 - chances[row])


def _known(probs: Tensor | None, scores: Tensor) -> Tensor:
    return scores.softmax(-1) if probs is None else probs


def make_schedule(config: DraftConfig, pace: Pace | None = None) -> Schedule:
    """The schedule that a config names; `pace` is what is known from earlier calls."""
    if config.schedule == "confidence":
        return ConfidenceStop(config.confidence)
    if config.schedule == "optimal":
        return OptimalStop(pace or Pace())
    return Schedule()


@cache
def plain_judge() -> Judge:
    """What to go by where nothing was calibrated."""
    return Calibrator().judge()
