"""Buffers of keys and values: they grow, and keep the memory of rows that leave for others."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_not

import torch
from torch import Tensor

from selfspec.decoder.cache.window import GROWTH


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
