"""Keys and values of one layer: growing buffers that are written at each row's positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_not
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from selfspec.sampling.draft import Tree

_VIEWS = 64  # views of one position that are made together


class SlicedViews:
    """Views of tensors of equal length.

    Making a view takes longer than looking one up. Draft passes run over one position each, so
    views of one position are made many at a time.

    Args:
        wholes: the tensors.
        dim: the dimension along which views are taken.
    """

    def __init__(self, *wholes: Tensor, dim: int):
        self.wholes, self._dim, self.length = wholes, dim, wholes[0].shape[dim]
        self._first = self._last = 0  # positions that have views
        self._ones: list[tuple[Tensor, ...]] = []

    def view(self, start: int, width: int) -> tuple[Tensor, ...]:
        """The `width` positions from `start` on, of each."""
        if width != 1:
            return tuple([whole.narrow(self._dim, start, width) for whole in self.wholes])
        if not self._first <= start < self._last:
            self._cut(start)
        return self._ones[start - self._first]

    def _cut(self, start: int) -> None:
        first = start - start % _VIEWS
        count = min(_VIEWS, self.length - first)
        parts = [whole.narrow(self._dim, first, count) for whole in self.wholes]
        self._ones = list(zip(*(part.split(1, self._dim) for part in parts), strict=True))
        self._first, self._last = first, first + count


_GROWTH = 256  # smallest step by which a buffer grows, in slots


class Switch(NamedTuple):
    """Where the passes of plain decoding go beyond the length that a model was first trained for.

    Rotary embeddings may choose their frequencies by the largest position of a pass (LongRoPE,
    dynamic NTK). A pass of several rows or drafts holds tokens of several passes of plain decoding.

    Attributes:
        at: per row, the first position that plain decoding computes in such a pass.
        first: the least position of the pass, counted from there.
        last: the largest position of a real token, counted from there.
    """

    at: list[int]
    first: int
    last: int


class Window:
    """The slots that one pass writes: `width` of them after `starts` in each row.

    Args:
        starts: first slot written, per row.
        width: tokens of the pass, per row.
        counted: 0, 1, 2, … as `[1, n]` on the device.
        tree: the token tree; `None` for a sequence.
        first: index of the first token in the tree's block.
        page: `end` is a multiple of this number of slots.
        rows: gives `starts` as a tensor, where that is on the device already.
        switch: where passes go beyond the model's original length, if that matters.

    Attributes:
        starts: first slot written, per row.
        width: tokens of the pass, per row.
        tree: the token tree; `None` for a sequence.
        first: index of the first token in the tree's block.
        slots: `[rows, width]` the slots.
        positions: `[rows, width]` the tokens' positions: equal to their slots except in trees.
        end: number of visible slots: up to the last one written, rounded up to whole pages.
        tight: whether `end` is exactly the last slot written plus one.
        uniform: whether all rows write the same slots.
        even: whether all rows write the same slots and these are the tokens' positions.
        switch: where passes go beyond the model's original length, if that matters.
        view: the slots that the pass sees; `None` for all up to `end`.
    """

    def __init__(
        self,
        starts: list[int],
        width: int,
        counted: SlicedViews,
        tree: Tree | None = None,
        first: int = 0,
        page: int = 1,
        rows: Callable[[], Tensor] | None = None,
        switch: Switch | None = None,
    ):
        self.switch = switch
        self.view: View | None = None
        self.starts, self.width, self.tree, self.first = starts, width, tree, first
        lowest, highest, (numbers,) = min(starts), max(starts), counted.wholes
        self.end = -(-(highest + width) // page) * page
        self.tight = self.end == highest + width
        self.uniform = lowest == highest
        if self.uniform:
            (slots,) = counted.view(lowest, width)
            self.slots = slots if len(starts) == 1 else slots.expand(len(starts), -1)
        else:
            firsts = rows() if rows else torch.tensor(starts, device=numbers.device)
            self.slots = firsts[:, None] + numbers[:, :width]
        self.even = self.uniform and tree is None
        self.positions = self.slots
        if tree is not None:
            block = slice(first, first + width)
            self.positions = self.slots - numbers[:, block] + tree.depths[:, block]

    def put(self, states: Tensor, buffer: Tensor) -> None:
        """Write `[rows, heads, width, any]` to these slots of `[rows, heads, slots, any]`."""
        if self.uniform:
            buffer.narrow(2, self.starts[0], self.width).copy_(states)
        else:
            slots = self.slots.to(states.device)
            rows = torch.arange(states.shape[0], device=states.device)[:, None]
            buffer[rows, :, slots] = states.transpose(1, 2)


class View:
    """The slots that a pass sees which attends to the first and the most recent keys only.

    Its own slots are the last of the most recent ones. Every row sees the same number; where this
    reaches back to the first ones, or before them, a slot is marked as none.

    Args:
        window: the slots that the pass writes.
        lengths: committed tokens of each row.
        sinks: number of first keys.
        recent: number of the most recent committed keys.
        counted: 0, 1, 2, …, on the device.

    Attributes:
        firsts: the first of the most recent slots, per row.
        back: slots from there to the first one written, per row.
        size: number of slots seen.
        sinks: number of first ones among them.
        slots: `[1, size]` or `[rows, size]` the slots; -1 for none.
    """

    def __init__(
        self, window: Window, lengths: Sequence[int], sinks: int, recent: int, counted: Tensor
    ):
        starts = window.starts
        self.sinks = sinks
        self.firsts = [
            min(length - recent, start) for length, start in zip(lengths, starts, strict=True)
        ]
        self.back = [start - first for start, first in zip(starts, self.firsts, strict=True)]
        seen = max(self.back) + window.width
        self.size = sinks + seen
        self.uniform = len(set(self.firsts)) == 1 == len(set(self.back))
        if self.uniform:
            first = self.firsts[0]
            self.slots = torch.cat([counted[:sinks], counted[first : first + seen]])[None]
        else:
            firsts = torch.tensor(self.firsts, device=counted.device)[:, None]
            near = firsts + counted[:seen]
            near = near.masked_fill((near < sinks) | (near >= window.end), -1)
            self.slots = torch.cat([counted[:sinks].expand(len(firsts), -1), near], dim=1)

    @classmethod
    def of(
        cls, window: Window, lengths: Sequence[int], sinks: int, recent: int, counted: Tensor
    ) -> View | None:
        """The view of a pass; `None` if it sees all slots."""
        ends = zip(lengths, window.starts, strict=True)
        if all(min(length - recent, start) <= sinks for length, start in ends):
            return None
        return cls(window, lengths, sinks, recent, counted)

    def follows(self, other: View, width: int) -> bool:
        """Whether this view is `other` and `width` more slots at its end."""
        same = self.firsts == other.firsts and self.sinks == other.sinks
        return same and self.size == other.size + width and len(set(self.back)) == 1

    def take(self, buffer: Tensor, into: Tensor, start: int) -> None:
        """Copy the slots from index `start` of the view on.

        Args:
            buffer: `[rows, heads, slots, any]` all slots.
            into: `[rows, heads, at least size, any]` the slots of the view.
            start: 0 or at least `sinks`.
        """
        end = self.size
        if self.uniform:
            if start == 0:
                into[:, :, : self.sinks].copy_(buffer[:, :, : self.sinks])
                start = self.sinks
            first = self.firsts[0] + start - self.sinks
            into[:, :, start:end].copy_(buffer.narrow(2, first, end - start))
        else:
            slots = self.slots[:, start:end].clamp_min(0).to(buffer.device)
            rows = torch.arange(len(slots), device=buffer.device)[:, None]
            into[:, :, start:end] = buffer[rows, :, slots].transpose(1, 2)


_VIEW_ROOM = 64  # slots after a view, for the later passes of its round


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, as they are.

    Args:
        window: the sliding window in tokens, or `None`.
        owner: the head whose layer this is, of an added layer.
    """

    names: tuple[str, ...] = ("keys", "values")  # of its buffers

    def __init__(self, window: int | None = None, owner: object = None):
        super().__init__()
        self.window, self.owner = window, owner
        self.is_sliding = window is not None
        self._wholes: list[Tensor] = []  # the buffers, with rows that are not in use at the end
        # Their first rows, by number. Recorded graphs know keys and values by these tensors, so a
        # graph of three rows is used again whenever there are three.
        self._parts: dict[int, list[Tensor]] = {}
        self._view: tuple[View, list[Tensor]] | None = None  # the last one, and its slots

    @property
    def capacity(self) -> int:
        """Slots that fit before the buffers grow."""
        return self.keys.shape[2] if self.keys is not None else 0

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
        self._view = None
        if self.is_initialized and len(self.buffers[0]) < self.reserved_rows:
            self.hold(self._wholes)

    def hold(self, buffers: Sequence[Tensor], rows: int | None = None) -> None:
        """Replace the buffers, of which the first `rows` rows are in use; `None` for all."""
        self._view = None
        if len(self._wholes) != len(buffers) or any(map(is_not, self._wholes, buffers)):
            self._wholes, self._parts = list(buffers), {}
        count = self.reserved_rows if rows is None else rows
        if count not in self._parts:
            self._parts[count] = [buffer[:count] for buffer in buffers]
        for name, part in zip(self.names, self._parts[count], strict=True):
            setattr(self, name, part)
        self.is_initialized = True

    def select(self, rows: Sequence[int]) -> None:
        """Keep some rows, in the given order; the others' memory is left for rows that join."""
        moved = {index: row for index, row in enumerate(rows) if index != row}
        for whole in self._wholes if moved else ():
            whole[list(moved)] = whole[list(moved.values())]
        if self.is_initialized:
            self.hold(self._wholes, len(rows))

    def join(self, other: SlotLayer, rows: tuple[int, int], length: int, capacity: int) -> None:
        """Append rows of another layer; memory grows only if there is no room for them.

        Args:
            other: the other layer.
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

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take dtype, device and widths from the first states that arrive."""
        self.hold([part[:, :, :0] for part in self._kept(key_states, value_states)])

    def grow(self, capacity: int) -> None:
        """Grow the buffers to `capacity` slots."""
        room = capacity - self.capacity
        if room > 0 and self.is_initialized:
            rows = self.buffers[0].shape[0]
            self.hold([torch.nn.functional.pad(w, (0, 0, 0, room)) for w in self._wholes], rows)

    def make_room(self, window: Window) -> None:
        """Double the buffers if the window reaches beyond them."""
        if self.keys is None or self.keys.shape[2] < window.end:
            self.grow(max(window.end, 2 * self.capacity, _GROWTH))

    def write(
        self, key_states: Tensor, value_states: Tensor, window: Window
    ) -> tuple[Tensor, Tensor]:
        """Scatter `[rows, heads, width, dim]` states to the window's slots.

        Returns:
            The keys and values up to the window's end.
        """
        self.make_room(window)
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
        self.make_room(window)
        for states, buffer in zip(self._kept(key_states, value_states), self.buffers, strict=True):
            window.put(states, buffer)
        start, held = 0, self._view
        if held is not None and view.follows(held[0], window.width):
            start, copies = held[0].size, held[1]
        else:
            shapes = [(*b.shape[:2], view.size + _VIEW_ROOM, b.shape[3]) for b in self.buffers]
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
