"""Where two greedy texts part, and whether rounding can explain it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfspec.bench.batches import Batch
from selfspec.model import SelfSpecModel

# Roundings that a score may differ by between a pass over one token and one over several.
_ROUNDINGS = 32


class Divergence(NamedTuple):
    """The first difference of two continuations.

    Attributes:
        position: index of the first new token that differs.
        plain: the token that the model's own `generate` wrote there; `None` behind its end.
        other: the other one.
        margin: the difference of their scores, the processors applied; `None` where a text ended.
        rounding: whether a margin that small can come from rounding in this dtype.
    """

    position: int
    plain: int | None
    other: int | None
    margin: float | None
    rounding: bool


def first_divergence(
    spec: SelfSpecModel, prompt: Batch, options: dict[str, Any], plain: list[int], other: list[int]
) -> Divergence | None:
    """Where `other` parts from `plain`; `None` where they are equal.

    Args:
        spec: the target.
        prompt: the one row that both go on from.
        options: of `generate`, the same for both.
        plain: tokens of the model's own `generate`.
        other: tokens of another method.
    """
    if plain == other:
        return None
    pairs = enumerate(zip(plain, other, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), min(len(plain), len(other)))
    tokens = [text[position] if position < len(text) else None for text in (plain, other)]
    a, b = tokens
    if a is None or b is None:
        return Divergence(position, a, b, None, rounding=False)
    scores = _scores(spec, prompt, plain[:position], options)
    margin = abs(float(scores[a] - scores[b]))
    size = float(scores[scores.isfinite()].abs().max())
    rounding = margin <= _ROUNDINGS * torch.finfo(spec.engine.decoder.dtype).eps * size
    return Divergence(position, a, b, margin if margin < float("inf") else None, rounding)


def _scores(
    spec: SelfSpecModel, prompt: Batch, written: list[int], options: dict[str, Any]
) -> Tensor:
    """`[vocab]` what the model's own `generate` would choose the next token from."""
    generate: Any = spec.model.generate
    behind = prompt.tokens.new_tensor([written])
    output = generate(
        torch.cat([prompt.tokens, behind], dim=1),
        attention_mask=torch.cat([prompt.mask, torch.ones_like(behind)], dim=1),
        return_dict_in_generate=True,
        output_scores=True,
        past_key_values=spec.engine.decoder.own_cache(),
        **{**options, "max_new_tokens": 1},
    )
    return output.scores[0][0].float()
