"""One model of a round: how many tokens it is expected to emit, and how many seconds it takes.

`auto` compares drafting strategies with it, and the `optimal` schedule decides when a chain ends.
It starts from priors, learns from every round, and outlives the call: times belong to a device.
"""

from __future__ import annotations

import math
import operator
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from selfspec.decoder import Decoder
from selfspec.heads import ExitHead

_PRIOR_WEIGHT = 8.0  # observed drafts that a prior acceptance rate counts for
_MEMORY = 100.0  # rounds in which an observed draft loses two thirds of its weight
_GROWTH = 0.03  # prior: plain steps that verifying one more token of each row takes
_DOUBT = 0.5  # standard deviation of the prior of a time, as a share of it
_DRIFT = 0.1  # share by which the speed of a machine may change from one round to the next
_NOISE = 0.15  # standard deviation of the seconds of like rounds, as a share of them
_OUTLIER = 1.0  # standard deviations beyond which a long round is taken for a disturbed one
NEUTRAL = 0.5  # prior acceptance rate, and cost of a draft in plain steps, where nothing is known


class Work(NamedTuple):
    """What a round does beyond a plain decoding step.

    Attributes:
        drafts: tokens that an exit head drafts, one after the other.
        copies: tokens that are looked up.
    """

    drafts: int = 0
    copies: int = 0


class RoundTimes:
    """Seconds of a round of one batch size, as a linear function of its work.

    A round takes a plain step, an overhead if a head drafts at all, so much for each draft, and so
    much for each token that is verified, drafted or copied. A Kalman filter learns these four times
    from the seconds of whole rounds, so that rounds of any kind tell about all others, and it knows
    how uncertain each time is. Where the device does not run after the host, drafts are timed too.

    Args:
        draft_cost: prior: plain steps that a draft takes.
    """

    def __init__(self, draft_cost: float):
        # In plain steps until a round was timed.
        self.times = [1.0, _DOUBT * draft_cost, draft_cost, _GROWTH]
        self._rounds = 0
        # Of the proportions, in plain steps; what all times have in common is the machine's speed.
        self._doubts = [0.0, _DOUBT * draft_cost, _DOUBT * draft_cost, 2 * _GROWTH]
        self._variance = [[0.0] * 4 for _ in range(4)]
        self._widen(_DOUBT, 1.0)

    def like(self, draft_cost: float, share: float) -> RoundTimes:
        """What these times tell about another batch size: their proportions.

        Verification is longer for more tokens of more rows; of fewer rows it takes their `share`.
        """
        other = RoundTimes(draft_cost)
        if self.is_timed and self.times[0] > 0:
            other.times = [seconds / self.times[0] for seconds in self.times]
            other.times[3] *= min(1.0, share)
        return other

    @property
    def is_timed(self) -> bool:
        """Whether a round has told how long a plain step is."""
        return self._rounds > 0

    def seconds(self, work: Work) -> float:
        """Expected seconds of a round."""
        return max(_dot(self.times, _features(work)), 1e-9)

    def deviation(self, work: Work) -> float:
        """Standard deviation of that expectation."""
        features = _features(work)
        return math.sqrt(max(0.0, _dot(features, self._spread(features))))

    @property
    def draft_seconds(self) -> float:
        """Seconds by which one more draft makes a round longer."""
        return self.times[2] + self.times[3]

    def learn(self, work: Work, seconds: float) -> None:
        """Take in a round. The first one tells how long a plain step is."""
        expected = self.seconds(work)
        self._rounds += 1
        if self._rounds == 1:
            scale = seconds / expected
            self.times = [scale * value for value in self.times]
            self._variance = [[scale * scale * value for value in row] for row in self._variance]
            return
        # A process warms up: its first rounds differ in speed, whatever work they do.
        self._widen(max(_DRIFT, _DOUBT / (self._rounds - 1)), _DRIFT)
        self._observe(_features(work), seconds)

    def learn_draft(self, seconds: float) -> None:
        """Take in what a single draft took, without its verification."""
        if self.is_timed:
            self._observe((0.0, 0.0, 1.0, 0.0), seconds)

    def _observe(self, features: Sequence[float], seconds: float) -> None:
        expected = max(_dot(self.times, features), 1e-9)
        spread = self._spread(features)
        total = _dot(features, spread) + (_NOISE * expected) ** 2
        # A machine disturbs a round in one direction only: a short one is never an outlier.
        surprise = min(seconds - expected, _OUTLIER * math.sqrt(total))
        self.times = [
            max(0.0, value + gain * surprise / total)
            for value, gain in zip(self.times, spread, strict=True)
        ]
        self._variance = [
            [value - gain * other / total for value, other in zip(row, spread, strict=True)]
            for row, gain in zip(self._variance, spread, strict=True)
        ]

    def _widen(self, speed: float, proportions: float) -> None:
        """Be less certain of the speed and of the proportions, by these shares."""
        for i, doubt in enumerate(self._doubts):
            for j in range(4):
                self._variance[i][j] += speed * speed * self.times[i] * self.times[j]
            self._variance[i][i] += (proportions * doubt * self.times[0]) ** 2

    def _spread(self, features: Sequence[float]) -> list[float]:
        """Covariance of each time with the seconds of a round."""
        return [_dot(row, features) for row in self._variance]


class AcceptanceRates:
    """How often a token is accepted if all before it are, by its position: a rate that forgets."""

    def __init__(self) -> None:
        self.accepted: defaultdict[int, float] = defaultdict(float)
        self.seen: defaultdict[int, float] = defaultdict(float)

    def prior(self, position: int) -> float:
        """The rate before anything was seen at that position."""
        raise NotImplementedError

    def rate(self, position: int) -> float:
        """The expected rate."""
        accepted = self.accepted.get(position, 0.0) + _PRIOR_WEIGHT * self.prior(position)
        return accepted / (self.seen.get(position, 0.0) + _PRIOR_WEIGHT)

    def learn(self, position: int, accepted: bool) -> None:
        """Take in a token whose predecessors were all accepted."""
        self.accepted[position] += accepted
        self.seen[position] += 1

    def fade(self) -> None:
        """Forget a little; called once a round."""
        for position in self.seen:
            self.accepted[position] *= 1 - 1 / _MEMORY
            self.seen[position] *= 1 - 1 / _MEMORY


class DraftRates(AcceptanceRates):
    """Acceptance of a head's drafts, by the number of drafts before them.

    A position's prior is the rate of all positions together. How much more or less often a draft is
    accepted that the head is more or less confident of is learned by linear regression.

    Args:
        prior: acceptance rate before any draft was seen.
    """

    def __init__(self, prior: float):
        super().__init__()
        self._first_prior = prior
        self._count, self._confidence = 0.0, prior  # confidences seen, and their mean
        # Sums of squared distances of confidences from their mean, and of their products with those
        # of acceptance. The prior is a few chances that are uniform, and right on average.
        self._squares = self._products = _PRIOR_WEIGHT / 12

    def prior(self, position: int) -> float:
        """The rate of all positions."""
        accepted = sum(self.accepted.values()) + _PRIOR_WEIGHT * self._first_prior
        return accepted / (sum(self.seen.values()) + _PRIOR_WEIGHT)

    def rates(self, count: int) -> list[float]:
        """The rates of the first `count` positions."""
        prior = _PRIOR_WEIGHT * self.prior(0)
        accepted, seen = self.accepted, self.seen
        return [
            (accepted.get(position, 0.0) + prior) / (seen.get(position, 0.0) + _PRIOR_WEIGHT)
            for position in range(count)
        ]

    def with_confidence(self, rate: float, confidence: float) -> float:
        """The chance of a draft of that usual rate, of which the head is so confident."""
        return min(1.0, max(0.0, rate + self._slope * (confidence - self._confidence)))

    @property
    def _slope(self) -> float:
        return self._products / self._squares

    @property
    def told(self) -> float:
        """By how much confidence usually changes the chance of a draft."""
        return abs(self._slope) * math.sqrt(self._squares / (self._count + _PRIOR_WEIGHT))

    def learn_confidence(self, rate: float, confidence: float, accepted: bool) -> None:
        """Take in how confident the head was of a draft of that usual rate.

        Nothing is forgotten: how much it tells depends on the head, not on the tokens.
        """
        self._count += 1
        distance = confidence - self._confidence
        self._confidence += distance / (self._count + _PRIOR_WEIGHT)
        self._squares += distance * distance
        self._products += distance * (accepted - rate)


class CopyRates(AcceptanceRates):
    """Acceptance of copied tokens, by how many tokens before them agree with what is copied."""

    def prior(self, position: int) -> float:
        """The longer two passages have agreed, the likelier they go on to."""
        return position / (position + _PRIOR_WEIGHT / 2)

    @staticmethod
    def bucket(agreeing: int) -> int:
        """Lengths that share a rate: from one power of two to the next."""
        return 1 << agreeing.bit_length() >> 1


@dataclass(frozen=True)
class Choice:
    """A round's work, and the tokens per second and row that it is expected to bring."""

    work: Work
    rate: float


class RoundModel:
    """Expected tokens and seconds of rounds with one drafter.

    Args:
        draft_cost: prior: what a draft takes, as a share of a plain step.
        acceptance: prior acceptance rate of a draft, by whether tokens are sampled.
        clock: seconds; the same in all processes of one model.
    """

    def __init__(
        self,
        draft_cost: float = NEUTRAL,
        acceptance: tuple[float, float] = (NEUTRAL, NEUTRAL),
        clock: Callable[[], float] | None = None,
    ):
        self.clock = clock or time.perf_counter
        self.drafts = {sampled: DraftRates(acceptance[sampled]) for sampled in (False, True)}
        self.copies = {sampled: CopyRates() for sampled in (False, True)}
        self._draft_cost = draft_cost
        self._times: dict[int, RoundTimes] = {}

    @classmethod
    def of_head(cls, decoder: Decoder, head: ExitHead, clock: Callable[[], float]) -> RoundModel:
        """Priors of an exit head: its share of the weights, and what its calibrators expect."""
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
        return cls(cost, (acceptance[0], acceptance[1]), clock)

    def times(self, rows: int) -> RoundTimes:
        """Times of rounds with that many rows; at first in the proportions of the nearest known."""
        if rows not in self._times:
            new = RoundTimes(self._draft_cost)
            if self._times:
                nearest = min(self._times, key=lambda known: abs(known - rows))
                new = self._times[nearest].like(self._draft_cost, rows / nearest)
            self._times[rows] = new
        return self._times[rows]

    def plain(self, rows: int) -> Choice:
        """A round without drafts, as fast as it may well be."""
        return Choice(Work(), 1 / self._hoped(rows, Work()))

    def best_chain(self, rows: int, sampled: bool, longest: int, hopeful: bool) -> Choice:
        """The best number of drafts, at least one.

        Args:
            rows: rows of the batch.
            sampled: whether tokens are sampled.
            longest: the most drafts.
            hopeful: whether times that are uncertain are taken for as short as they may well be.
        """
        seconds = self._hoped if hopeful else lambda rows, work: self.times(rows).seconds(work)
        tokens, reach, best = 1.0, 1.0, Choice(Work(1), 0.0)
        for position, rate in enumerate(self.drafts[sampled].rates(longest)):
            reach *= rate
            tokens += reach
            work = Work(drafts=position + 1)
            speed = tokens / seconds(rows, work)
            if speed > best.rate:
                best = Choice(work, speed)
        return best

    def best_lookup(self, sampled: bool, matches: Sequence[int], longest: int) -> Choice:
        """The best number of copied tokens, after matches of such lengths in each row."""
        rows, rates = len(matches), self.copies[sampled]
        tokens, reach = float(rows), {row: 1.0 for row, match in enumerate(matches) if match}
        best = Choice(Work(), 0.0)
        for position in range(longest if reach else 0):
            for row in reach:
                reach[row] *= rates.rate(rates.bucket(matches[row] + position))
            tokens += sum(reach.values())
            work = Work(copies=position + 1)
            speed = tokens / rows / self._hoped(rows, work)
            if speed < best.rate:
                break
            best = Choice(work, speed)
        return best

    def _hoped(self, rows: int, work: Work) -> float:
        """Seconds of a round as short as it may well be, so that what is uncertain gets tried."""
        times = self.times(rows)
        expected = times.seconds(work)
        return expected / (1 + times.deviation(work) / expected)

    def speedup(self, longest: int) -> float:
        """How much faster the best chains are than plain decoding, for one row.

        Sampled and greedy tokens count alike.
        """
        plain = self.times(1).seconds(Work())
        chains = [self.best_chain(1, sampled, longest, hopeful=False) for sampled in self.drafts]
        return plain * sum(chain.rate for chain in chains) / len(chains)

    def learn_copies(self, sampled: bool, predicted: Sequence[tuple[int, int, int]]) -> None:
        """Take in what matches predicted, whether their tokens were drafted or not.

        Args:
            sampled: whether tokens are sampled.
            predicted: for each row the length of its match, the number of tokens emitted since, and
                how many of them followed the match.
        """
        rates = self.copies[sampled]
        rates.fade()
        for match, count, right in predicted:
            for position in range(min(count, right + 1)):
                rates.learn(rates.bucket(match + position), position < right)


class RoundTimer:
    """Times the rounds of a call: a round lasts until the next one begins.

    Args:
        model: what learns from them.
    """

    def __init__(self, model: RoundModel):
        self.model = model
        self._began = 0.0
        self._marks: list[float] = []
        self._done: tuple[int, Work] | None = None

    def begin(self) -> None:
        """A round begins; the one before it, if it was of this drafter, is over."""
        now = self.model.clock()
        if self._done is not None:
            rows, work = self._done
            times = self.model.times(rows)
            times.learn(work, now - self._began)
            steps = sorted(map(operator.sub, self._marks[1:], self._marks))
            if steps:  # after some drafts their confidence was read: the median tells
                times.learn_draft(steps[(len(steps) - 1) // 2])
            elif self._marks:  # the first draft takes the longest
                times.learn_draft(min(times.times[2], self._marks[0] - self._began))
        self._began, self._done, self._marks = now, None, []

    def mark(self) -> None:
        """Another draft is made, on a device that does not run after the host."""
        self._marks.append(self.model.clock())

    def end(self, rows: int, work: Work) -> None:
        """The round that began last has done such work."""
        self._done = rows, work


def _features(work: Work) -> tuple[float, float, float, float]:
    return 1.0, float(work.drafts > 0), float(work.drafts), float(work.drafts + work.copies)


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(map(operator.mul, one, other))


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
