"""Rows of a cache, one by one: those that have ended wait while the others go on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.decoder.cache.cache import SlotCache

# What each layer's buffers hold of a row's settled tokens, `[heads, length, any]` each.
RowStates = list[list[Tensor]]


def take_row(slots: SlotCache, index: int) -> RowStates:
    """Copies of one row's settled states."""
    length = slots.lengths[index]
    layers = slots.layers[: slots.depth]
    return [[buffer[index, :, :length].clone() for buffer in layer.buffers] for layer in layers]


def join_rows(states: Sequence[RowStates], like: SlotCache) -> SlotCache:
    """A cache of rows as `take_row` returns them, taken from caches like this one."""
    slots = like.empty(len(states))
    slots.lengths = [row[0][0].shape[1] for row in states]
    for index, layer in enumerate(slots.layers):
        parts = zip(*(row[index] for row in states), strict=True)
        layer.hold([_stack(part, max(slots.lengths)) for part in parts])
    return slots


def _stack(states: Sequence[Tensor], length: int) -> Tensor:
    """Rows `[heads, n, any]` of different n as one buffer `[rows, heads, length, any]`."""
    padded = [torch.nn.functional.pad(s, (0, 0, 0, length - s.shape[1])) for s in states]
    return torch.stack(padded)
