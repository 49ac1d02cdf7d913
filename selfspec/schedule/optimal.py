"""Drafting on for as long as another token is worth its time."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.heads import AcceptanceEstimator
from selfspec.schedule.base import Schedule
from selfspec.schedule.falls import Falls
from selfspec.schedule.pace import Pace, RoundClock

_ENOUGH = 8  # times asked that tell what it is worth
_LOOK = 16  # rounds, in one of which all drafts are asked of
_SERVED = 3.0  # decisions of a round that an answer serves
_FIRST_GUESS = 4  # drafts of the rounds that nothing is known before
_LONGEST = 16  # drafts of the longest rounds that are thought of
_AHEAD = 16  # drafts that are decided at once, at most
_HOLD = 4  # rounds that what was decided ahead holds for


class OptimalStop(Schedule):
    """Stops once another draft would bring less than the time it takes is worth.

    A draft behind others counts only if all of them are kept: it brings the product of their
    chances, times its own, which is not known before it is drafted and taken for the usual one.
    What is usual is learned from how drafts fare; what the probabilities that it was made from say
    of a draft counts as far as they have told more than that (`Falls`). A draft costs what one has
    cost so far, to make and to verify.

    Of a greedy draft the head's calibrator says how likely it stands. Of a drawn one it knows
    hardly more than how likely two draws would agree, which takes one operation instead of seven.

    Asking takes time, too. On a CPU it is done behind a draft where the answers have saved more, by
    other decisions than would be made without. Now and then, to find out, all drafts are asked of
    at the end of a round. Elsewhere clocks see a draft only because the question waits for it.

    What time is worth is the best rate, in tokens per second, that rounds of any one length would
    have with usual drafts, so that drafting longer pays as long as it would raise that rate (the
    marginal value rule, Charnov 1976). All is counted for a row on average: what is known holds
    when other rows have ended, and for other batches.

    Args:
        pace: times and gains so far; may outlive the call.
    """

    def __init__(self, pace: Pace):
        self.pace = pace
        self._clock = RoundClock(pace)
        self._judge: AcceptanceEstimator | None = None
        self._chances: list[list[float]] = []  # of each draft that was asked of, for each row
        self._waiting: list[Tensor] = []  # scores or probabilities of the others
        self._drawn = False  # which of them: whether tokens are drawn
        self._reach = [1.0]  # how likely all drafts are kept, for each row, or for all alike
        self._asked = [1.0]  # the same of those that were asked of
        self._rounds, self._made = 0, 0  # rounds so far, and drafts of this one
        self._knows = False  # whether there was enough to decide by when it began
        self._rows = 1
        # As they were at the last look ahead.
        self._rate = 0.0  # tokens per second: what time is worth
        self._cost = 0.0  # seconds of another draft
        self._stands: list[float] = []  # how likely a draft usually does, by those before it
        # Drafts behind which another is settled before they are made, how likely all are kept, for
        # which kind of drafts and how many rows, and the round from which on to look ahead again.
        self._settled, self._settled_reach = 0, [1.0]
        self._settled_for, self._look_next = (False, 0), 0

    def begin(self, judge: AcceptanceEstimator) -> None:
        """Time the round from here."""
        self._clock.begin()
        self._judge, self._chances, self._waiting = judge, [], []
        self._reach = self._asked = [1.0]
        self._rounds, self._made = self._rounds + 1, 0

    def pause(self) -> None:
        """The time of the last round ends here, and what it knew will be old."""
        self._clock.begin()
        self._look_next = self._rounds

    def goes_on(self, scores: Tensor, tokens: Tensor, probs: Tensor | None) -> bool:
        """Whether a row on average gains enough."""
        self._clock.mark()
        self._waiting.append(scores if probs is None else probs)
        place, self._made = self._made, self._made + 1
        if self._knows and 0 < place < self._settled:  # most drafts: weighing takes time, too
            return True
        if place == 0:
            self._look(scores, probs is not None)
        return self._weigh(place, scores.device)

    def _look(self, scores: Tensor, drawn: bool) -> None:
        """Before the first decision of a round: see what it can be made by."""
        self._drawn, self._rows, pace = drawn, scores.shape[0], self.pace
        timed = pace.known and pace.draft_seconds.value > 0
        self._knows = bool(timed and self._falls.fell.count)
        others = self._settled_for != (drawn, self._rows)
        if self._knows and (others or self._rounds >= self._look_next):
            self._look_ahead(scores.device)

    def _weigh(self, place: int, device: torch.device) -> bool:
        """Whether another draft pays behind the one with so many before it."""
        if not self._knows:
            if device.type != "cpu":
                self._ask()
            return place + 1 < _FIRST_GUESS
        if place < self._settled:
            return True
        before = self._settled_reach if place == self._settled else self._reach
        self._reach = self._further(before, place)
        if self._pays(place + 1, device):
            self._ask()
        return self._lost_by_another(self._reach, place + 1) < 0

    def _look_ahead(self, device: torch.device) -> None:
        """Settle the drafts that are made whatever comes.

        In one go that takes a fraction of what it takes draft by draft, between other things.
        """
        self._settled_for, self._look_next = (self._drawn, self._rows), self._rounds + _HOLD
        self._cost = self.pace.cost(self._rows)
        self._stands = [1 - self._falls.usual(place) for place in range(_LONGEST)]
        self._rate = self._best_rate()
        self._settled, self._settled_reach = 0, [1.0]
        while self._settled < _AHEAD:
            drafted = self._settled + 1
            reach = self._further(self._settled_reach, self._settled)
            if self._pays(drafted, device) or self._lost_by_another(reach, drafted) >= 0:
                return
            self._settled_reach, self._settled = reach, drafted

    def _best_rate(self) -> float:
        """The most tokens per second that rounds of one length have, as drafts usually fare."""
        tokens, seconds = self._without_drafts()
        reach, best = 1.0, 0.0
        for stands in self._stands:
            reach *= stands
            tokens += reach
            seconds += self._cost
            best = max(best, tokens / seconds)
        return best

    def _without_drafts(self) -> tuple[float, float]:
        """Tokens that a round brings besides drafts, and the seconds that it takes without."""
        return 1.0, self.pace.fixed_seconds.value

    def _pays(self, drafted: int, device: torch.device) -> bool:
        """Whether to ask of the drafts behind that many."""
        worth = self.pace.worth[self._drawn, drafted]
        seconds = self.pace.judge_seconds[self._drawn].value
        return _SERVED * worth.value > seconds or device.type != "cpu"

    def _wonders(self) -> bool:
        """Whether to ask of the drafts that wait, for what that would have been worth."""
        asked = len(self._chances)
        made = len(self._waiting) if self._knows else 0
        places = range(asked + 1, asked + made + 1)
        fewest = min((self.pace.worth[self._drawn, n].count for n in places), default=_ENOUGH)
        return bool(places) and (fewest < _ENOUGH or self._rounds % _LOOK == 1)

    def _ask(self) -> None:
        """Learn the chances of the drafts that wait, and what it is worth to know them."""
        assert self._judge is not None
        pace, began, first = self.pace, self.pace.clock(), len(self._chances)
        if self._drawn:
            given = [_agreement(probs) for probs in self._waiting]
        else:
            given = self._judge([scores[:, 0].softmax(-1) for scores in self._waiting], first)
        pace.judge_seconds[self._drawn].add(pace.clock() - began)
        guess = reach = self._asked
        for place, chances in enumerate(given, first):
            fall = [self._falls.expected(place, 1 - chance) for chance in chances]
            reach = [r * (1 - f) for r, f in zip(_widened(reach, len(fall)), fall, strict=True)]
            guess = self._further(guess, place)
            if self._knows:
                lost = self._lost_by_another(reach, place + 1)
                other = self._lost_by_another(guess, place + 1) < 0
                worth = abs(lost) if other != (lost < 0) else 0.0
                pace.worth[self._drawn, place + 1].add(worth)
        self._chances += given
        self._waiting, self._reach, self._asked = [], reach, reach

    def _further(self, reach: list[float], place: int) -> list[float]:
        """How likely drafts are kept, with one more that was not asked of."""
        stands = self._usually_stands(place)
        return [chance * stands for chance in reach]

    def _all_kept(self) -> list[float]:
        """How likely all drafts so far are kept, for each row."""
        if self._made > self._settled:
            return _widened(self._reach, self._rows)
        return [math.prod(self._stands[: self._made])] * self._rows

    def _usually_stands(self, place: int) -> float:
        """How likely a draft with so many before it stands, if it is not asked of."""
        return self._stands[place] if place < len(self._stands) else 1 - self._falls.usual(place)

    def _lost_by_another(self, reach: list[float], drafted: int) -> float:
        """Seconds that a draft takes beyond what it brings, behind that many."""
        gain = self._usually_stands(drafted) * sum(reach) / len(reach)
        return self._cost - gain / self._rate

    def end(self, drafted: int, accepted: Sequence[int]) -> None:
        """Learn from the round: `accepted` of the `drafted` tokens stand, in each row."""
        self._end(drafted, accepted)

    def _end(
        self, drafted: int, accepted: Sequence[int], besides: float = 0.0, cut: bool = False
    ) -> None:
        """The same, where what was verified besides took as long as so many drafts.

        What is `cut` short for it says nothing of how much another draft would have been worth.
        """
        if self._wonders():
            self._ask()
        rows = len(accepted)
        self._clock.end(1 + sum(accepted) / rows, rows, besides)
        self._learn(drafted, [min(kept, drafted) for kept in accepted], self._chances, cut)

    def seen(self, drafted: int, accepted: Sequence[int]) -> None:
        """Learn how drafts fared that this would have made, in a round of another way."""
        self._learn(drafted, accepted, [])

    def _learn(
        self,
        drafted: int,
        accepted: Sequence[int],
        chances: Sequence[Sequence[float]],
        cut: bool = False,
    ) -> None:
        asked = len(chances)
        for row, kept in enumerate(accepted):
            for place in range(min(drafted, kept + 1)):
                fear = 1 - chances[place][row] if place < asked else None
                self._falls.add(place, place == kept, fear)
            if kept == drafted and not cut:
                self._falls.unseen(drafted)

    def further(self, drafted: int, most: int) -> float:
        """Drafts up to `most` that would usually be kept behind that many, if all of these are."""
        kept = [1 - self._falls.usual(place) for place in range(drafted, most)]
        return sum(itertools.accumulate(kept, operator.mul))

    @property
    def _falls(self) -> Falls:
        return self.pace.falls[self._drawn]


def _agreement(probs: Tensor) -> list[float]:
    """How likely two draws from `probs` `[rows, 1, vocab]` agree, in each row (Simpson 1949)."""
    # In this order NaN, of scores that are NaN, is sure to fall.
    return [max(0.0, chance) for chance in torch.linalg.vecdot(probs, probs)[:, 0].tolist()]


def _widened(reach: list[float], rows: int) -> list[float]:
    return reach if len(reach) == rows else reach * rows
