"""What drafting costs and brings here and now: running estimates from the clock.

Estimates outlive a call, for times belong to a device and not to a text.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

FAST, _SLOW = 0.03, 0.1  # weight of the newest round: in what a text brings, in what a pass costs
_STEADY = 0.01  # weight of the newest draft in what drafts have on average
_DOUBT = 3.0  # drafts that fell as feared, taken for seen before any were
_WILD = 2.0  # a measurement beyond that many times the estimate counts as that many


@dataclass
class Mean:
    """A running mean that trusts its first values most and forgets old ones.

    Attributes:
        weight: of the newest value, once there are enough.
        clipped: whether values are times, which the machine disturbs in one way only: one far above
            the mean is a disturbance, one far below shows that the mean was.
        value: the mean so far.
        count: values seen.
    """

    weight: float
    clipped: bool = False
    value: float = 0.0
    count: int = 0

    def doubt(self, count: int) -> None:
        """Trust what is known no more than `count` values: it is old."""
        self.count = min(self.count, count)

    def add(self, value: float) -> None:
        """Take a value."""
        if self.clipped and self.count > 2:
            value = min(value, _WILD * self.value)
        if self.clipped and value * _WILD < self.value:
            self.count = 0
        self.count += 1
        self.value += max(self.weight, 1 / self.count) * (value - self.value)


@dataclass
class Pace:
    """What rounds of one way to draft cost and bring.

    Attributes:
        draft_seconds: of one more draft in a chain.
        fixed_seconds: of a round without its drafts.
        tokens: emitted in a round, of a row on average.
        falls: of the drafts that were reached, the share that fell.
        feared: the share that was to fall, by the chances that their head gave them.
        chance: what a draft has on average, if those before it stand.
        judge_seconds: of asking how likely drafts are kept.
        saved: by the number of drafts, the seconds that a stop there saves: what one draft more
            takes beyond what it brings, and nothing where it brings more.
        clock: what times them, in seconds.
    """

    draft_seconds: Mean = field(default_factory=lambda: Mean(_SLOW, clipped=True))
    fixed_seconds: Mean = field(default_factory=lambda: Mean(_SLOW, clipped=True))
    round_seconds: Mean = field(default_factory=lambda: Mean(_SLOW, clipped=True))
    tokens: Mean = field(default_factory=lambda: Mean(FAST))
    falls: Mean = field(default_factory=lambda: Mean(FAST))
    feared: Mean = field(default_factory=lambda: Mean(FAST))
    chance: Mean = field(default_factory=lambda: Mean(_STEADY))
    judge_seconds: Mean = field(default_factory=lambda: Mean(_SLOW, clipped=True))
    saved: dict[int, Mean] = field(default_factory=lambda: defaultdict(lambda: Mean(_SLOW)))
    clock: Callable[[], float] = field(default_factory=lambda: time.perf_counter)

    @property
    def known(self) -> bool:
        """Whether there is enough to decide by."""
        return self.round_seconds.count >= 2

    @property
    def risk(self) -> float:
        """How many times as many drafts fall as their head fears."""
        seen = min(self.falls.count, 1 / FAST)
        return (self.falls.value * seen + _DOUBT) / (self.feared.value * seen + _DOUBT)

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

    def begin(self) -> None:
        """A round begins; the one before is over."""
        now = self.pace.clock()
        if self._whole:
            self._learn(now)
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
        if self._marks and pace.draft_seconds.count:
            drafting = pace.draft_seconds.value * len(self._marks)
            pace.fixed_seconds.add(max(0.0, seconds - drafting))
        pace.round_seconds.add(seconds)
        pace.tokens.add(self._tokens)
