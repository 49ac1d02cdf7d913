"""LM heads that say what an exit head says, with nothing in front of them but a norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfspec.decoder import Decoder
from selfspec.heads import ExitHead, LensHead, LoraHead

# As far down as float16 reaches with room for the logit itself.
_NEVER = -1e4


def folded_readout(decoder: Decoder, head: ExitHead) -> dict[str, Tensor]:
    """The parameters of the LM head that `head` makes of the target's; empty if it stays.

    Raises:
        ValueError: the target's LM head is quantized, or has an adapter.
    """
    weight = _corrected(decoder, head)
    ids = head.vocab_ids
    if ids is None:
        return {} if weight is None else {"weight": weight}
    return _expanded(decoder, decoder.lm_head_weight if weight is None else weight, ids)


def _corrected(decoder: Decoder, head: ExitHead) -> Tensor | None:
    """`[vocab, hidden]` W (I + B A) of a lens, W + B A of a LoRA head."""
    if isinstance(head, LensHead):
        weight = decoder.lm_head_weight
        exact = torch.promote_types(weight.dtype, torch.float32)
        wide, up, down = (
            matrix.to(weight.device, exact) for matrix in (weight, head.up.weight, head.down.weight)
        )
        return (wide + wide @ up @ down).to(weight.dtype)
    if isinstance(head, LoraHead):
        weight = decoder.lm_head_weight
        adapted: Any = head.readout
        rows = slice(None) if head.vocab_ids is None else head.vocab_ids.to(weight.device)
        corrected = weight.detach().clone()
        corrected[rows] += adapted.get_delta_weight("exit").to(weight.device, weight.dtype)
        return corrected
    return None


def _expanded(decoder: Decoder, weight: Tensor, vocab_ids: Tensor) -> dict[str, Tensor]:
    """An LM head over all tokens whose likeliest one is always among `vocab_ids`.

    A token outside gets the mean of the rows inside, and so the mean of their logits, which is
    never the highest; where there is a bias, a very low one as well.
    """
    ids = vocab_ids.to(weight.device)
    outside = torch.ones(weight.shape[0], dtype=torch.bool, device=weight.device)
    outside[ids] = False
    expanded = weight.detach().clone()
    exact = torch.promote_types(weight.dtype, torch.float32)
    expanded[outside] = weight[ids].to(exact).mean(0).to(weight.dtype)
    bias: Tensor | None = getattr(decoder.lm_head, "bias", None)
    if bias is None:
        return {"weight": expanded}
    return {"weight": expanded, "bias": bias.detach().masked_fill(outside.to(bias.device), _NEVER)}
