"""One layer's keys and values, and the slots that a pass writes."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from selfspec.draft import Tree

_GROWTH = 256  # smallest step by which a buffer grows, in slots


class Window:
    """The slots that one pass writes: `width` of them behind `starts` in each row.

    Attributes:
        starts: first slot written, per row.
        width: tokens of the pass, per row.
        tree: which of a block's drafts continue which; `None` where a token continues the slot
            before its own.
        place: of the first token in the tree's block.
        slots: `[rows, width]` the slots.
        positions: `[rows, width]` the tokens' positions: their slots, but for a tree's.
        end: one more than the last slot written: what the longest row attends to.
        uniform: whether all rows write the same slots.
    """

    def __init__(
        self,
        starts: list[int],
        width: int,
        counted: Tensor,
        tree: Tree | None = None,
        place: int = 0,
    ):
        self.starts, self.width, self.tree, self.place = starts, width, tree, place
        first, last = min(starts), max(starts)
        self.end = last + width
        self.uniform = first == last
        if self.uniform:
            self.slots = counted.narrow(0, first, width).expand(len(starts), -1)
        else:
            rows = torch.tensor(starts, device=counted.device)
            self.slots = rows[:, None] + counted[:width]
        self.positions = self.slots
        if tree is not None:
            block = slice(place, place + width)
            self.positions = self.slots - counted[block] + tree.depths[:, block]


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values."""

    def __init__(self, window: int | None = None):
        super().__init__()
        self.window = window
        self.is_sliding = window is not None

    @property
    def capacity(self) -> int:
        """Slots that fit before the buffers grow."""
        return self.keys.shape[2] if self.keys is not None else 0

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        return sum(b.nbytes for b in (self.keys, self.values) if b is not None)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take dtype, device and widths from the first states that arrive."""
        self.keys = key_states.new_zeros(*key_states.shape[:2], 0, key_states.shape[3])
        self.values = value_states.new_zeros(*value_states.shape[:2], 0, value_states.shape[3])
        self.is_initialized = True

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` slots, keeping what is there."""
        if self.keys is not None and self.values is not None and self.capacity < capacity:
            room = max(capacity - self.capacity, 0)
            self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, room))
            self.values = torch.nn.functional.pad(self.values, (0, 0, 0, room))

    def make_room(self, window: Window) -> None:
        """Grow, by doubling, where the window reaches beyond the buffers."""
        if self.capacity < window.end:
            self.grow(max(window.end, 2 * self.capacity, _GROWTH))

    def write(
        self, key_states: Tensor, value_states: Tensor, window: Window
    ) -> tuple[Tensor, Tensor]:
        """Scatter `[rows, heads, width, dim]` states to the window's slots.

        Returns:
            The keys and values up to the window's end.
        """
        self.make_room(window)
        keys, values = self.keys, self.values
        assert keys is not None and values is not None
        if window.uniform:
            keys.narrow(2, window.starts[0], window.width).copy_(key_states)
            values.narrow(2, window.starts[0], window.width).copy_(value_states)
        else:
            slots = window.slots.to(key_states.device)
            rows = torch.arange(key_states.shape[0], device=key_states.device)[:, None]
            keys[rows, :, slots] = key_states.transpose(1, 2)
            values[rows, :, slots] = value_states.transpose(1, 2)
        return keys.narrow(2, 0, window.end), values.narrow(2, 0, window.end)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Refused: the cache that owns this layer knows where states go."""
        raise NotImplementedError("SlotLayer is written through SlotCache.update")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Refused: the cache that owns this layer knows its sizes."""
        raise NotImplementedError("ask SlotCache.get_mask_sizes")

    def get_seq_length(self) -> int:
        """Refused: the cache that owns this layer knows its lengths."""
        raise NotImplementedError("ask SlotCache.get_seq_length")

    def get_max_length(self) -> int:
        """-1: buffers grow."""
        return -1
