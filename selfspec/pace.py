"""What drafting costs and brings here and now: running estimates from the clock.

Estimates outlive a call, for times belong to a device and not to a text.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from selfspec.falls import Falls
from selfspec.mean import Mean, Slope

FAST, _SLOW = 0.03, 0.1  # weight of the newest round: in what a text brings, in what a pass costs
_WIDENING_DOUBT = 20.0  # squared changes in the number of drafts, in sum, that lengthened nothing
_JUMP = 0.5  # share of a round's rest by which it may differ from the last one's


@dataclass
class Pace:
    """What rounds of one way to draft cost and bring.

    Attributes:
        draft_seconds: of making one more draft in a chain.
        widening: by how much every draft lengthens the rest of a round, above all verification.
        fixed_seconds: of a round without drafts.
        tokens: emitted in a round, of a row on average.
        falls: how likely drafts fall, by whether they are drawn.
        judge_seconds: of asking how likely they are kept.
        worth: by the same and the number of drafts, the seconds that asking behind them saves: what
            a decision without would lose, and nothing where it is the same.
        clock: what times them, in seconds.
    """

    draft_seconds: Mean = field(default_factory=lambda: Mean(_SLOW, clipped=True))
    widening: Slope = field(default_factory=lambda: Slope(0.0, _WIDENING_DOUBT))
    fixed_seconds: Mean = field(default_factory=lambda: Mean(_SLOW, clipped=True))
    round_seconds: Mean = field(default_factory=lambda: Mean(_SLOW, clipped=True))
    tokens: Mean = field(default_factory=lambda: Mean(FAST))
    falls: dict[bool, Falls] = field(default_factory=lambda: defaultdict(Falls))
    judge_seconds: Mean = field(default_factory=lambda: Mean(_SLOW, clipped=True))
    worth: dict[tuple[bool, int], Mean] = field(
        default_factory=lambda: defaultdict(lambda: Mean(_SLOW))
    )
    clock: Callable[[], float] = field(default_factory=lambda: time.perf_counter)

    @property
    def known(self) -> bool:
        """Whether there is enough to decide by."""
        return self.round_seconds.count >= 2

    @property
    def cost(self) -> float:
        """Seconds by which one more draft makes a round longer."""
        return self.draft_seconds.value + max(0.0, self.widening.value)

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
        self._tokens = 0.0
        self._whole = False
        self._last: tuple[int, float] | None = None  # drafts of the round before, and its rest

    def begin(self) -> None:
        """A round begins; the one before is over."""
        now = self.pace.clock()
        if self._whole:
            self._learn(now)
        else:
            self._last = None
        self._began, self._marks, self._whole = now, [], False

    def mark(self) -> None:
        """Another draft is there."""
        self._marks.append(self.pace.clock())

    def end(self, tokens: float) -> None:
        """The round has emitted `tokens` of a row on average; it lasts until the next begins."""
        self._tokens, self._whole = tokens, True

    def _learn(self, now: float) -> None:
        pace, seconds = self.pace, now - self._began
        steps = [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]
        for step in steps:
            pace.draft_seconds.add(step)
        if len(self._marks) == 1 and pace.draft_seconds.count:
            # The first draft takes the longest. Where it alone is made, this keeps an estimate that
            # was disturbed from forbidding the others for ever.
            pace.draft_seconds.add(min(pace.draft_seconds.value, self._marks[0] - self._began))
        if self._marks:
            self._compare(len(self._marks), now - self._marks[-1])
        if self._marks and pace.draft_seconds.count:
            pace.fixed_seconds.add(max(0.0, seconds - pace.cost * len(self._marks)))
        pace.round_seconds.add(seconds)
        pace.tokens.add(self._tokens)

    def _compare(self, drafts: int, rest: float) -> None:
        """Learn from two rounds in a row, between which the machine has hardly changed its pace."""
        before, usual = self._last or (drafts, rest)
        if drafts != before:  # else they tell nothing
            longer = max(-_JUMP * usual, min(rest - usual, _JUMP * usual))
            self.pace.widening.add(drafts - before, longer)
        self._last = drafts, rest
