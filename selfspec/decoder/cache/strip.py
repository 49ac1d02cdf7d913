"""One layer's buffers in one pass, as compiled code sees them."""

from __future__ import annotations

import torch
from torch import Tensor


class Strip:
    """Stands in for a `SlotCache` where a layer's code is compiled.

    Compiled code is made for the Python values that it reads. A cache is full of those: layers,
    lengths, the pass in progress. Here all that differs between passes and layers is a tensor or
    the shape of one.

    Args:
        keys: `[rows, heads, capacity, head_dim]` the layer's keys, with room for the pass.
        values: the same of its values.
        slots: `[rows, width]` slots that the pass writes.
        seen: `[end]` any tensor as long as what the longest row attends to.
    """

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor, seen: Tensor):
        self.keys, self.values, self.slots, self.seen = keys, values, slots, seen

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write the layer's new states; returns its keys and values up to the longest row's end."""
        rows = torch.arange(key_states.shape[0], device=key_states.device)[:, None]
        self.keys[rows, :, self.slots] = key_states.transpose(1, 2)
        self.values[rows, :, self.slots] = value_states.transpose(1, 2)
        end = self.seen.shape[0]
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)
