"""Smaller or adapted LM heads, made of the target's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from selfspec.decoder import Decoder, weight_of
from selfspec.heads.parts import check_tail


@torch.no_grad()
def trimmed_readout(decoder: Decoder, vocab_ids: Tensor) -> nn.Linear:
    """The rows of the target's LM head for `vocab_ids`, gathered once into one piece.

    Raises:
        ValueError: the LM head's rows cannot be taken, or read something else than the final norm.
    """
    check_tail(decoder)
    weight = decoder.lm_head_weight
    bias = None if decoder.lm_head.bias is None else weight_of(decoder.lm_head, "bias")
    ids = vocab_ids.to(weight.device)
    # Without memory of its own, and without drawing weights that would be thrown away.
    trimmed = nn.Linear(weight.shape[1], len(ids), bias=bias is not None, device="meta")
    trimmed.weight = nn.Parameter(weight[ids], requires_grad=False)
    if bias is not None:
        trimmed.bias = nn.Parameter(bias[ids], requires_grad=False)
    return trimmed
