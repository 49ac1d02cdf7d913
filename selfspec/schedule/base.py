"""What a schedule is, and the one that asks how sure the draft is."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from selfspec.heads import AcceptanceEstimator


class Schedule:
    """Decides after each drafted token whether to draft another; this one always does."""

    def begin(self, judge: AcceptanceEstimator) -> None:
        """A round begins, with what says how likely a greedy draft is kept."""

    def pause(self) -> None:
        """The next round is another drafter's."""

    def goes_on(self, scores: Tensor, tokens: Tensor, probs: Tensor | None) -> bool:
        """Whether to draft on.

        Args:
            scores: `[rows, 1, vocab]` processed draft scores.
            tokens: `[rows, 1]` the tokens just drafted from them.
            probs: `[rows, 1, vocab]` their probabilities, where tokens are drawn.
        """
        return True

    def end(self, drafted: int, accepted: Sequence[int]) -> None:
        """The round is decided: `accepted` of the `drafted` tokens stand, in each row."""


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
