"""Copies of rows, and the caches of transformers that callers hand in and get back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from selfspec.decoder.cache.cache import SlotCache
from selfspec.decoder.cache.recurrent import RecurrentLayer
from selfspec.decoder.cache.rows import joined_shifts


def load_cache(slots: SlotCache, cache: DynamicCache) -> None:
    """Copy the KV and states of a `DynamicCache` without padding into an empty cache."""
    length = cache.get_seq_length()
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            slots.recurrent[index] = RecurrentLayer.load(layer)
        if keys is not None and values is not None:
            kept = keys.shape[2]
            with slots.writing(kept, length - kept):
                slots.update(keys, values, index)
    slots.lengths = [length] * slots.rows


def store_cache(slots: SlotCache, cache: DynamicCache, beyond: int) -> None:
    """Append the tokens from position `beyond` on to a `DynamicCache`.

    All rows must have the same length.
    """
    for index, layer in enumerate(slots.layers):
        if index in slots.recurrent:
            theirs = cache.layers[index]
            assert isinstance(theirs, LinearAttentionCacheLayerMixin)  # others are refused
            slots.recurrent[index].store(theirs)
        if layer.is_initialized:
            keys, values = layer.seen(slots.lengths[0])
            cache.update(keys[:, :, beyond:], values[:, :, beyond:], index)


class RowStates(list[list[Tensor]]):
    """For each layer, one row's part of each buffer, `[heads, length, any]`.

    Args:
        buffers: these parts.
        length: committed tokens.
        shift: the row's `SlotCache.shift`, `[1]` or `[axes, 1]`, or `None`.
        recurrent: the row's recurrent states, by the index of the layer.
    """

    def __init__(
        self,
        buffers: Iterable[list[Tensor]],
        length: int,
        shift: Tensor | None,
        recurrent: dict[int, RecurrentLayer],
    ):
        super().__init__(buffers)
        self.length, self.shift, self.recurrent = length, shift, recurrent


def take_row(slots: SlotCache, index: int) -> RowStates:
    """Copies of one row's committed states."""
    length = slots.lengths[index]
    buffers = [
        [buffer[index, :, :length].clone() for buffer in layer.buffers]
        for layer in slots.layers[: slots.depth]
    ]
    shift = None if slots.shift is None else slots.shift[..., [index]]
    recurrent = {number: layer.part([index]) for number, layer in slots.recurrent.items()}
    return RowStates(buffers, length, shift, recurrent)


def join_rows(states: Sequence[RowStates], like: SlotCache) -> SlotCache:
    """A cache of rows as `take_row` returns them, taken from caches like this one."""
    slots = like.empty(len(states))
    slots.lengths = [row.length for row in states]
    slots.shift = joined_shifts([(row.shift, 1) for row in states])
    for index, layer in enumerate(slots.layers):
        if states[0][index]:  # not a layer without attention
            parts = zip(*(row[index] for row in states), strict=True)
            layer.hold([_stack(part, max(slots.lengths)) for part in parts])
    for index in slots.recurrent:
        slots.recurrent[index] = RecurrentLayer.join(
            [row.recurrent[index] for row in states], [1] * len(states)
        )
    return slots


def _stack(states: Sequence[Tensor], length: int) -> Tensor:
    """Rows `[heads, n, any]` of different n as one buffer `[rows, heads, length, any]`."""
    padded = [torch.nn.functional.pad(s, (0, 0, 0, length - s.shape[1])) for s in states]
    return torch.stack(padded)
