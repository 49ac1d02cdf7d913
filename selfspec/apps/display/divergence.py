"""The first difference of two continuations, and whether rounding explains it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


class Divergence(NamedTuple):
    """The first difference of two continuations.

    Attributes:
        position: index of the first new token that differs.
        plain: the token of the model's own `generate`; `None` after its end.
        other: the other token; `None` after its end.
        margin: difference of their processed scores; `None` if one output ended.
        rounding: whether a margin that small can come from rounding in this dtype.
    """

    position: int
    plain: int | None
    other: int | None
    margin: float | None
    rounding: bool

    def describe(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """The difference in words."""
        plain, other = (
            "its end" if token is None else repr(tokenizer.decode([token]))
            for token in (self.plain, self.other)
        )
        apart = "" if self.margin is None else f", scores {self.margin:.3g} apart"
        return f"token {self.position}: plain {plain}, self-speculation {other}{apart}"


def find_divergence(
    plain: list[int],
    other: list[int],
    scores_after: Callable[[list[int]], Tensor],
    dtype: torch.dtype,
) -> Divergence | None:
    """Where `other` diverges from `plain`; `None` if they are equal.

    Args:
        plain: tokens of the model's own `generate`.
        other: tokens of another method.
        scores_after: `[vocab]` the processed scores of the model after some tokens of the output.
        dtype: the dtype of the model.
    """
    if plain == other:
        return None
    pairs = enumerate(zip(plain, other, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), min(len(plain), len(other)))
    a, b = (text[position] if position < len(text) else None for text in (plain, other))
    if a is None or b is None:
        return Divergence(position, a, b, None, rounding=False)
    scores = scores_after(plain[:position])
    margin = abs(float(scores[a] - scores[b]))
    size = float(scores[scores.isfinite()].abs().max())
    # By so many roundings a score may differ between a pass over one token and one over several.
    rounding = margin <= 32 * torch.finfo(dtype).eps * size
    return Divergence(position, a, b, margin if margin < float("inf") else None, rounding)
