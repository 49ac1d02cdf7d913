"""Keys and values of one layer: growing buffers that are written at each row's positions."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_not

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from selfspec.decoder.cache.masks import WIDEST
from selfspec.decoder.cache.window import GROWTH, View, Window


class GrowingBuffers:
    """Tensors `[rows, heads, slots, any]` that are attributes of their owner.

    Attributes:
        is_initialized: whether there are any.
    """

    names: tuple[str, ...]  # of the attributes
    is_initialized: bool

    def __init__(self) -> None:
        super().__init__()
        self._wholes: list[Tensor] = []  # with rows that are not in use at the end
        # Their first rows, by number. Recorded graphs know keys and values by these tensors, so a
        # graph of three rows is used again whenever there are three.
        self._parts: dict[int, list[Tensor]] = {}

    @property
    def capacity(self) -> int:
        """Slots that fit before the buffers grow."""
        return getattr(self, self.names[0]).shape[2] if self.is_initialized else 0

    @property
    def buffers(self) -> list[Tensor]:
        """All buffers, `[rows, heads, slots, any]` each; none before the first write."""
        return [getattr(self, name) for name in self.names] if self.is_initialized else []

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def reserved_rows(self) -> int:
        """Rows of the buffers, in use or not."""
        return self._wholes[0].shape[0] if self._wholes else 0

    def reclaim(self) -> None:
        """Use all rows of the buffers again."""
        if self.is_initialized and len(self.buffers[0]) < self.reserved_rows:
            self.hold(self._wholes)

    def hold(self, buffers: Sequence[Tensor], rows: int | None = None) -> None:
        """Replace the buffers, of which the first `rows` rows are in use; `None` for all."""
        if len(self._wholes) != len(buffers) or any(map(is_not, self._wholes, buffers)):
            self._wholes, self._parts = list(buffers), {}
        count = self.reserved_rows if rows is None else rows
        if count not in self._parts:
            self._parts[count] = [buffer[:count] for buffer in buffers]
        vars(self).update(zip(self.names, self._parts[count], strict=True))
        self.is_initialized = True

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse buffers of others, such as those of a hook that compresses the cache.

        Raises:
            ValueError: `value` would take the place of a buffer.
        """
        if name in self.names and value is not None:
            raise ValueError(
                f"the {name} of a layer of selfspec's KV cache were replaced: tokens stay at their "
                "places there, so that rejected drafts can be taken back; call the model's own "
                "generate with what compresses or replaces them"
            )
        super().__setattr__(name, value)

    def select(self, rows: Sequence[int]) -> None:
        """Keep some rows, in the given order; the others' memory is left for rows that join."""
        moved = {index: row for index, row in enumerate(rows) if index != row}
        for whole in self._wholes if moved else ():
            whole[list(moved)] = whole[list(moved.values())]
        if self.is_initialized:
            self.hold(self._wholes, len(rows))

    def join(
        self, other: GrowingBuffers, rows: tuple[int, int], length: int, capacity: int
    ) -> None:
        """Append rows of other buffers; memory grows only if there is no room for them.

        Args:
            other: the other ones.
            rows: numbers of rows here and there.
            length: slots to copy.
            capacity: slots that each row needs.
        """
        if not self.is_initialized and not other.is_initialized:
            return
        here, all_rows = rows[0], sum(rows)
        wholes = self._wholes or [buffer[:0] for buffer in other.buffers]
        more_rows = max(0, all_rows - wholes[0].shape[0])
        more_slots = max(0, capacity - wholes[0].shape[2])
        if more_rows or more_slots:
            room = (0, 0, 0, more_slots, 0, 0, 0, more_rows)
            wholes = [torch.nn.functional.pad(whole, room) for whole in wholes]
        self.hold(wholes, all_rows)
        for mine, theirs in zip(self.buffers, other.buffers, strict=False):  # may have none yet
            mine[here:, :, :length] = theirs[:, :, :length]
            mine[here:, :, length:] = 0  # a row with NaN may have left its states there

    def grow(self, capacity: int) -> None:
        """Grow the buffers to `capacity` slots."""
        room = capacity - self.capacity
        if room > 0 and self.is_initialized:
            rows = self.buffers[0].shape[0]
            self.hold([torch.nn.functional.pad(w, (0, 0, 0, room)) for w in self._wholes], rows)

    def make_room(self, end: int) -> None:
        """Double the buffers unless they reach up to slot `end`."""
        if self.capacity < end:
            self.grow(max(end, 2 * self.capacity, GROWTH))


class SlotLayer(GrowingBuffers, CacheLayerMixin):
    """One layer's keys and values, as they are.

    Args:
        window: the sliding window in tokens, or `None`.
        owner: the head whose layer this is, of an added layer.
    """

    names = ("keys", "values")

    def __init__(self, window: int | None = None, owner: object = None):
        super().__init__()
        self.window, self.owner = window, owner
        self.is_sliding = window is not None
        self._view: tuple[View, list[Tensor]] | None = None  # the last one, and its slots

    def hold(self, buffers: Sequence[Tensor], rows: int | None = None) -> None:
        """Replace the buffers, of which the first `rows` rows are in use; `None` for all."""
        self._view = None
        super().hold(buffers, rows)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take dtype, device and widths from the first states that arrive."""
        self.hold([part[:, :, :0] for part in self._kept(key_states, value_states)])

    def write(
        self, key_states: Tensor, value_states: Tensor, window: Window
    ) -> tuple[Tensor, Tensor]:
        """Scatter `[rows, heads, width, dim]` states to the window's slots.

        Returns:
            The keys and values up to the window's end.
        """
        self.make_room(window.end)
        assert self.keys is not None and self.values is not None
        window.put(key_states, self.keys)
        window.put(value_states, self.values)
        return self.seen(window.end)

    def seen(self, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `end` slots, as layers read them."""
        assert self.keys is not None and self.values is not None
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)

    def write_and_view(
        self, key_states: Tensor, value_states: Tensor, window: Window, view: View
    ) -> tuple[Tensor, Tensor]:
        """`write`, but return the keys and values of a view.

        They are copied together once a round. Its later passes add what they write.
        """
        self.make_room(window.end)
        for states, buffer in zip(self._kept(key_states, value_states), self.buffers, strict=True):
            window.put(states, buffer)
        start, held = 0, self._view
        if held is not None and view.follows(held[0], window.width):
            start, copies = held[0].size, held[1]
        else:
            room = view.size + WIDEST  # the later passes of a round add slots
            shapes = [(*b.shape[:2], room, b.shape[3]) for b in self.buffers]
            pairs = zip(self.buffers, shapes, strict=True)
            copies = [buffer.new_empty(shape) for buffer, shape in pairs]
        for buffer, copy in zip(self.buffers, copies, strict=True):
            view.take(buffer, copy, start)
        has_room = copies[0].shape[2] > view.size + window.width
        self._view = (view, copies) if has_room else None
        return self._read([copy.narrow(2, 0, view.size) for copy in copies])

    def _read(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values, as layers read them, of parts of the buffers."""
        keys, values = parts
        return keys, values

    def _kept(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, ...]:
        """The form in which states are stored."""
        return key_states, value_states

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
