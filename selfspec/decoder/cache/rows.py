"""Rows of different lengths: the slots, positions and masks of a pass over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from selfspec.decoder.cache.masks import WIDEST, CausalMasks, hide, tree_mask
from selfspec.decoder.cache.window import GROWTH, SlicedViews, Switch, View, Window
from selfspec.sampling.draft import Tree


class RowSlots:
    """How far each row is filled, and the slots that the pass in progress writes.

    Args:
        rows: number of rows.
        device: where positions and masks are made.
        page: narrow passes see a multiple of this number of slots.

    Attributes:
        lengths: committed tokens of each row.
        will_commit: per row, how many of the next tokens are known to be committed later.
        added_from: per row, the first slot that the added layers hold.
        switches: `Switch.at` of the call; `None` if the largest position of a pass does not matter.
        shift: `[rows]` or `[axes, rows]` what is added to a slot's number to get the position of
            its token: images may take fewer positions than slots. `None` for nothing.
    """

    def __init__(self, rows: int, device: torch.device | str, page: int):
        self.lengths = [0] * rows
        self.will_commit: Sequence[int] = [0] * rows
        self.added_from = [0] * rows
        self.switches: list[int] | None = None
        self.shift: Tensor | None = None
        self.device = torch.device(device)
        self._page = page
        self._on_device: tuple[list[int], Tensor | None] = ([], None)
        self._window: Window | None = None
        self._to_added: Mapping[int, int] = {}
        self._counted = SlicedViews(torch.arange(0, device=self.device)[None], dim=1)
        self._causal_masks = CausalMasks(self.device)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    def begin(self, switches: list[int] | None, shift: Tensor | None) -> None:
        """Begin a call, with these values of the attributes."""
        self.switches, self.shift = switches, shift

    def reach_switches(self) -> bool:
        """Whether rows are at their switch; from now on they count as beyond it."""
        if self.switches is None:
            return False
        reached = [have == at for have, at in zip(self.lengths, self.switches, strict=True)]
        pairs = zip(reached, self.switches, strict=True)
        self.switches = [0 if now else at for now, at in pairs]
        return any(reached)

    def window(
        self,
        width: int,
        offset: int | Sequence[int] = 0,
        tree: Tree | None = None,
        paged: bool = True,
    ) -> Window:
        """`width` slots of each row, `offset` after its committed tokens.

        Args:
            width: slots of each row.
            offset: one for all rows, or one per row.
            tree: the token tree, if the pass runs over one; `offset` is then the index of the first
                token in the block.
            paged: whether a narrow pass sees whole pages.
        """
        rows = None
        if isinstance(offset, int):
            first, starts = offset, [length + offset for length in self.lengths]
            rows = partial(self._from_lengths, offset)
        else:
            first, starts = 0, [n + more for n, more in zip(self.lengths, offset, strict=True)]
        page = self._page if paged and width <= WIDEST else 1
        end = max(starts) + width + page
        if self._counted.length < end:  # extend 0, 1, 2, …
            counted = torch.arange(max(2 * end, GROWTH), device=self.device)
            self._counted = SlicedViews(counted[None], dim=1)
        switch = self._switch(starts, width, 0 if tree is None else first)
        return Window(starts, width, self._counted, tree, first, page, rows, switch)

    def view(self, window: Window, sinks: int, recent: int) -> View | None:
        """What a pass sees of the slots if it attends to some keys only; `None` for all.

        Args:
            window: the slots that it writes.
            sinks: the first keys that it sees.
            recent: the most recent committed keys that it sees.
        """
        return View.of(window, self.lengths, sinks, recent, self._counted.wholes[0][0])

    def _switch(self, starts: Sequence[int], width: int, root: int) -> Switch | None:
        if self.switches is None:
            return None
        known = zip(self.lengths, self.will_commit, strict=True)
        ends = [length + count if count else None for length, count in known]
        real = [
            start + width if end is None else min(start + width, end)
            for start, end in zip(starts, ends, strict=True)
        ]
        # Nodes of a tree have positions below their slots, down to that of its root.
        first = min(start - root - at for start, at in zip(starts, self.switches, strict=True))
        last = max(end - 1 - at for end, at in zip(real, self.switches, strict=True))
        return Switch(self.switches, first, last)

    @property
    def committed(self) -> Tensor:
        """`[rows]` the lengths on the device, copied once after every change."""
        held, there = self._on_device
        if there is None or held != self.lengths:
            there = torch.tensor(self.lengths, device=self.device)
            self._on_device = list(self.lengths), there
        return there

    def _from_lengths(self, offset: int) -> Tensor:
        return self.committed + offset if offset else self.committed

    def positions(self, window: Window) -> Tensor:
        """`[rows, width]` or `[axes, rows, width]` positions of a window's tokens."""
        here, shift = window.positions, self.shift
        return here if shift is None else here + shift[..., None]

    def set_window(
        self, window: Window | None, added: Mapping[int, int]
    ) -> tuple[Window | None, Mapping[int, int]]:
        """Set the window that passes write from now on; returns the previous one.

        Args:
            window: the slots, or `None`.
            added: maps the index of a layer to the added layer, from 1, that gets its states.
        """
        before = self._window, self._to_added
        self._window, self._to_added = window, added
        return before

    @contextmanager
    def writing(
        self,
        width: int,
        offset: int | Sequence[int] = 0,
        added: Mapping[int, int] | None = None,
        tree: Tree | None = None,
    ) -> Iterator[Window]:
        """While active, passes write a `window` (and added layers, see `set_window`).

        `Decoder.run` calls `set_window` itself, because a context manager takes noticeable time.
        """
        window = self.window(width, offset, tree)
        outer = self.set_window(window, added or {})
        try:
            yield window
        finally:
            self.set_window(*outer)

    def mask(self, window: int | None, dtype: torch.dtype, added: bool = False) -> Tensor:
        """`[rows, 1, width, end]` additive mask of the active pass: 0 where a query may look.

        A query at position p sees slots up to p, and none at or before p - `window`; in the
        `added` layer none before `added_from`.
        """
        active = self._active()
        partial = added and any(self.added_from)
        if active.view is not None:
            slots = active.view.slots
        elif active.even and active.width <= WIDEST and not partial:
            return self._causal_masks.view(active, window, dtype)
        else:
            slots = self._counted.wholes[0][:, : active.end]
        if active.tree is None:
            mask = hide(slots[:, None], active.positions, window, dtype)
        else:
            mask = tree_mask(active, active.tree, slots, self.committed, window, dtype)
        if partial:
            first = torch.tensor(self.added_from, device=self.device)[:, None, None]
            mask = mask.masked_fill(slots[:, None] < first, torch.finfo(dtype).min)
        if active.view is not None and not active.view.uniform:
            mask = mask.masked_fill(slots[:, None] < 0, torch.finfo(dtype).min)
        return mask[:, None]

    @property
    def active(self) -> Window | None:
        """The slots of the pass in progress; `None` between passes."""
        return self._window

    def _active(self) -> Window:
        if self._window is None:
            raise RuntimeError(
                "a SlotCache is written by SelfSpecModel only; for the model's own generate pass a "
                "transformers DynamicCache"
            )
        return self._window


def joined_shifts(parts: Sequence[tuple[Tensor | None, int]]) -> Tensor | None:
    """The `RowSlots.shift` of all rows of several parts, each given with its number of rows."""
    like = next((shift for shift, _ in parts if shift is not None), None)
    if like is None:
        return None
    shifts = [like.new_zeros(*like.shape[:-1], n) if s is None else s for s, n in parts]
    return torch.cat(shifts, dim=-1)
