"""Prompts that are written on at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.bench.tune.texts import in_batches, padded


class Batch(NamedTuple):
    """Prompts side by side, padded on the left.

    Attributes:
        tokens: `[rows, width]` token ids.
        mask: `[rows, width]` 1 for real tokens.
    """

    tokens: Tensor
    mask: Tensor

    @classmethod
    def of(cls, prompt: Tensor) -> Batch:
        """One prompt `[1, width]` alone."""
        return cls(prompt, torch.ones_like(prompt))

    @property
    def rows(self) -> int:
        """Number of prompts."""
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        """Tokens of the longest."""
        return self.tokens.shape[1]

    def row(self, index: int) -> Batch:
        """One prompt, padded as it stands here: a repetition penalty sees its padding, too."""
        return Batch(self.tokens[index : index + 1], self.mask[index : index + 1])


def make_batches(prompts: Sequence[Tensor], rows: int, device: torch.device) -> list[Batch]:
    """Batches of exactly `rows` prompts `[width]`; the last is filled up with the first again."""
    return [Batch(*padded(some, device)) for some in in_batches(prompts, rows)]
