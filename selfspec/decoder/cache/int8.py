"""Keys and values in 8 bits, with one scale per token and head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from selfspec.decoder.cache.layer import SlotLayer
from selfspec.decoder.cache.window import Window

_MOST = torch.iinfo(torch.int8).max


def to_int8(states: Tensor) -> tuple[Tensor, Tensor]:
    """`[..., dim]` states as int8, and their scales `[..., 1]` in the states' dtype."""
    scales = states.abs().amax(-1, keepdim=True) / _MOST
    wide = states if states.dtype.itemsize >= 4 else states.float()
    steps = wide / scales.to(wide.dtype).clamp_min(torch.finfo(wide.dtype).tiny)
    return steps.round().clamp(-_MOST, _MOST).to(torch.int8), scales


def from_int8(numbers: Tensor, scales: Tensor) -> Tensor:
    """The rounded states."""
    return numbers.to(scales.dtype) * scales


class Int8Layer(SlotLayer):
    """One layer's keys and values in 8 bits."""

    names = ("keys", "values", "key_scales", "value_scales")

    def __init__(self, window: int | None = None, owner: object = None):
        super().__init__(window, owner)
        self.key_scales: Tensor | None = None
        self.value_scales: Tensor | None = None

    def write(
        self, key_states: Tensor, value_states: Tensor, window: Window
    ) -> tuple[Tensor, Tensor]:
        """Write states to the window's slots, rounded; returns the visible keys and values."""
        self.make_room(window.end)
        for states, buffer in zip(self._kept(key_states, value_states), self.buffers, strict=True):
            window.put(states, buffer)
        return self.seen(window.end)

    def seen(self, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `end` slots, as layers read them."""
        return self._read([buffer.narrow(2, 0, end) for buffer in self.buffers])

    def _read(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        keys, values, key_scales, value_scales = parts
        return from_int8(keys, key_scales), from_int8(values, value_scales)

    def _kept(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, ...]:
        (keys, key_scales), (values, value_scales) = to_int8(key_states), to_int8(value_states)
        return keys, values, key_scales, value_scales


class RoundedCache(DynamicCache):
    """A cache for the model's own `generate` that rounds states as `Int8Layer` does.

    It saves no memory. It defines the output that decoding with an int8 cache must equal.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Keep the rounded states."""
        keys, values = (from_int8(*to_int8(states)) for states in (key_states, value_states))
        return super().update(keys, values, layer_idx, *args, **kwargs)
