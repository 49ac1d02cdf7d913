"""One model of a round: how many tokens it is expected to emit, and how many seconds it takes.

`auto` compares drafting strategies with it, and the `optimal` schedule decides when a chain ends.
It starts from priors, learns from every round, and outlives the call: times belong to a device.
"""

from __future__ import annotations

import copy
import math
import operator
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from selfspec.config import Times
from selfspec.decoder import Decoder
from selfspec.heads import ExitHead

_PRIOR_WEIGHT = 8.0  # the observed drafts that a prior acceptance rate weighs as much as
_MEMORY = 100.0  # rounds in which an observed draft loses two thirds of its weight
_GROWTH = 0.03  # prior time of verifying one more token per row, in plain steps
_DOUBT = 0.5  # standard deviation of the prior of a time, relative to it
_DRIFT = 0.1  # relative change of the machine's speed from one round to the next
_NOISE = 0.15  # relative standard deviation of the seconds of equal rounds
_OUTLIER = 1.0  # standard deviations at which the time of longer rounds is cut
# Assumed time of verifying several tokens instead of one, in plain steps: float32 on a CPU, the
# most expensive case that was measured, has .5 to .8; half precision and GPUs have nearly none.
_WIDE = 0.5
NEUTRAL = 0.5  # prior acceptance rate, and cost of a draft in plain steps, where nothing is known


class Work(NamedTuple):
    """What a round does beyond a plain decoding step.

    Attributes:
        drafts: tokens that an exit head drafts.
        copies: tokens that are looked up.
    """

    drafts: int = 0
    copies: int = 0


class RoundTimes:
    """Seconds of a round of one batch size, as a linear function of its work.

    A round takes a plain step, an overhead if a head drafts at all, a time per draft, and a time
    per token that is verified, drafted or copied. A Kalman filter learns these four times and their
    uncertainty from the seconds of whole rounds, so that every round tells about all kinds. On a
    CPU drafts are also timed one by one.

    Args:
        draft_cost: prior time of a draft, in plain steps.
        at_once: whether one pass makes all drafts of a round, so that its time is counted once.
    """

    def __init__(self, draft_cost: float, at_once: bool = False):
        # In plain steps until the first round was timed.
        once, each = (draft_cost, 0.0) if at_once else (_DOUBT * draft_cost, draft_cost)
        self.times = [1.0, once, each, _GROWTH]
        self._rounds = 0
        # Of the times relative to each other, in plain steps; the machine's speed is common to all.
        self._doubts = [0.0, _DOUBT * draft_cost, _DOUBT * draft_cost, 2 * _GROWTH]
        self._variance = [[0.0] * 4 for _ in range(4)]
        self._widen(_DOUBT, 1.0)

    def like(self, rows: int, known: int) -> RoundTimes:
        """A prior for `rows` rows from these times of `known` rows.

        The proportions of the times are less certain the more rows differ. Verifying a token takes
        longer with more rows; with fewer it takes their share.
        """
        other = copy.deepcopy(self)
        other.times[3] *= min(1.0, rows / known)
        other._rounds = 0  # the next round sets the speed
        other._widen(0.0, 1 - min(rows, known) / max(rows, known))
        return other

    @property
    def is_timed(self) -> bool:
        """Whether any round was timed."""
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
        """Learn from a round. The first one sets the time of a plain step."""
        expected = self.seconds(work)
        self._rounds += 1
        if self._rounds == 1:
            scale = seconds / expected
            self.times = [scale * value for value in self.times]
            self._variance = [[scale * scale * value for value in row] for row in self._variance]
            return
        # A process warms up: its first rounds differ in speed.
        self._widen(max(_DRIFT, _DOUBT / (self._rounds - 1)), _DRIFT)
        self._observe(_features(work), seconds)

    def learn_draft(self, seconds: float) -> None:
        """Learn from the seconds of a single draft, without its verification."""
        if self.is_timed:
            self._observe((0.0, 0.0, 1.0, 0.0), seconds)

    def _observe(self, features: Sequence[float], seconds: float) -> None:
        expected = max(_dot(self.times, features), 1e-9)
        spread = self._spread(features)
        total = _dot(features, spread) + (_NOISE * expected) ** 2
        # Disturbances make rounds longer only, so a short round is never an outlier.
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
        """Raise the uncertainty of the speed and of the proportions by these shares."""
        for i, doubt in enumerate(self._doubts):
            for j in range(4):
                self._variance[i][j] += speed * speed * self.times[i] * self.times[j]
            self._variance[i][i] += (proportions * doubt * self.times[0]) ** 2

    def _spread(self, features: Sequence[float]) -> list[float]:
        """Covariance of each time with the seconds of a round."""
        return [_dot(row, features) for row in self._variance]


class AssumedTimes(RoundTimes):
    """Fixed times in plain steps, so that no decision depends on measured times.

    A draft costs its share of the weights. Verifying more than one token is assumed to be
    expensive, so that drafts are made only where they pay on every device.

    Args:
        draft_cost: time of a draft, in plain steps.
        rows: rows of the batch.
        at_once: whether one pass makes all drafts of a round.
    """

    def __init__(self, draft_cost: float, rows: int, at_once: bool = False):
        super().__init__(draft_cost, at_once)
        self.times[3] *= rows / (1 + _GROWTH * (rows - 1))

    def seconds(self, work: Work) -> float:
        """Assumed plain steps of a round."""
        return super().seconds(work) + (_WIDE if work.drafts or work.copies else 0.0)

    def deviation(self, work: Work) -> float:
        """No uncertainty."""
        return 0.0

    def learn(self, work: Work, seconds: float) -> None:
        """Learn nothing."""

    def learn_draft(self, seconds: float) -> None:
        """Learn nothing."""


class AcceptanceRates:
    """Acceptance rates by position, given that all tokens before are accepted; they forget."""

    def __init__(self) -> None:
        self.accepted: defaultdict[int, float] = defaultdict(float)
        self.seen: defaultdict[int, float] = defaultdict(float)

    def prior(self, position: int) -> float:
        """The prior rate of a position."""
        raise NotImplementedError

    def rate(self, position: int) -> float:
        """The expected rate."""
        accepted = self.accepted.get(position, 0.0) + _PRIOR_WEIGHT * self.prior(position)
        return accepted / (self.seen.get(position, 0.0) + _PRIOR_WEIGHT)

    def learn(self, position: int, accepted: float) -> None:
        """Count a token whose predecessors were all accepted: 1, 0, or its chance of acceptance."""
        self.accepted[position] += accepted
        self.seen[position] += 1

    def fade(self) -> None:
        """Forget a little; called once a round."""
        for position in self.seen:
            self.accepted[position] *= 1 - 1 / _MEMORY
            self.seen[position] *= 1 - 1 / _MEMORY


class DraftRates(AcceptanceRates):
    """Acceptance of a head's drafts, by position.

    The prior of a position is the rate over all positions. A linear regression learns how
    acceptance depends on the head's confidence.

    Args:
        prior: acceptance rate before any draft was seen.
    """

    def __init__(self, prior: float):
        super().__init__()
        self._first_prior = prior
        self._count, self._confidence = 0.0, prior  # confidences seen, and their mean
        # Sums of squares of confidences around their mean, and of products with acceptance. The
        # prior is a few uniformly distributed confidences that are right on average.
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
        """The chance of a draft with that expected rate and confidence."""
        return min(1.0, max(0.0, rate + self._slope * (confidence - self._confidence)))

    @property
    def _slope(self) -> float:
        return self._products / self._squares

    @property
    def confidence_deviation(self) -> float:
        """Standard deviation of the change in chance that confidence explains."""
        return abs(self._slope) * math.sqrt(self._squares / (self._count + _PRIOR_WEIGHT))

    def learn_confidence(self, rate: float, confidence: float, accepted: bool) -> None:
        """Learn from the confidence in a draft with that expected rate.

        Nothing is forgotten: the relation depends on the head, not on the tokens.
        """
        self._count += 1
        distance = confidence - self._confidence
        self._confidence += distance / (self._count + _PRIOR_WEIGHT)
        self._squares += distance * distance
        self._products += distance * (accepted - rate)


class CopyRates(AcceptanceRates):
    """Acceptance of copied tokens, by the number of agreeing tokens before them."""

    def prior(self, position: int) -> float:
        """The longer two passages have agreed, the likelier they continue to."""
        return position / (position + _PRIOR_WEIGHT / 2)

    @staticmethod
    def bucket(agreeing: int) -> int:
        """The bucket of a length: lengths between two powers of two share a rate."""
        return 1 << agreeing.bit_length() >> 1


@dataclass(frozen=True)
class Choice:
    """A round's work, and its expected tokens per second and row."""

    work: Work
    rate: float


class RoundModel:
    """Expected tokens and seconds of rounds with one drafter.

    Args:
        draft_cost: prior time of a draft, in plain steps.
        acceptance: prior acceptance rates of greedy and of sampled drafts.
        clock: returns seconds, the same in all processes of one model.
        times: whether times are learned from the clock, or `AssumedTimes`.
        at_once: whether one pass makes all drafts of a round.
    """

    def __init__(
        self,
        draft_cost: float = NEUTRAL,
        acceptance: tuple[float, float] = (NEUTRAL, NEUTRAL),
        clock: Callable[[], float] | None = None,
        times: Times = "measured",
        at_once: bool = False,
    ):
        self.measured = times == "measured"
        self.clock = (clock or time.perf_counter) if self.measured else float
        self.drafts = {sampled: DraftRates(acceptance[sampled]) for sampled in (False, True)}
        self.copies = {sampled: CopyRates() for sampled in (False, True)}
        self._draft_cost, self._at_once = draft_cost, at_once
        self._times: dict[int, RoundTimes] = {}

    @classmethod
    def of_head(
        cls,
        decoder: Decoder,
        head: ExitHead,
        clock: Callable[[], float] | None = None,
        times: Times = "measured",
    ) -> RoundModel:
        """Priors of an exit head: its share of the weights, its calibrators' mean acceptance."""
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
        return cls(cost, (acceptance[0], acceptance[1]), clock, times, head.drafts_at_once)

    def times(self, rows: int) -> RoundTimes:
        """Times of rounds with that many rows; new ones start from the nearest known batch size."""
        if rows not in self._times:
            new = RoundTimes(self._draft_cost, self._at_once)
            if not self.measured:
                new = AssumedTimes(self._draft_cost, rows, self._at_once)
            elif self._times:
                nearest = min(self._times, key=lambda known: abs(known - rows))
                new = self._times[nearest].like(rows, nearest)
            self._times[rows] = new
        return self._times[rows]

    def plain(self, rows: int) -> Choice:
        """A round without drafts."""
        return Choice(Work(), 1 / self._hoped(rows, Work()))

    def best_chain(self, rows: int, sampled: bool, longest: int, hopeful: bool) -> Choice:
        """The best number of drafts, at least one.

        Args:
            rows: rows of the batch.
            sampled: whether tokens are sampled.
            longest: the most drafts.
            hopeful: whether uncertain times are taken optimistically.
        """
        seconds = self._hoped if hopeful else lambda rows, work: self.times(rows).seconds(work)
        tokens, reach, best = 1.0, 1.0, Choice(Work(1), 0.0)
        for position, rate in enumerate(self.drafts[sampled].rates(longest)):
            reach *= rate
            tokens += reach
            work = Work(drafts=position + 1)
            speed = tokens / seconds(rows, work)
            if speed < best.rate:
                break
            best = Choice(work, speed)
        return best

    def best_lookup(self, sampled: bool, matches: Sequence[int], longest: int) -> Choice:
        """The best number of copied tokens, given the length of each row's match.

        Rows count by the geometric mean of their tokens: a batch is done when its slowest row is,
        so that copies for a few rows alone bring little.
        """
        rows, rates = len(matches), self.copies[sampled]
        tokens = dict.fromkeys((row for row, match in enumerate(matches) if match), 1.0)
        reach, best = dict(tokens), Choice(Work(), 0.0)
        for position in range(longest if reach else 0):
            for row in reach:
                reach[row] *= rates.rate(rates.bucket(matches[row] + position))
                tokens[row] += reach[row]
            work = Work(copies=position + 1)
            mean = math.exp(sum(map(math.log, tokens.values())) / rows)
            speed = mean / self._hoped(rows, work)
            if speed < best.rate:
                break
            best = Choice(work, speed)
        return best

    def _hoped(self, rows: int, work: Work) -> float:
        """Optimistic seconds of a round, so that uncertain candidates are tried."""
        times = self.times(rows)
        expected = times.seconds(work)
        return expected / (1 + times.deviation(work) / expected)

    def speedup(self, longest: int) -> float:
        """Expected speedup of the best chains over plain decoding, for one row.

        It is the mean over sampled and greedy decoding.
        """
        plain = self.times(1).seconds(Work())
        chains = [self.best_chain(1, sampled, longest, hopeful=False) for sampled in self.drafts]
        return plain * sum(chain.rate for chain in chains) / len(chains)

    def learn_copies(self, sampled: bool, predicted: Sequence[tuple[int, int, int]]) -> None:
        """Learn how well matches predicted, whether their tokens were drafted or not.

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
        model: learns from the times.
    """

    def __init__(self, model: RoundModel):
        self.model = model
        self._began = 0.0
        self._marks: list[float] = []
        self._done: tuple[int, Work] | None = None

    def begin(self) -> None:
        """A round begins; the one before it, if it belongs to this drafter, is over."""
        now = self.model.clock()
        if self._done is not None:
            rows, work = self._done
            times = self.model.times(rows)
            times.learn(work, now - self._began)
            steps = sorted(map(operator.sub, self._marks[1:], self._marks))
            if steps:  # the median, because confidence was read after some drafts
                times.learn_draft(steps[(len(steps) - 1) // 2])
            elif self._marks:  # the first draft takes the longest
                times.learn_draft(min(times.times[2], self._marks[0] - self._began))
        self._began, self._done, self._marks = now, None, []

    def mark(self) -> None:
        """Another draft has been made, on a device that runs synchronously."""
        self._marks.append(self.model.clock())

    def end(self, rows: int, work: Work) -> None:
        """The current round has done such work."""
        self._done = rows, work


def _features(work: Work) -> tuple[float, float, float, float]:
    return 1.0, float(work.drafts > 0), float(work.drafts), float(work.drafts + work.copies)


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(map(operator.mul, one, other))


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
