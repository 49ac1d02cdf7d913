"""What drafting costs and brings here and now: running estimates from the clock.

Estimates outlive a call, for times belong to a device and not to a text.
"""

from __future__ import annotations

import operator
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from selfspec.schedule.falls import Falls
from selfspec.schedule.mean import Mean, Slope

FAST, _SLOW = 0.03, 0.1  # weight of the newest round: in what a text brings, in what a pass costs
_WIDENING_DOUBT = 20.0  # squared distances of drafts from their mean, in sum, that showed nothing
_LATELY = 0.2  # weight of the newest round in what drafts and the rest of a round were lately
_SAME = 0.25  # a number of drafts no further from their mean tells nothing
_FEW = 2  # drafts of rounds from which, if no other is longer, nothing can be told
_JUMP = 0.3  # share of that rest by which a round's may differ from it and tell of its drafts


@dataclass
class Pace:
    """What rounds of one way to draft cost and bring.

    Attributes:
        draft_seconds: of making one more draft in a chain.
        widening: by how much every draft lengthens the rest of a round, above all verification, by
            the number of rows.
        fixed_seconds: of a round without drafts and what was asked of them.
        tokens: emitted in a round, of a row on average.
        falls: how likely drafts fall, by whether they are drawn.
        copy_falls: how likely greedy text parts from what is copied behind drafts, by how many
            tokens before had been said before.
        copies_made: tokens that are copied behind the drafts of a round.
        copies_kept: these that stand, of a row on average.
        passed_up: rounds that had something to copy which did not look worth it.
        judge_seconds: of asking how likely drafts are kept, by whether they are drawn.
        worth: by the same and the number of drafts, the seconds that asking behind them saves: what
            a decision without would lose, and nothing where it is the same.
        clock: what times them, in seconds.
    """

    draft_seconds: Mean = field(default_factory=lambda: Mean(_SLOW, clipped=True))
    widening: dict[int, Slope] = field(
        default_factory=lambda: defaultdict(lambda: Slope(0.0, _WIDENING_DOUBT))
    )
    fixed_seconds: Mean = field(default_factory=lambda: Mean(_SLOW, clipped=True))
    round_seconds: Mean = field(default_factory=lambda: Mean(_SLOW, clipped=True))
    tokens: Mean = field(default_factory=lambda: Mean(FAST))
    falls: dict[bool, Falls] = field(
        default_factory=lambda: {False: Falls(), True: Falls.of_drawn()}
    )
    # As if half of all copies had been feared for: the first to fall does not end it.
    copy_falls: Falls = field(default_factory=lambda: Falls(feared=Mean(1.0, value=0.5, count=1)))
    copies_made: Mean = field(default_factory=lambda: Mean(FAST))
    copies_kept: Mean = field(default_factory=lambda: Mean(FAST))
    passed_up: int = 0
    judge_seconds: dict[bool, Mean] = field(
        default_factory=lambda: defaultdict(lambda: Mean(_SLOW, clipped=True))
    )
    worth: dict[tuple[bool, int], Mean] = field(
        default_factory=lambda: defaultdict(lambda: Mean(_SLOW))
    )
    clock: Callable[[], float] = field(default_factory=lambda: time.perf_counter)

    @property
    def known(self) -> bool:
        """Whether there is enough to decide by."""
        return self.round_seconds.count >= 2

    def cost(self, rows: int) -> float:
        """Seconds by which one more draft of each row makes a round longer."""
        return self.draft_seconds.value + self.verifying(rows)

    def verifying(self, rows: int) -> float:
        """Seconds by which verifying one more draft of each row makes a round longer."""
        # It takes no longer than a round without drafts.
        return min(self.fixed_seconds.value, max(0.0, self.widening[rows].value))

    @property
    def rate(self) -> float:
        """Tokens per second and row; 0 while nothing is known."""
        seconds = self.round_seconds.value
        return self.tokens.value / seconds if seconds > 0 else 0.0


class RoundClock:
    """Times the rounds of a call by their beginnings.

    Args:
        pace: what learns from them.
    """

    def __init__(self, pace: Pace):
        self.pace = pace
        self._began = 0.0
        self._marks: list[float] = []
        self._tokens, self._rows, self._copies = 0.0, 0, 0.0
        self._whole = False
        self._verified, self._rest = Mean(_LATELY), Mean(_LATELY)  # of rounds in a row, lately

    def begin(self) -> None:
        """A round begins; the one before is over."""
        now = self.pace.clock()
        if self._whole:
            self._learn(now)
        else:
            self._forget()
        self._began, self._marks, self._whole = now, [], False

    def mark(self) -> None:
        """Another draft is there."""
        self._marks.append(self.pace.clock())

    def end(self, tokens: float, rows: int = 1, copies: float = 0.0) -> None:
        """The round is decided; it lasts until the next begins.

        Args:
            tokens: that it emitted, of a row on average.
            rows: how many.
            copies: tokens that were verified behind the drafts, as so many drafts.
        """
        if rows != self._rows:
            self._forget()
        self._tokens, self._rows, self._copies, self._whole = tokens, rows, copies, True

    def _forget(self) -> None:
        self._verified, self._rest = Mean(_LATELY), Mean(_LATELY)

    def _learn(self, now: float) -> None:
        pace, seconds = self.pace, now - self._began
        if len(self._marks) > 1:
            steps = sorted(map(operator.sub, self._marks[1:], self._marks))
            # What one waited for, or what was asked behind it, is none of their time: of two in the
            # middle it is the shorter one.
            pace.draft_seconds.add(steps[(len(steps) - 1) // 2])
        if len(self._marks) == 1 and pace.draft_seconds.count:
            # The first draft takes the longest. Where it alone is made, this keeps an estimate that
            # was disturbed from forbidding the others for ever.
            pace.draft_seconds.add(min(pace.draft_seconds.value, self._marks[0] - self._began))
        if self._marks:
            drafts, rest = len(self._marks), now - self._marks[-1]
            verified = drafts + self._copies
            self._learn_widening(verified, rest)
            if pace.draft_seconds.count:
                least = rest / (verified + 1)  # the same for every token
                fixed = seconds - pace.draft_seconds.value * drafts
                fixed -= pace.verifying(self._rows) * verified
                pace.fixed_seconds.add(max(least, fixed))
        pace.round_seconds.add(seconds)
        pace.tokens.add(self._tokens)

    def _learn_widening(self, verified: float, rest: float) -> None:
        """Learn from rounds in a row, in which the machine has hardly changed its pace."""
        more, usual = verified - self._verified.value, self._rest.value
        widening, longer = self.pace.widening[self._rows], rest - usual
        if self._rest.count and abs(more) > _SAME:
            # The first rounds of a process take several times as long as the next, and those that
            # something disturbs: a few of them would forbid drafts for ever.
            if abs(longer) <= _JUMP * usual:
                widening.add(more, longer)
        elif verified <= _FEW:  # where all rounds have as few, nothing can be seen
            widening.fade()
        self._verified.add(verified)
        self._rest.add(rest)
