"""Parts that kinds of heads are made of, copied from the target."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

from selfspec.decoder import Decoder

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def own_norm(decoder: Decoder) -> nn.Module:
    """A copy of the target's final norm.

    Raises:
        ValueError: the target has none.
    """
    if decoder.final_norm is None:
        name = type(decoder.causal_lm).__name__
        raise ValueError(f"{name} has no final norm to start an exit head from")
    return copy.deepcopy(decoder.final_norm)


def placed(head: ModuleT, decoder: Decoder) -> ModuleT:
    """The head in the target's dtype, where its final norm is."""
    norm = decoder.final_norm
    parameters = iter(()) if norm is None else norm.parameters()
    where = next(parameters, torch.empty(0, dtype=decoder.dtype, device=decoder.device))
    return head.to(where.device, where.dtype)
