"""The first difference of two continuations, and whether rounding explains it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec.config import Options
from selfspec.decoder import CACHE
from selfspec.model import SelfSpecModel


class Divergence(NamedTuple):
    """The first difference of two continuations."""

    position: int  # index of the first new token that differs
    plain: int | None  # the token of the model's own `generate`; `None` after its end
    other: int | None  # the other token; `None` after its end
    margin: float | None  # difference of their processed scores; `None` if one output ended
    rounding: bool  # whether a margin that small can come from rounding in this dtype

    def describe(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """The difference in words."""
        plain, other = (
            "its end" if token is None else repr(tokenizer.decode([token]))
            for token in (self.plain, self.other)
        )
        apart = "" if self.margin is None else f", scores {self.margin:.3g} apart"
        return f"token {self.position}: plain {plain}, self-speculation {other}{apart}"


def first_divergence(
    spec: SelfSpecModel,
    prompt: Tensor,
    mask: Tensor,
    options: Options,
    plain: list[int],
    other: list[int],
) -> Divergence | None:
    """Where `other` diverges from `plain`, the model's own output; `None` if they are equal.

    Both continue `prompt` `[1, width]` with its attention mask and the same options of `generate`.
    """
    if plain == other:
        return None
    pairs = enumerate(zip(plain, other, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), min(len(plain), len(other)))
    a, b = (text[position] if position < len(text) else None for text in (plain, other))
    if a is None or b is None:
        return Divergence(position, a, b, None, rounding=False)
    behind = prompt.new_tensor([plain[:position]])
    texts, masks = torch.cat([prompt, behind], 1), torch.cat([mask, torch.ones_like(behind)], 1)
    scores = next_scores(spec, texts, masks, options)[0].float()
    margin = abs(float(scores[a] - scores[b]))
    size = float(scores[scores.isfinite()].abs().max())
    # By so many roundings a score may differ between a pass over one token and one over several.
    rounding = margin <= 32 * torch.finfo(spec.decoder.dtype).eps * size
    return Divergence(position, a, b, margin if margin < float("inf") else None, rounding)


def next_scores(spec: SelfSpecModel, texts: Tensor, mask: Tensor, options: Options) -> Tensor:
    """`[rows, vocab]` the processed scores of the model's own `generate` for the next token."""
    generate: Any = spec.model.generate
    with torch.random.fork_rng():
        output = generate(
            texts,
            attention_mask=mask,
            return_dict_in_generate=True,
            output_scores=True,
            **{CACHE: spec.decoder.own_cache(), **options, "max_new_tokens": 1},
        )
    return output.scores[0]
