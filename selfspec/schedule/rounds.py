"""What rounds have brought, and what the next one is expected to bring.

A plain step, a chain of drafts and copies after a match of some length are the ways to make a
round. Of each the median of its seconds is kept, and a moving average of its tokens; for chains,
the acceptance of each position, the seconds of a draft, and of verifying one more token.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

from torch import nn

from selfspec.config import LONGEST
from selfspec.decoder import Decoder
from selfspec.heads import ExitHead

MEMORY = 32  # observations that are remembered: enough to tell apart rates that differ by a tenth
NEUTRAL = 0.5  # acceptance, cost of a draft, copies per token of the match, where nothing is known
_APPROXIMATE = 0.9  # acceptance of the whole model with fewer bits or keys, as was measured
_PRIOR = 3  # observed drafts that an expectation weighs as much as: a wrong one is soon given up
_GROWTH = 0.03  # time of verifying one more token, in plain steps: .02 to .05 on devices
_TRIALS = 0.01  # fraction of the tokens that may be lost by trying again what lost


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
        """Take in an observation."""
        self.seen.append(value)
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


class Way:
    """A way to make a round, with the tokens per row and the seconds that are expected of it."""

    def __init__(self, tokens: float, seconds: Seconds):
        self.tokens, self.seconds, self.waited = Average(tokens), seconds, 0

    @property
    def rate(self) -> float:
        """Tokens per second and row."""
        return self.tokens.value / max(self.seconds.value, 1e-9)

    def is_due(self, best: float) -> bool:
        """Whether it is tried again, though another way has a better rate.

        Waits double with every try, until so few tokens are lost by trying as `_TRIALS` allows.
        """
        lost = best / max(self.rate, 1e-9) - 1
        return self.waited > min(2 ** len(self.seconds.seen), lost / _TRIALS)

    def learn(self, drafts: int, tokens: float, seconds: float, made: Sequence[float]) -> None:
        """Learn from a round, whose drafts were `made` at these seconds, if the device tells."""
        self.tokens.learn(tokens)
        self.seconds.learn(seconds)


class Chain(Way):
    """Chains of drafts: what they bring follows from the acceptance of each draft.

    `seconds` are those of a round with `usual` drafts, without making them. A draft that is
    expected to cost nothing is one of a pass that makes all.
    """

    def __init__(self, acceptance: Acceptance, draft_cost: float, step: Seconds):
        super().__init__(1.0, Seconds(1.0, step))
        self.acceptance, self.usual, self._step = acceptance, Average(1.0), step
        self.draft, self._growth = Seconds(draft_cost, step), _GROWTH

    @property
    def marginal(self) -> float:
        """Seconds by which one more draft makes a round longer."""
        return self.draft.value + self._growth * self.seconds.value

    @property
    def rate(self) -> float:
        """Tokens per second and row of chains of the best length."""
        tokens, reach, best, marginal = 1.0, 1.0, 0.0, self.marginal
        seconds = self.seconds.value * (1 - self._growth * self.usual.value)
        for position in range(LONGEST):
            reach *= self.acceptance.rate(position)
            tokens, seconds = tokens + reach, max(seconds + marginal, 1e-9)
            best = max(best, tokens / seconds)
        return best

    def learn(self, drafts: int, tokens: float, seconds: float, made: Sequence[float]) -> None:
        """See `Way.learn`."""
        rest = seconds / (1 + drafts * self.draft.share)
        if made and self.draft.share:
            first, last = made[0], made[-1]  # the first also does what the round before it left
            self.draft.learn((last - first) / (drafts - 1) if drafts > 1 else first)
            rest = seconds - last
        if self.seconds.seen:  # a step of least mean squares (Widrow, Hoff 1960)
            far = drafts - self.usual.value
            error = min(1.0, rest / self.seconds.value - 1) - far * self._growth
            self._growth = max(0.0, self._growth + error * far / (1 + far * far) / MEMORY)
        self.usual.learn(drafts)
        self.seconds.learn(rest)
        if not self._step.seen:
            self._step.share = self.seconds.value


class Batch:
    """What is known of rounds with about one number of rows, greedy or sampled.

    `copies` are told apart by the power of two up to which the rows' shortest match reaches.
    """

    def __init__(self, acceptance: Acceptance, draft_cost: float):
        self._step = Seconds(1.0)
        self.plain, self.copies = Way(1.0, self._step), dict[int, Way]()
        self.chain = Chain(acceptance, draft_cost, self._step)

    @property
    def price(self) -> float:
        """Tokens that the time of one more draft is worth."""
        return max(self.plain.rate, self.chain.rate) * self.chain.marginal

    def copying(self, match: int) -> Way:
        """The way to copy after a match of that length; the longer, the more is expected of it."""
        size = 1 << match.bit_length() >> 1
        new = Way(1 + NEUTRAL * size, Seconds(1 + _GROWTH * size, self._step))
        return self.copies.setdefault(size, new)

    def choose(self, ways: Sequence[Way]) -> Way:
        """The best of these ways, or one that is due to be tried again."""
        best = max(ways, key=lambda way: way.rate)
        for way in ways:
            way.waited += 1
        chosen = next((way for way in ways if way is not best and way.is_due(best.rate)), best)
        chosen.waited = 0
        if chosen is self.chain is not best:
            self.chain.acceptance.doubt()
        return chosen


class Rounds:
    """What is known of rounds with one drafter, kept from call to call.

    Args:
        draft_cost: expected time of a draft, in plain steps.
        acceptance: expected acceptance of greedy and of sampled drafts.
        clock: returns seconds, the same in all processes of one model.
        one_pass: whether one pass makes all drafts of a round.
    """

    def __init__(
        self,
        draft_cost: float = NEUTRAL,
        acceptance: tuple[float, float] = (NEUTRAL, NEUTRAL),
        clock: Callable[[], float] = time.perf_counter,
        one_pass: bool = False,
    ):
        self.clock, self._draft_cost = clock, 0.0 if one_pass else draft_cost
        self.acceptance = {sampled: Acceptance(acceptance[sampled]) for sampled in (False, True)}
        self._batches: dict[tuple[bool, int], Batch] = {}

    @classmethod
    def of_head(cls, decoder: Decoder, head: ExitHead, clock: Callable[[], float]) -> Rounds:
        """Expectations of an exit head: its fraction of the weights, its calibrators' mean."""
        if head.exit_layer == decoder.depth:  # it drafts by approximate passes
            return cls(NEUTRAL, (_APPROXIMATE, _APPROXIMATE), clock)
        layer, own = _size(decoder.layers[0]), _size(head.layer) if head.layer is not None else 0
        shallow = head.exit_layer * layer + own + _size(head.lm_head or decoder.lm_head)
        cost = shallow / (decoder.depth * layer + _size(decoder.lm_head))
        known = head.calibrators
        greedy, sampled = (
            float(known[name].bias.float().sigmoid()) if name in known else NEUTRAL  # pyright: ignore
            for name in ("greedy", "sampled")
        )
        return cls(cost, (greedy, sampled), clock, head.drafts_at_once)

    def batch(self, rows: int, sampled: bool) -> Batch:
        """What is known of about that many rows."""
        key = sampled, rows.bit_length()
        if key not in self._batches:
            self._batches[key] = Batch(self.acceptance[sampled], self._draft_cost)
        return self._batches[key]

    def speedup(self, rows: int, sampled: bool) -> float:
        """Tokens per second of chains over those of plain steps."""
        batch = self.batch(rows, sampled)
        return batch.chain.rate / batch.plain.rate


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
