"""Keys and values of one layer, which are written at each row's positions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from selfspec.decoder.cache.buffers import GrowingBuffers
from selfspec.decoder.cache.masks import WIDEST
from selfspec.decoder.cache.window import View, Window


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
