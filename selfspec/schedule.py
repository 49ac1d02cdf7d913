"""How long to draft."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.config import DraftConfig
from selfspec.heads import Calibrator, Judge
from selfspec.pace import Pace, RoundClock

_ENOUGH = 8  # times asked that tell what it saves
_LOOK = 16  # rounds of a call, in one of which it is asked behind every draft
_MOST_WAITING = 4  # drafts that the calibrator is not yet asked of
_FIRST_GUESS = 4  # drafts of the rounds that nothing is known before


class Schedule:
    """Decides after each drafted token whether to draft another; this one always does."""

    def begin(self, judge: Judge) -> None:
        """A round begins, with what says how likely a draft is kept."""

    def pause(self) -> None:
        """The next round is another drafter's."""

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

    Asking the calibrator takes time, too. On a CPU it is asked behind a draft if stops there have
    saved more than that on average, and now and then to find out; if not, it is asked later, of
    several drafts at once. Elsewhere clocks see a draft only because the question waits for it.

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
        self._chances: list[list[float]] = []  # of each draft that was asked of, for each row
        self._reach: list[float] = []  # of each row, how likely all these are kept
        self._waiting: list[Tensor] = []  # probabilities of the drafts that were not yet
        self._rounds = 0

    def begin(self, judge: Judge) -> None:
        """Time the round from here."""
        self._clock.begin()
        self._judge, self._chances, self._reach, self._waiting = judge, [], [], []
        self._rounds += 1

    def pause(self) -> None:
        """The time of the last round ends here."""
        self._clock.begin()

    def goes_on(self, scores: Tensor, tokens: Tensor, probs: Tensor | None) -> bool:
        """Whether a row on average gains enough."""
        self._clock.mark()
        pace = self.pace
        self._waiting.append(_known(probs, scores))
        drafted = len(self._chances) + len(self._waiting)
        if not self._pays(drafted, scores.device) and len(self._waiting) < _MOST_WAITING:
            return True
        lost = [self._lost_by_another(given) for given in self._ask()]
        if not pace.known:
            return drafted < _FIRST_GUESS
        for place, seconds in enumerate(lost, drafted - len(lost) + 1):
            pace.saved[place].add(max(0.0, seconds))
        return lost[-1] < 0

    def _pays(self, drafted: int, device: torch.device) -> bool:
        """Whether to ask the calibrator behind that many drafts."""
        saved = self.pace.saved[drafted]
        unsure = saved.count < _ENOUGH or self._rounds % _LOOK == 1
        return unsure or device.type != "cpu" or saved.value > self.pace.judge_seconds.value

    def _ask(self) -> list[list[float]]:
        """The chances of the drafts that wait, of each for each row."""
        assert self._judge is not None
        began = self.pace.clock()
        given = self._judge(self._waiting, len(self._chances))
        self.pace.judge_seconds.add(self.pace.clock() - began)
        self._waiting = []
        return given

    def _lost_by_another(self, given: list[float]) -> float:
        """Seconds that a draft takes beyond what it brings, behind one with these chances."""
        pace, risk = self.pace, self.pace.risk
        chances = [1 - min(1.0, risk * (1 - chance)) for chance in given]
        before = self._reach or [1.0] * len(given)
        self._reach = [reach * own for reach, own in zip(before, chances, strict=True)]
        self._chances.append(given)
        pace.chance.add(sum(chances) / len(chances))
        gain = pace.chance.value * sum(self._reach) / len(self._reach)
        return pace.draft_seconds.value - (gain / pace.rate if pace.rate else 0.0)

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


def plain_judge() -> Judge:
    """What to go by where nothing was calibrated."""
    return Calibrator().judge()
