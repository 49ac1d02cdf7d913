"""The slots that one pass writes, and those that it sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.sampling.draft import Tree

GROWTH = 256  # least slots of tables and buffers, and by which buffers grow
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
