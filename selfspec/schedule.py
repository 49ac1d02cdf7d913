"""How long to draft."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.config import DraftConfig
from selfspec.falls import Falls
from selfspec.heads import Calibrator, Judge
from selfspec.pace import Pace, RoundClock

_ENOUGH = 8  # times asked that tell what it is worth
_LOOK = 16  # rounds of a call, in one of which it is asked of every draft
_SERVED = 3.0  # decisions of a round that an answer serves
_FIRST_GUESS = 4  # drafts of the rounds that nothing is known before
_LONGEST = 16  # drafts of the longest rounds that are thought of
_AHEAD = 16  # drafts that are decided at once, at most
_HOLD = 4  # rounds that what was decided ahead holds for


class Schedule:
    """Decides after each drafted token whether to draft another; this one always does."""

    def begin(self, judge: Judge) -> None:
        """A round begins, with what says how likely a draft is kept."""

    def pause(self) -> None:
        """The next round is another drafter's."""

    def goes_on(self, scores: Tensor, tokens: Tensor, probs: Tensor | None) -> bool:
        """Whether to draft on.

        Args:
            scores: `[rows, 1, vocab]` processed draft scores.
            tokens: `[rows, 1]` the tokens just drafted from them.
            probs: `[rows, 1, vocab]` their probabilities, where tokens are drawn.
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
        confidence = _known(probs, scores).gather(-1, tokens[..., None])
        return bool((confidence >= self.threshold).any())


class OptimalStop(Schedule):
    """Stops once another draft would bring less than the time it takes is worth.

    A draft behind others counts only if all of them are kept: it brings the product of their
    chances, times its own, which is not known before it is drafted and taken for the usual one.
    What is usual is learned from how drafts fare; what the head's calibrator says of a draft counts
    as far as it has told more than that (`Falls`). A draft costs what one has cost so far, to make
    and to verify.

    Asking the calibrator takes time, too. On a CPU it is asked behind a draft where its answers
    have saved more, by other decisions than would be made without. Now and then, to find out, it is
    asked of all at the end of a round. Elsewhere clocks see a draft only because the question waits
    for it.

    What time is worth is the best rate, in tokens per second, that rounds of any one length would
    have with usual drafts, so that drafting longer pays as long as it would raise that rate (the
    marginal value rule, Charnov 1976). All is counted for a row on average: what is known holds
    when other rows have ended, and for other batches.

    Behind the drafts tokens may be copied from elsewhere, which cost no more than to be verified
    (`copies`). What they bring makes time worth more.

    Args:
        pace: times and gains so far; may outlive the call.
    """

    def __init__(self, pace: Pace):
        self.pace = pace
        self._clock = RoundClock(pace)
        self._judge: Judge | None = None
        self._chances: list[list[float]] = []  # of each draft that was asked of, for each row
        self._waiting: list[Tensor] = []  # scores or probabilities of the others
        self._drawn = False  # which of them: whether tokens are drawn
        self._reach = [1.0]  # how likely all drafts are kept, for each row, or for all alike
        self._asked = [1.0]  # the same of those that were asked of
        self._rounds = 0
        self._rate = 0.0  # tokens per second: what time is worth
        self._rows = 1
        # Drafts behind which another is settled before they are made, how likely all are kept, and
        # the round in which that was settled.
        self._settled, self._settled_reach, self._settled_in = 0, [1.0], -_HOLD

    def begin(self, judge: Judge) -> None:
        """Time the round from here."""
        self._clock.begin()
        self._judge, self._chances, self._waiting = judge, [], []
        self._reach = self._asked = [1.0]
        self._rounds += 1

    def pause(self) -> None:
        """The time of the last round ends here."""
        self._clock.begin()

    def goes_on(self, scores: Tensor, tokens: Tensor, probs: Tensor | None) -> bool:
        """Whether a row on average gains enough."""
        self._clock.mark()
        place = len(self._chances) + len(self._waiting)
        self._drawn, self._rows = probs is not None, scores.shape[0]
        self._waiting.append(scores if probs is None else probs)
        if not self._known:
            if scores.device.type != "cpu":
                self._ask()
            return place + 1 < _FIRST_GUESS
        if place == 0 and self._rounds >= self._settled_in + _HOLD:
            self._look_ahead(scores.device)
        if place < self._settled:
            return True
        before = self._settled_reach if place == self._settled else self._reach
        self._reach = self._further(before, place)
        if self._pays(place + 1, scores.device):
            self._ask()
        return self._lost_by_another(self._reach, place + 1) < 0

    @property
    def _known(self) -> bool:
        """Whether there is enough to decide by."""
        pace = self.pace
        return bool(pace.known and pace.draft_seconds.value > 0 and self._falls.fell.count)

    def _look_ahead(self, device: torch.device) -> None:
        """Settle the drafts that are made whatever comes.

        In one go that takes a fraction of what it takes draft by draft, between other things.
        """
        self._rate, self._settled_in = self._best_rate(), self._rounds
        self._settled, self._settled_reach = 0, [1.0]
        while self._settled < _AHEAD:
            drafted = self._settled + 1
            reach = self._further(self._settled_reach, self._settled)
            if self._pays(drafted, device) or self._lost_by_another(reach, drafted) >= 0:
                return
            self._settled_reach, self._settled = reach, drafted

    def _best_rate(self) -> float:
        """The most tokens per second that rounds of one length have, as drafts usually fare."""
        cost, seconds = self.pace.cost(self._rows), self.pace.fixed_seconds.value
        tokens, reach, best = 1 + self.pace.copied[self._drawn].value, 1.0, 0.0
        for place in range(_LONGEST):
            reach *= 1 - self._falls.usual(place)
            tokens += reach
            seconds += cost
            best = max(best, tokens / seconds)
        return best

    def _pays(self, drafted: int, device: torch.device) -> bool:
        """Whether to ask the calibrator behind that many drafts."""
        worth = self.pace.worth[self._drawn, drafted]
        return _SERVED * worth.value > self.pace.judge_seconds.value or device.type != "cpu"

    def _wonders(self) -> bool:
        """Whether to ask it of the drafts that wait, for what that would have been worth."""
        asked = len(self._chances)
        made = len(self._waiting) if self._known else 0
        places = range(asked + 1, asked + made + 1)
        fewest = min((self.pace.worth[self._drawn, n].count for n in places), default=_ENOUGH)
        return bool(places) and (fewest < _ENOUGH or self._rounds % _LOOK == 1)

    def _ask(self) -> None:
        """Learn the chances of the drafts that wait, and what it is worth to know them."""
        assert self._judge is not None
        pace, began, first = self.pace, self.pace.clock(), len(self._chances)
        waiting = [states[:, 0] for states in self._waiting]
        drafts = waiting if self._drawn else [scores.softmax(-1) for scores in waiting]
        given = self._judge(drafts, first)
        pace.judge_seconds.add(pace.clock() - began)
        guess = reach = self._asked
        for place, chances in enumerate(given, first):
            fall = [self._falls.expected(place, 1 - chance) for chance in chances]
            reach = [r * (1 - f) for r, f in zip(_widened(reach, len(fall)), fall, strict=True)]
            guess = self._further(guess, place)
            if self._known:
                lost = self._lost_by_another(reach, place + 1)
                other = self._lost_by_another(guess, place + 1) < 0
                worth = abs(lost) if other != (lost < 0) else 0.0
                pace.worth[self._drawn, place + 1].add(worth)
        self._chances += given
        self._waiting, self._reach, self._asked = [], reach, reach

    def _further(self, reach: list[float], place: int) -> list[float]:
        """How likely drafts are kept, with one more of which the calibrator was not asked."""
        kept = 1 - self._falls.usual(place)
        return [chance * kept for chance in reach]

    def _lost_by_another(self, reach: list[float], drafted: int) -> float:
        """Seconds that a draft takes beyond what it brings, behind that many."""
        gain = (1 - self._falls.usual(drafted)) * sum(reach) / len(reach)
        return self.pace.cost(self._rows) - gain / self._rate

    def copies(self, follow: Sequence[bool], most: int) -> int:
        """How many tokens to copy behind the drafts.

        Args:
            follow: of each row, whether it has something to copy.
            most: tokens that may be copied.
        """
        if not (self._known and any(follow)):
            return 0
        reach = _widened(self._reach, len(follow))
        gain = sum(itertools.compress(reach, follow)) / len(follow)
        seconds = self.pace.verifying(self._rows)
        for place in range(most):
            gain *= 1 - self.pace.copies[self._drawn].usual(place)
            # One, now and then, says whether this has become worth it.
            if gain < seconds * self._rate and (place or self._rounds % _LOOK):
                return place
        return most

    def end(self, drafted: int, accepted: Sequence[int], copied: Sequence[int] = ()) -> None:
        """Learn from the round.

        Args:
            drafted: drafts of each row.
            accepted: of these and of what was copied behind them, how many stand.
            copied: tokens of each row that were.
        """
        if self._wonders():
            self._ask()
        self._clock.end(1 + sum(accepted) / len(accepted), len(accepted), max(copied, default=0))
        self._learn(drafted, [min(kept, drafted) for kept in accepted], self._chances)
        for kept, count in itertools.zip_longest(accepted, copied, fillvalue=0):
            beyond = kept - drafted
            self.pace.copied[self._drawn].add(max(0, beyond))
            for place in range(min(count, beyond + 1)):
                self.pace.copies[self._drawn].add(place, place == beyond)

    def seen(self, drafted: int, accepted: Sequence[int]) -> None:
        """Learn how drafts fared that this would have made, in a round of another way."""
        self._learn(drafted, accepted, [])

    def _learn(
        self, drafted: int, accepted: Sequence[int], chances: Sequence[Sequence[float]]
    ) -> None:
        asked = len(chances)
        for row, kept in enumerate(accepted):
            for place in range(min(drafted, kept + 1)):
                fear = 1 - chances[place][row] if place < asked else None
                self._falls.add(place, place == kept, fear)
            if kept == drafted:
                self._falls.unseen(drafted)

    def further(self, drafted: int, most: int) -> float:
        """Drafts up to `most` that would usually be kept behind that many, if all of these are."""
        kept = [1 - self._falls.usual(place) for place in range(drafted, most)]
        return sum(itertools.accumulate(kept, operator.mul))

    @property
    def _falls(self) -> Falls:
        return self.pace.falls[self._drawn]


def _widened(reach: list[float], rows: int) -> list[float]:
    return reach if len(reach) == rows else reach * rows


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
