"""Smaller or adapted LM heads, made of the target's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from selfspec.decoder import Decoder


@torch.no_grad()
def trimmed_readout(decoder: Decoder, vocab_ids: Tensor) -> nn.Linear:
    """The rows of the target's LM head for `vocab_ids`, gathered once into one piece.

    Raises:
        ValueError: the LM head's weights are quantized, so rows cannot be taken from them.
    """
    weight = decoder.lm_head_weight
    bias: Tensor | None = getattr(decoder.lm_head, "bias", None)
    rows, width = len(vocab_ids), weight.shape[1]
    trimmed = nn.Linear(
        width, rows, bias=bias is not None, device=weight.device, dtype=weight.dtype
    )
    trimmed.weight.copy_(weight[vocab_ids])
    if bias is not None:
        trimmed.bias.copy_(bias[vocab_ids])
    return trimmed.requires_grad_(False)
