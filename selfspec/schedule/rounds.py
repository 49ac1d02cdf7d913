"""What rounds have brought: moving averages of tokens and seconds of each way to make one.

`auto` takes the way that brings the most tokens per second, and the schedule `optimal` ends a chain
when another draft is worth less than its time. What is learned outlives the call.
"""

from __future__ import annotations

import copy
import math
import operator
import time
from collections.abc import Callable, Sequence

from torch import nn

from selfspec.decoder import Decoder
from selfspec.heads import ExitHead

_MEMORY = 32  # observations over which an average forgets two thirds of what it saw before
_PRIOR = 8  # observed drafts that an expected acceptance weighs as much as
_PATIENCE = 4, 64  # rounds after which a way that lost is tried again, first and at most
_WARM_UP = 8  # rounds of a way of which only the shortest counts: a process warms up
_OUTLIER = 1.5  # times of the average at which the seconds of disturbed rounds are cut
_GROWTH = 0.03  # expected time of verifying one more token, in plain steps: .02 to .05 on devices
# Expected cost and acceptance of drafts of the whole model with fewer bits or keys: what `int4` and
# `int8` copies took and brought of models from 135 M to 1 B parameters.
_APPROXIMATE = 0.6, (0.9, 0.9)
NEUTRAL = 0.5  # expected acceptance, and cost of a draft in plain steps, where nothing is known


class Average:
    """An exponential moving average; at first the plain mean of an expectation and what is seen.

    Args:
        value: the expectation.
        weight: the number of observations that it weighs as much as.
    """

    __slots__ = ("value", "weight")

    def __init__(self, value: float, weight: float = 0.0):
        self.value, self.weight = value, weight

    def learn(self, value: float) -> None:
        """Take in an observation."""
        self.weight = min(self.weight + 1, _MEMORY)
        self.value += (value - self.value) / self.weight


class Seconds(Average):
    """An average of seconds: of the first rounds the shortest counts, and outliers are cut.

    Args:
        share: the expectation, in plain steps.
    """

    __slots__ = ("share",)

    def __init__(self, share: float):
        super().__init__(0.0)
        self.share = share

    def within(self, step: float) -> float:
        """What was seen, or else is expected if a plain step takes `step` seconds."""
        return self.value if self.weight else self.share * step

    def learn(self, value: float) -> None:
        """Take in an observation."""
        if self.weight < _WARM_UP:
            self.weight += 1
            self.value = value if self.weight == 1 else min(self.value, value)
        else:
            super().learn(self.cut(value))

    def cut(self, value: float) -> float:
        """The seconds of a round without what disturbed it."""
        return min(value, _OUTLIER * self.value)

    def forget(self, step: float) -> None:
        """Keep only the proportion to a plain step."""
        self.share, self.weight = self.within(step) / step, 0.0


class Acceptance:
    """How often drafts are accepted, by position, given that all before them are.

    A position that was not seen for long is believed to be like all.

    Args:
        expected: the rate before any draft was seen.
    """

    def __init__(self, expected: float):
        self._all, self._rates = Average(expected, _PRIOR), list[Average]()
        # A regression of acceptance on confidence, which at first is taken at its word: the sums of
        # squares and products are those of a few uniformly distributed confidences.
        self._confidence = Average(expected)
        self._squares = self._products = _PRIOR / 12

    def rate(self, position: int) -> float:
        """The expected rate."""
        if position >= len(self._rates):
            return self._all.value
        here = self._rates[position]
        return (here.weight * here.value + _PRIOR * self._all.value) / (here.weight + _PRIOR)

    def fade(self) -> None:
        """Another round is over."""
        for rate in self._rates:
            rate.weight *= 1 - 1 / _MEMORY

    def doubt(self) -> None:
        """Judge the drafts anew: the text may have changed."""
        self._all.weight, self._rates = min(self._all.weight, _PRIOR / 2), []

    def chance(self, position: int, confidence: float) -> float:
        """The chance of a draft in which the head has that confidence."""
        slope = self._products / self._squares
        chance = self.rate(position) + slope * (confidence - self._confidence.value)
        return min(1.0, max(0.0, chance))

    def learn(self, position: int, accepted: float) -> None:
        """Count a token whose predecessors were all accepted: 1, 0, or its chance of acceptance."""
        self._rates += [Average(0.0) for _ in range(len(self._rates), position + 1)]
        for average in (self._all, self._rates[position]):
            average.learn(accepted)

    def learn_confidence(self, position: int, confidence: float, accepted: bool) -> None:
        """Compare what a head said of a draft with what became of it.

        Nothing is forgotten: the relation depends on the head, not on the text.
        """
        self._confidence.learn(confidence)
        far = confidence - self._confidence.value
        self._squares += far * far
        self._products += far * (accepted - self.rate(position))


class Way:
    """A way to make a round: a plain step, or copies after a match of some length.

    Args:
        tokens: tokens per row that are expected of a round.
        share: its expected time, in plain steps.
    """

    def __init__(self, tokens: float, share: float):
        self.tokens, self.seconds = Average(tokens, 1.0), Seconds(share)
        self._waited, self._patience = 0, _PATIENCE[0]

    def rate(self, step: float) -> float:
        """Tokens per second and row, if a plain step takes `step` seconds."""
        return self.tokens.value / max(self.seconds.within(step), 1e-9)

    def learn(self, drafts: int, tokens: float, seconds: float, made: Sequence[float]) -> None:
        """Learn from a round.

        Args:
            drafts: tokens that it drafted or copied.
            tokens: tokens per row that it brought.
            seconds: its time.
            made: seconds after its begin at which each draft was made, if the device tells.
        """
        self.tokens.learn(tokens)
        self.seconds.learn(seconds)

    def forget(self, step: float) -> None:
        """Keep only the proportions of times to a plain step."""
        self.seconds.forget(step)

    def won(self) -> None:
        """It was the best: if it loses, it is soon tried again."""
        self._waited, self._patience = 0, _PATIENCE[0]

    def is_due(self) -> bool:
        """Whether it has lost for so long that it is tried again, each time after a longer wait."""
        self._waited += 1
        if self._waited <= self._patience:
            return False
        self._waited, self._patience = 0, min(2 * self._patience, _PATIENCE[1])
        return True


class Chain(Way):
    """Chains of drafts: what they bring follows from the acceptance of each draft.

    `seconds` is the time of a round with `usual` drafts, without making them.

    Args:
        draft: expected time of one more draft, in plain steps.
        acceptance: of the drafts.
        longest: the most drafts of a round.
    """

    def __init__(self, draft: float, acceptance: Acceptance, longest: int):
        super().__init__(1.0, 1.0)
        self.draft, self.usual = Seconds(draft), Average(1.0, 1.0)
        self._growth = _GROWTH  # time of verifying one more draft, in rounds without drafting
        self.acceptance, self.longest = acceptance, longest

    def marginal(self, step: float) -> float:
        """Seconds by which one more draft makes a round longer."""
        return self.draft.within(step) + self._growth * self.seconds.within(step)

    def rate(self, step: float) -> float:
        """Tokens per second and row of chains of the best length."""
        tokens, reach, best, marginal = 1.0, 1.0, 0.0, self.marginal(step)
        seconds = self.seconds.within(step) * (1 - self._growth * self.usual.value)
        for position in range(self.longest):
            reach *= self.acceptance.rate(position)
            tokens, seconds = tokens + reach, max(seconds + marginal, 1e-9)
            if tokens < best * seconds:
                break
            best = tokens / seconds
        return best

    def learn(self, drafts: int, tokens: float, seconds: float, made: Sequence[float]) -> None:
        """Learn from a round; see `Way.learn`."""
        spent = drafts * self.draft.within(seconds)
        if made:  # the first draft also does what the round before it left
            steps = sorted(map(operator.sub, made[1:], made))
            self.draft.learn(steps[len(steps) // 2] if steps else made[0])
            spent = made[-1]
        rest, far = seconds - spent, drafts - self.usual.value
        if self.seconds.weight >= _WARM_UP:  # a step of least mean squares (Widrow, Hoff 1960)
            error = self.seconds.cut(rest) / self.seconds.value - 1 - far * self._growth
            self._growth = max(0.0, self._growth + error * far / (1 + far * far) / _MEMORY)
        self.usual.learn(drafts)
        self.seconds.learn(rest)

    def is_due(self) -> bool:
        """See `Way.is_due`."""
        due = super().is_due()
        if due:
            self.acceptance.doubt()
        return due

    def forget(self, step: float) -> None:
        """Keep only the proportions of times to a plain step."""
        super().forget(step)
        self.draft.forget(step)


class Batch:
    """What rounds of about one number of rows have brought, greedy or sampled.

    Attributes:
        plain: plain steps.
        chain: chains of drafts.
        copies: copies, by the power of two up to which the rows' shortest match reaches.
    """

    def __init__(self, chain: Chain):
        self.plain, self.chain = Way(1.0, 1.0), chain
        self.copies: dict[int, Way] = {}

    def like(self) -> Batch:
        """What is expected of another number of rows: the same proportions."""
        acceptance = self.chain.acceptance
        other = copy.deepcopy(self, {id(acceptance): acceptance})
        for way in (other.chain, *other.copies.values(), other.plain):
            way.forget(self.step)
        return other

    @property
    def step(self) -> float:
        """Seconds of a plain step, or of what is known and takes about as long."""
        known = [way.seconds.value for way in (self.plain, self.chain) if way.seconds.weight]
        return known[0] if known else 1.0

    @property
    def price(self) -> float:
        """Tokens that the time of one more draft is worth."""
        step = self.step
        return max(self.plain.rate(step), self.chain.rate(step)) * self.chain.marginal(step)

    @property
    def speedup(self) -> float:
        """Tokens per second of chains over those of plain steps."""
        return self.chain.rate(self.step) / self.plain.rate(self.step)

    def copying(self, match: int) -> Way:
        """The way to copy after a match of that length; the longer, the more is expected of it."""
        bucket = 1 << match.bit_length() >> 1
        return self.copies.setdefault(bucket, Way(1 + bucket / 4, 1 + _GROWTH * bucket))

    def choose(self, ways: Sequence[Way]) -> Way:
        """The best of these ways, or one that is due to be tried again."""
        step = self.step
        best = max(ways, key=lambda way: way.rate(step))
        best.won()
        return next((way for way in ways if way is not best and way.is_due()), best)


class Rounds:
    """What is known of rounds with one drafter, kept from call to call.

    Args:
        draft_cost: expected time of a draft, in plain steps.
        acceptance: expected acceptance of greedy and of sampled drafts.
        clock: returns seconds, the same in all processes of one model.
        one_pass: whether one pass makes all drafts of a round.
        longest: the most drafts of a round.

    Attributes:
        acceptance: of greedy (`False`) and of sampled (`True`) drafts.
    """

    def __init__(
        self,
        draft_cost: float = NEUTRAL,
        acceptance: tuple[float, float] = (NEUTRAL, NEUTRAL),
        clock: Callable[[], float] = time.perf_counter,
        one_pass: bool = False,
        longest: int = 12,
    ):
        self.clock = clock
        self.acceptance = {sampled: Acceptance(acceptance[sampled]) for sampled in (False, True)}
        self._draft_cost, self._longest = 0.0 if one_pass else draft_cost, longest
        self._batches: dict[tuple[bool, int], Batch] = {}

    @classmethod
    def of_head(cls, decoder: Decoder, head: ExitHead, clock: Callable[[], float]) -> Rounds:
        """Expectations of an exit head: its fraction of the weights, its calibrators' mean.

        With all layers below it, the head drafts by approximate passes.
        """
        if head.exit_layer == decoder.depth:
            return cls(*_APPROXIMATE, clock)
        layer = _size(decoder.layers[0])
        readout = _size(head.lm_head or decoder.lm_head)
        own = _size(head.layer) if head.layer is not None else 0
        shallow = head.exit_layer * layer + own + readout
        cost = shallow / (decoder.depth * layer + _size(decoder.lm_head))
        known = head.calibrators
        acceptance = [
            float(known[name].bias.float().sigmoid()) if name in known else NEUTRAL  # pyright: ignore
            for name in ("greedy", "sampled")
        ]
        return cls(cost, (acceptance[0], acceptance[1]), clock, head.drafts_at_once)

    def batch(self, rows: int, sampled: bool) -> Batch:
        """What is known of about that many rows; at first what is known of the nearest number."""
        key = sampled, rows.bit_length()
        if key not in self._batches:
            known = [other for other in self._batches if other[0] is sampled]
            nearest = min(known, key=lambda other: abs(other[1] - key[1]), default=None)
            chain = Chain(self._draft_cost, self.acceptance[sampled], self._longest)
            self._batches[key] = Batch(chain) if nearest is None else self._batches[nearest].like()
        return self._batches[key]

    def speedup(self) -> float:
        """Tokens per second of chains over those of plain steps, for one row.

        It is the mean over greedy and sampled decoding.
        """
        batches = [self.batch(1, sampled) for sampled in (False, True)]
        return sum(batch.speedup for batch in batches) / len(batches)


class RoundTimer:
    """Times the rounds of a call: a round lasts until the next one begins.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock, self._began = clock, 0.0
        self._made: list[float] = []
        self._done: tuple[Way, int, float] | None = None

    def begin(self) -> None:
        """A round begins; the one before it, if it belongs to this drafter, is over."""
        now = self._clock()
        if self._done is not None:
            way, drafts, tokens = self._done
            made = [mark - self._began for mark in self._made]
            way.learn(drafts, tokens, now - self._began, made)
        self._began, self._done, self._made = now, None, []

    def mark(self) -> None:
        """Another draft has been made, on a device that runs synchronously."""
        self._made.append(self._clock())

    def end(self, way: Way, drafts: int, accepted: Sequence[int]) -> None:
        """The round has verified so many drafts, of which each row accepted so many.

        Rows count by their geometric mean: a batch is done when its slowest row is, so that drafts
        for a few rows alone bring little.
        """
        tokens = math.exp(sum(math.log(count + 1) for count in accepted) / len(accepted))
        self._done = way, drafts, tokens


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
