"""How long to draft."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from selfspec.config import DraftConfig


class Schedule(Protocol):
    """Decides after each drafted token whether to draft another."""

    def goes_on(self, scores: Tensor, tokens: Tensor) -> bool:
        """Whether to draft on.

        Args:
            scores: `[rows, vocab]` processed draft scores.
            tokens: `[rows]` the tokens just drafted from them.
        """
        ...


class FixedLength:
    """Drafts `num_draft_tokens` in every round, and never asks the device."""

    def goes_on(self, scores: Tensor, tokens: Tensor) -> bool:
        """Always."""
        return True


class ConfidenceStop:
    """Stops once the draft is unsure of its own token in every row (Kangaroo, Liu et al. 2024).

    Args:
        threshold: the probability below which a row is unsure.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold

    def goes_on(self, scores: Tensor, tokens: Tensor) -> bool:
        """Whether some row's token has at least the threshold's probability."""
        confidence = scores.float().softmax(-1).gather(-1, tokens[:, None])
        return bool((confidence >= self.threshold).any())


def make_schedule(config: DraftConfig) -> Schedule:
    """The schedule that a config names."""
    if config.schedule == "confidence":
        return ConfidenceStop(config.confidence)
    return FixedLength()
