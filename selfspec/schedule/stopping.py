"""When a chain of drafts ends: after a fixed number, when the draft is unsure, or optimally."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from selfspec.config import DraftConfig
from selfspec.heads import Calibrator, Confidence
from selfspec.schedule.round_model import RoundModel, RoundTimer, Work

_LOOK = 16  # rounds after which the confidence is read and one more draft is made, to learn


class Schedule:
    """Decides after each drafted token whether to draft another; this one always does."""

    def begin(self, confidence: Confidence) -> None:
        """A round begins; `confidence` tells the chance of each draft."""

    def pause(self) -> None:
        """The next round belongs to another drafter."""

    def goes_on(self, scores: Tensor, tokens: Tensor, probs: Tensor | None) -> bool:
        """Whether to draft another token.

        Args:
            scores: `[rows, 1, vocab]` processed draft scores.
            tokens: `[rows, 1]` the tokens just drafted from them.
            probs: `[rows, 1, vocab]` their probabilities, if tokens are sampled.
        """
        return True

    def end(self, drafted: int, accepted: Sequence[int]) -> None:
        """The round is verified: `accepted` of the `drafted` tokens in each row."""


class ConfidenceStop(Schedule):
    """Stops once the draft is unsure of its own token in every row (Kangaroo, Liu et al. 2024).

    Args:
        threshold: the probability below which a row is unsure.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold

    def goes_on(self, scores: Tensor, tokens: Tensor, probs: Tensor | None) -> bool:
        """Whether some row's token has at least the threshold's probability."""
        known = scores.softmax(-1) if probs is None else probs
        confidence = known.gather(-1, tokens[..., None])
        return bool((confidence >= self.threshold).any())


class OptimalStop(Schedule):
    """Stops once another draft is expected to bring less than its time is worth.

    A draft brings a token if it and all drafts before it are accepted. Time is worth the tokens per
    second of the best chain: drafting continues while it would raise that rate (the marginal value
    theorem, Charnov 1976). Tokens are averaged over rows.

    The head's confidence in a draft is read only where it could change the decision, because
    reading takes time, and in every 16th round to learn how much it tells. Such a round also has
    one draft more, because rounds of one length do not show the time of a draft.

    Args:
        model: times and acceptance rates, which outlive the call.
        longest: the most drafts of a round.
    """

    def __init__(self, model: RoundModel, longest: int = 16):
        self.model, self.timer, self.longest = model, RoundTimer(model), longest
        self._confidence: Confidence | None = None
        self._rounds, self._made, self._sampled = 0, 0, False
        self._further = False  # whether the round has one draft more, to learn from
        self._reach = [1.0]  # chance that all drafts so far are accepted, per row or for all rows
        self._rates: list[float] = []  # expected acceptance by position
        self._read_seconds = {False: 0.0, True: 0.0}  # of the last reading of confidence
        self._rate = 0.0  # tokens per second of the best chain
        self._price = 0.0  # tokens that the time of another draft is worth
        self._confidences: dict[int, list[float]] = {}  # by position, of each row

    def begin(self, confidence: Confidence) -> None:
        """Time the round from here."""
        self.timer.begin()
        self._confidence, self._reach, self._confidences = confidence, [1.0], {}
        self._rounds, self._made, self._further = self._rounds + 1, 0, False

    def pause(self) -> None:
        """End the timing of the last round."""
        self.timer.begin()

    def goes_on(self, scores: Tensor, tokens: Tensor, probs: Tensor | None) -> bool:
        """Whether the next draft is worth its time."""
        if scores.device.type == "cpu":
            self.timer.mark()
        if self._made == 0:
            self._plan(scores.shape[0], probs is not None)
        position, self._made = self._made, self._made + 1
        rates = self.model.drafts[self._sampled]
        rate, following = (self._rates[min(at, self.longest)] for at in (position, position + 1))
        price = self._price * len(self._reach) / following
        low, high = (
            sum(self._reach) * (rate + sign * rates.confidence_deviation) for sign in (-1, 1)
        )
        worth = (high - low) / 2 * following / len(self._reach)
        pays = low <= price < high and worth > self._read_seconds[self._sampled] * self._rate
        if pays or self._rounds % _LOOK == 0:
            began = self.model.clock()
            assert self._confidence is not None
            confidences = self._confidences[position] = self._confidence(scores, probs, position)
            self._read_seconds[self._sampled] = self.model.clock() - began
            chances = [rates.with_confidence(rate, confidence) for confidence in confidences]
            reach = self._reach if len(self._reach) > 1 else self._reach * len(chances)
            self._reach = [so_far * chance for so_far, chance in zip(reach, chances, strict=True)]
        else:
            self._reach = [so_far * rate for so_far in self._reach]
        if sum(self._reach) * following > self._price * len(self._reach):
            return True
        # Rounds of one length would not show the time of a draft.
        self._further = not self._further and self._rounds % _LOOK == 0
        return self._further

    def _plan(self, rows: int, sampled: bool) -> None:
        """Compute the value of time in this round."""
        self._sampled = sampled
        best = self.model.best_chain(rows, sampled, self.longest, hopeful=False)
        self._rate = best.rate
        self._price = best.rate * self.model.times(rows).draft_seconds
        self._rates = self.model.drafts[sampled].rates(self.longest + 1)

    def end(self, drafted: int, accepted: Sequence[int]) -> None:
        """Learn from the round: `accepted` of the `drafted` tokens in each row."""
        self.timer.end(len(accepted), Work(drafts=drafted))
        rates = self.model.drafts[self._sampled]
        rates.fade()
        for row, count in enumerate(accepted):
            for position in range(min(drafted, count + 1)):
                rates.learn(position, position < count)
                if position in self._confidences:
                    rate = self._rates[min(position, self.longest)]
                    confidence = self._confidences[position][row]
                    rates.learn_confidence(rate, confidence, position < count)


def make_schedule(config: DraftConfig, model: RoundModel | None = None) -> Schedule:
    """The schedule that a config names.

    Args:
        config: the draft config.
        model: the model of rounds, which outlives the call.
    """
    if config.schedule == "confidence":
        return ConfidenceStop(config.confidence)
    if config.schedule == "optimal":
        return OptimalStop(model or RoundModel(), config.most_tokens)
    return Schedule()


def uncalibrated() -> Confidence:
    """The confidence in drafts of a model without a fitted calibrator."""
    return Calibrator().confidence()
