"""What rounds have brought, and what the next one is expected to bring.

A plain step, a chain of drafts and copies after a match of some length are the ways to make a
round. What a way brings follows from the acceptance of its drafts by position, the seconds of a
plain step and of a draft, and the seconds that verifying so many drafts takes.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from selfspec.config import LONGEST, LONGEST_COPY
from selfspec.decoder import Decoder
from selfspec.heads import ExitHead

MEMORY = 32  # observations that are remembered: enough to tell apart rates that differ by a tenth
NEUTRAL = 0.5  # acceptance, cost of a draft, copies per token of the match, where nothing is known
_LATELY = 5  # rounds whose median tells how busy the machine is; two disturbed ones do not move it
_PRIOR = 3  # observed drafts that an expectation weighs as much as: a wrong one is soon given up
_GROWTH = 0.03  # time of verifying one more token, in plain steps: .02 to .05 on most devices
_TICK = 1e-9  # seconds: no time is shorter, so that all can be divided by
_TRIALS = 0.005  # fraction of the tokens that may be lost by trying again what lost
_TRIAL = 2  # rounds of a trial: in the first, a head also reads what it has missed


class Average:
    """A moving average, which begins with an expectation that weighs so many observations."""

    def __init__(self, value: float, weight: float = 1.0):
        self.value, self.weight = value, weight

    def learn(self, value: float) -> None:
        """Take in an observation."""
        self.weight = min(self.weight + 1, MEMORY)
        self.value += (value - self.value) / self.weight


class Seconds:
    """The median of the latest times, because a process warms up and some rounds are disturbed.

    Before the first, `value` is what is expected: `share`, in plain steps (`unit`).
    """

    def __init__(self, share: float, unit: Seconds | None = None):
        self.share, self._unit = share, unit
        self.seen, self._median = deque[float](maxlen=MEMORY), 0.0

    @property
    def value(self) -> float:
        """The expected seconds."""
        return self._median if self.seen else self.share * (self._unit.value if self._unit else 1)

    def learn(self, value: float) -> None:
        """Take in an observation; a clock may have stood still."""
        self.seen.append(max(value, _TICK))
        self._median = statistics.median_low(self.seen)


class Acceptance:
    """How often drafts are accepted, by position, given that all before them are.

    A position that was not seen for long is believed to be like all. The confidence of the head
    counts by regression: at first it is taken at its word, and what is learned of it is not
    forgotten, because it depends on the head and not on the text.
    """

    def __init__(self, expected: float):
        self._all, self._rates = Average(expected, _PRIOR), list[Average]()
        self._confidence = Average(expected, 0.0)
        self._squares = self._products = _PRIOR / 12  # of uniformly distributed confidences

    def rate(self, position: int) -> float:
        """The expected rate."""
        if position >= len(self._rates):
            return self._all.value
        here = self._rates[position]
        return (here.weight * here.value + _PRIOR * self._all.value) / (here.weight + _PRIOR)

    def chance(self, position: int, confidence: float) -> float:
        """The chance of a draft in which the head has that confidence."""
        slope = self._products / self._squares
        chance = self.rate(position) + slope * (confidence - self._confidence.value)
        return min(1.0, max(0.0, chance))

    def learn(self, position: int, accepted: float) -> None:
        """Count a token whose predecessors were all accepted: 1, 0, or its chance of acceptance."""
        self._rates += [Average(0.0, 0.0) for _ in range(len(self._rates), position + 1)]
        for average in (self._all, self._rates[position]):
            average.learn(accepted)

    def learn_confidence(self, position: int, confidence: float, accepted: bool) -> None:
        """Compare what a head said of a draft with what became of it."""
        self._confidence.learn(confidence)
        far = confidence - self._confidence.value
        self._squares += far * far
        self._products += far * (accepted - self.rate(position))

    def fade(self) -> None:
        """Another round is over."""
        for rate in self._rates:
            rate.weight *= 1 - 1 / MEMORY

    def doubt(self) -> None:
        """Judge the drafts anew: the text may have changed."""
        self._all.weight, self._rates = min(self._all.weight, _PRIOR), []


class Verification:
    """Seconds of a round without those of making its drafts, by their number: a line.

    It is fitted to the latest rounds by least squares of relative errors, so that one that was
    disturbed, and took much longer, counts little. The fit starts from what is expected: a plain
    step, and `_GROWTH` of one for each draft. The expected growth weighs as much as one round, the
    expected start only a tenth: devices differ most in how much longer a pass
    over two tokens takes than one over a single token. Plain steps have a median of their own;
    until one is made, it follows from the other rounds.

    Args:
        step: the seconds of a plain step, if others know them, too.
    """

    def __init__(self, step: Seconds | None = None):
        self.step = Seconds(1.0) if step is None else step
        self._fixed, self.growth = 0.0, _GROWTH  # in plain steps
        self._seen = deque[tuple[int, float]](maxlen=MEMORY)

    def seconds(self, drafts: int) -> float:
        """The expected seconds."""
        longer = self._fixed + self.growth * drafts if drafts else 0.0
        return self.step.value * (1 + longer)

    def learn(self, drafts: int, seconds: float) -> None:
        """Take in a round that verified so many drafts."""
        if not drafts:
            self.step.learn(seconds)
            return
        seconds = max(seconds, _TICK)
        if not self.step.seen and not self._seen:
            self.step.share = seconds / (1 + _GROWTH * drafts)
        self._seen.append((drafts, seconds))
        # Sums of the normal equations, over what rounds took more than expected. The
        # first are the weights of the expected start and growth.
        total, square = 0.1, 1.0
        linear = level = slope = 0.0
        for x, took in self._seen:
            steps = took / self.step.value
            more, weight = steps - 1 - _GROWTH * x, min(1.0, steps**-2)
            total, linear, square = total + weight, linear + weight * x, square + weight * x * x
            level, slope = level + weight * more, slope + weight * more * x
        rest = total * square - linear * linear  # positive, by Cauchy and Schwarz
        fixed = (level * square - slope * linear) / rest
        growth = _GROWTH + (slope * total - level * linear) / rest
        if not self.step.seen:  # a plain step takes what the line says
            start = max(0.1, 1 + fixed)
            self.step.share *= start
            fixed, growth = 0.0, growth / start
        self._fixed, self.growth = max(0.0, fixed), max(0.0, growth)


class Outlook(NamedTuple):
    """What is expected of a round: its number of drafts, the tokens of a row, and seconds."""

    drafts: int
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second and row."""
        return self.tokens / self.seconds

    def gain(self, rate: float) -> float:
        """Tokens more than the same seconds bring at that rate."""
        return self.tokens - rate * self.seconds


class Way:
    """A way to make a round: what it brings follows from the acceptance of each draft.

    Args:
        verification: how long rounds take.
        longest: the most drafts of a round; 0 for a plain step.
        acceptance: how often they are accepted.
        draft_cost: expected time of making one, in plain steps. One that costs nothing is copied,
            or made by a pass that makes all.
    """

    def __init__(
        self, verification: Verification, longest: int, acceptance: Acceptance, draft_cost: float
    ):
        self.verification, self.longest, self.acceptance = verification, longest, acceptance
        self.draft = Seconds(draft_cost, verification.step)
        self._waited, self._wait = 0, 1.0

    @property
    def marginal(self) -> float:
        """Seconds by which one more draft makes a round longer."""
        verification = self.verification
        return self.draft.value + verification.growth * verification.step.value

    @property
    def rate(self) -> float:
        """Tokens per second and row, with the best number of drafts."""
        return max(outlook.rate for outlook in self._outlooks())

    def outlook(self, rate: float) -> Outlook:
        """Of the round that gains most where others have that rate."""
        return max(self._outlooks(), key=lambda outlook: outlook.gain(rate))

    def seconds(self, drafts: int) -> float:
        """The expected seconds of a round with so many drafts."""
        return self.verification.seconds(drafts) + drafts * self.draft.value

    def _outlooks(self) -> Iterator[Outlook]:
        """By the number of drafts."""
        tokens = reach = 1.0
        if not self.longest:
            yield Outlook(0, tokens, self.seconds(0))
        for drafts in range(1, self.longest + 1):
            reach *= self.acceptance.rate(drafts - 1)
            tokens += reach
            yield Outlook(drafts, tokens, self.seconds(drafts))

    def is_due(self, lost: float) -> bool:
        """Whether it is tried again, though another way brings so many tokens more in a round.

        It waits four times as long with every round that it made, until trying loses as few tokens
        as `_TRIALS` allows.
        """
        return self._waited > min(self._wait, 1 + _TRIAL * lost / _TRIALS)

    def wait(self) -> None:
        """A round begins in which it could be taken."""
        self._waited += 1

    def take(self) -> None:
        """It is taken."""
        self._waited, self._wait = 0, 4 * self._wait

    def verified(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """So many of the drafts of each row were accepted."""
        self.acceptance.fade()
        for drafts, count in zip(drafted, accepted, strict=True):
            for position in range(min(drafts, count + 1)):
                self.acceptance.learn(position, position < count)

    def learn(self, drafts: int, seconds: float, made: Sequence[float]) -> None:
        """Learn from a round, whose drafts were `made` at these seconds, if the device tells."""
        if made and self.draft.share:
            first, last = made[0], made[-1]  # the first also does what the round before it left
            self.draft.learn((last - first) / (drafts - 1) if drafts > 1 else first)
            self.verification.learn(drafts, seconds - last)
        else:
            verifying = self.verification.seconds(drafts)
            making = drafts * self.draft.share * self.verification.step.value
            self.verification.learn(drafts, seconds * verifying / (verifying + making))


class Batch:
    """What is known of rounds with about one number of rows, greedy or sampled.

    `copies` are keyed by the largest power of two that is not above the rows' shortest match. One
    pass that makes all drafts (`draft_cost` 0) counts as part of verifying them, which then takes
    longer than for copies. A chain has at most `longest` drafts.
    """

    def __init__(self, acceptance: Acceptance, draft_cost: float, longest: int):
        self.verification, self.copies = Verification(), dict[int, Way]()
        self.plain = Way(self.verification, 0, Acceptance(0.0), 0.0)
        apart = self.verification if draft_cost else Verification(self.verification.step)
        self.chain = Way(apart, longest, acceptance, draft_cost)
        self._trial, self._left = self.plain, 0  # the last trial's way, and rounds left of it

    @property
    def rate(self) -> float:
        """Tokens per second and row of the better of plain steps and chains."""
        return max(self.plain.rate, self.chain.rate)

    @property
    def price(self) -> float:
        """Tokens that the time of one more draft is worth."""
        return self.rate * self.chain.marginal

    def copying(self, match: int) -> Way:
        """The way to copy after a match of that length; the longer, the more is expected of it."""
        size = 1 << match.bit_length() >> 1
        if size not in self.copies:
            copies = NEUTRAL * size
            expected = Acceptance(copies / (copies + 1))  # whose powers have that sum
            self.copies[size] = Way(self.verification, LONGEST_COPY, expected, 0.0)
        return self.copies[size]

    def choose(self, ways: Sequence[Way]) -> Way:
        """The best of these ways, or one that is due to be tried again."""
        rate = self.rate
        gains = {way: way.outlook(rate).gain(rate) for way in ways}
        best = max(ways, key=gains.__getitem__)
        for way in ways:
            way.wait()
        self._left -= 1
        if self._left > 0 and self._trial in ways:
            chosen = self._trial
        else:
            others = (way for way in ways if way is not best)
            chosen = next((way for way in others if way.is_due(gains[best] - gains[way])), best)
            if chosen is not best:
                self._trial, self._left = chosen, _TRIAL
                chosen.acceptance.doubt()
        chosen.take()
        return chosen


class Rounds:
    """What is known of rounds with one drafter, kept from call to call.

    Args:
        draft_cost: expected time of a draft, in plain steps.
        acceptance: expected acceptance of greedy and of sampled drafts.
        clock: returns seconds, the same in all processes of one model.
        one_pass: whether one pass makes all drafts of a round.
        longest: the most drafts of a chain.
    """

    def __init__(
        self,
        draft_cost: float = NEUTRAL,
        acceptance: tuple[float, float] = (NEUTRAL, NEUTRAL),
        clock: Callable[[], float] = time.perf_counter,
        one_pass: bool = False,
        longest: int = LONGEST,
    ):
        self.clock, self._draft_cost = clock, 0.0 if one_pass else draft_cost
        self._longest = longest
        self.acceptance = {sampled: Acceptance(acceptance[sampled]) for sampled in (False, True)}
        self._batches: dict[tuple[bool, int], Batch] = {}
        self._lately = deque[float](maxlen=_LATELY)  # times of rounds over those expected

    @classmethod
    def of_head(
        cls, decoder: Decoder, head: ExitHead, clock: Callable[[], float], longest: int
    ) -> Rounds:
        """Expectations of an exit head: its fraction of the weights, its calibrators' mean."""
        if head.exit_layer == decoder.depth:  # it drafts by approximate passes
            return cls(NEUTRAL, (0.9, 0.9), clock, longest=longest)  # acceptance as was measured
        layer, own = _size(decoder.layers[0]), _size(head.layer) if head.layer is not None else 0
        shallow = head.exit_layer * layer + own + _size(head.lm_head or decoder.lm_head)
        cost = shallow / (decoder.depth * layer + _size(decoder.lm_head))
        known = head.calibrators
        greedy, sampled = (
            float(known[name].bias.float().sigmoid()) if name in known else NEUTRAL  # pyright: ignore
            for name in ("greedy", "sampled")
        )
        longest = min(longest, head.longest or longest)
        return cls(cost, (greedy, sampled), clock, head.drafts_at_once, longest)

    def batch(self, rows: int, sampled: bool) -> Batch:
        """What is known of about that many rows."""
        key = sampled, rows.bit_length()
        if key not in self._batches:
            self._batches[key] = Batch(self.acceptance[sampled], self._draft_cost, self._longest)
        return self._batches[key]

    def learn(self, way: Way, drafts: int, seconds: float, made: Sequence[float]) -> None:
        """Learn from a round of that way, whose drafts were `made` at these seconds.

        While the machine is busy every way takes longer, but only those in use are timed. So that
        they stay comparable, times are divided by how much longer than expected the last rounds
        took.
        """
        if seconds <= 0:
            return  # the clock ticks too seldom to tell anything
        busy = statistics.median(self._lately) if len(self._lately) == _LATELY else 1.0
        self._lately.append(seconds / way.seconds(drafts))
        way.learn(drafts, seconds / busy, [at / busy for at in made])

    def speedup(self, rows: int, sampled: bool) -> float:
        """Tokens per second of chains over those of plain steps."""
        batch = self.batch(rows, sampled)
        return batch.chain.rate / batch.plain.rate


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
