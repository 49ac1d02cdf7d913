"""Rows of a cache, one by one: those that have ended wait while the others go on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.slots.cache import SlotCache

# Settled keys and values of a row, `[heads, length, dim]` each, per layer.
RowStates = list[tuple[Tensor, Tensor]]


def take_row(slots: SlotCache, index: int) -> RowStates:
    """Copies of one row's settled states."""
    length = slots.lengths[index]
    states: RowStates = []
    for layer in slots.layers[: slots.depth]:
        assert layer.keys is not None and layer.values is not None
        kv = layer.keys[index, :, :length].clone(), layer.values[index, :, :length].clone()
        states.append(kv)
    return states


def join_rows(
    states: Sequence[RowStates], windows: Sequence[int | None], device: torch.device | str
) -> SlotCache:
    """A cache of rows as `take_row` returns them."""
    lengths = [row[0][0].shape[1] for row in states]
    slots = SlotCache(windows, len(states), device=device)
    for index, layer in enumerate(slots.layers):
        keys, values = ([row[index][part] for row in states] for part in (0, 1))
        layer.keys, layer.values = (_stack(part, max(lengths)) for part in (keys, values))
        layer.is_initialized = True
    slots.lengths = lengths
    return slots


def _stack(states: Sequence[Tensor], length: int) -> Tensor:
    """Rows `[heads, n, dim]` of different n as one buffer `[rows, heads, length, dim]`."""
    padded = [torch.nn.functional.pad(s, (0, 0, 0, length - s.shape[1])) for s in states]
    return torch.stack(padded)
