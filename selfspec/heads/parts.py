"""Parts that kinds of heads are made of, copied from the target."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from selfspec.decoder import Decoder

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def own_norm(decoder: Decoder) -> nn.Module:
    """A copy of the target's final norm.

    Raises:
        ValueError: the target has none, or has more than the LM head behind it.
    """
    check_tail(decoder)
    if decoder.final_norm is None:
        name = type(decoder.causal_lm).__name__
        raise ValueError(f"{name} has no final norm to start an exit head from")
    return decoder.copy(decoder.final_norm)


def check_tail(decoder: Decoder) -> None:
    """Raise ValueError where the LM head does not read the final norm's output (small OPTs)."""
    width = decoder.config.hidden_size
    reads = getattr(decoder.lm_head, "in_features", width)
    if reads != width:
        raise ValueError(
            f"{type(decoder.causal_lm).__name__} projects {width} to {reads} between its final "
            "norm and its LM head, which exit heads cannot; use head='shared', untrimmed"
        )


def placed(module: ModuleT, decoder: Decoder, exit_layer: int) -> ModuleT:
    """New parts where the exit is, in the dtype of the target's final norm."""
    norm = decoder.final_norm
    parameters = iter(()) if norm is None else norm.parameters()
    like = next(parameters, torch.empty(0, dtype=decoder.dtype))
    return module.to(decoder.device_at(exit_layer), like.dtype)
