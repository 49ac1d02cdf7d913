"""The KV cache of all layers, and the caches that tests and training need."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionCacheLayerMixin

from selfspec.config import KVCacheDtype
from selfspec.decoder.cache.int8 import Int8Layer
from selfspec.decoder.cache.layer import SlicedViews, SlotLayer, Switch, View, Window
from selfspec.decoder.cache.masks import WIDEST, CausalMasks, hide, tree_mask
from selfspec.decoder.cache.recurrent import RecurrentLayer
from selfspec.sampling.draft import Tree


class LayerKV:
    """Replaces a `SlotCache` in compiled and recorded layers.

    Compiled code is specialised on the Python values that it reads, of which a cache has many:
    layers, lengths, the pass in progress. Here everything that varies is a tensor or its shape.

    Args:
        keys: `[rows, heads, capacity, head_dim]` the layer's keys, with room for the pass.
        values: the same of its values.
        slots: `[rows, width]` slots that the pass writes.
        seen: any tensor whose length is the number of visible slots.
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


_GROWTH = 256  # least length of the table of slot numbers


class SlotCache(Cache):
    """KV of all layers for rows of different lengths.

    Args:
        windows: per layer, the sliding window in tokens, or `None` for full attention.
        rows: number of rows.
        capacity: slots reserved at the first write (buffers double when more is needed).
        device: where positions and masks are made.
        kv_cache_dtype: dtype of keys and values.
        page: narrow passes see a multiple of this number of slots.
        recurrent: indices of the layers with a recurrent state.

    Attributes:
        lengths: committed tokens of each row.
        recurrent: the states of these layers, by index.
        will_commit: per row, how many of the next tokens are known to be committed later.
        added_from: per row, the first slot that the added layers hold.
        switches: `Switch.at` of the call; `None` if the largest position of a pass does not matter.
        shift: `[rows]` or `[axes, rows]` what is added to a slot's number to get the position of
            its token: images may take fewer positions than slots. `None` for nothing.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        rows: int,
        capacity: int = 0,
        device: torch.device | str = "cpu",
        kv_cache_dtype: KVCacheDtype = "auto",
        page: int = 1,
        recurrent: Sequence[int] = (),
    ):
        self._layer_class = Int8Layer if kv_cache_dtype == "int8" else SlotLayer
        super().__init__(layers=[self._layer_class(window) for window in windows])
        self.layers: list[SlotLayer]
        self._windows = windows
        self._kv_cache_dtype: KVCacheDtype = kv_cache_dtype
        self._page = page
        self.lengths = [0] * rows
        self._on_device: tuple[list[int], Tensor | None] = ([], None)
        self.added_from = [0] * rows
        self.shift: Tensor | None = None
        self.recurrent = {index: RecurrentLayer() for index in recurrent}
        self.will_commit: Sequence[int] = [0] * rows
        self.switches: list[int] | None = None
        self.depth = len(windows)
        self.device = torch.device(device)
        self._reserved = -(-capacity // page) * page
        self._sliding = [window is not None for window in windows]
        self._never = [False] * len(windows)
        self._window: Window | None = None
        self._to_added: Mapping[int, int] = {}
        self._free: list[SlotLayer] = []  # added layers of an earlier call
        self._counted = SlicedViews(torch.arange(0, device=self.device)[None], dim=1)
        self._causal_masks = CausalMasks(self.device)

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
            counted = torch.arange(max(2 * end, _GROWTH), device=self.device)
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

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new states; returns its keys and values up to the longest row's end."""
        active = self._window or self._active()
        layer = self._written(layer_idx)
        if not layer.is_initialized:
            layer.lazy_initialization(key_states, value_states)
            layer.grow(max(self._reserved, active.end))
        if active.view is not None:
            return layer.write_and_view(key_states, value_states, active, active.view)
        return layer.write(key_states, value_states, active)

    def layer_kv(self, layer_idx: int) -> tuple[Tensor, ...] | None:
        """Arguments of a layer's `LayerKV` in the active pass.

        `None` if the layer is empty, or if the pass does not see all slots.
        """
        active, layer = self._active(), self._written(layer_idx)
        if layer.keys is None or layer.values is None or active.view is not None:
            return None
        layer.make_room(active)
        return layer.keys, layer.values, active.slots, self._counted.wholes[0][0, : active.end]

    def _written(self, layer_idx: int) -> SlotLayer:
        added = self._to_added.get(layer_idx)
        return self.layers[layer_idx if added is None else self.depth + added - 1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """First slot of the active pass (of the longest row); between passes, committed tokens."""
        if self._window is not None:
            return max(self._window.starts)
        return max(self.lengths)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Size and offset of the keys, for families that make their own masks."""
        return self.get_seq_length(layer_idx) + query_length, 0

    # transformers reads these for every layer in every pass; here they are constant.

    @property
    def is_sliding(self) -> list[bool]:
        """Whether each layer attends to a window."""
        return self._sliding

    @property
    def is_linear(self) -> list[bool]:
        """False: mixers read their states from `recurrent`, not through this cache."""
        return self._never

    @property
    def is_dummy(self) -> list[bool]:
        """Every layer has keys and values of its own."""
        return self._never

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

    def commit(self, counts: Sequence[int]) -> None:
        """Commit `counts` more tokens in each row; everything after them is rejected."""
        for layer in self.recurrent.values():
            layer.commit(counts)
        self.will_commit = [0] * self.rows
        self.lengths = [have + new for have, new in zip(self.lengths, counts, strict=True)]

    def gather(self, branch: Tensor) -> None:
        """Move the accepted branch of a tree into consecutive slots after the committed tokens.

        Args:
            branch: `[rows, n]` rising offsets from each row's length; nodes of a tree are stored in
                the order in which they were drafted.
        """
        starts = self.committed[:, None]
        target = starts + torch.arange(branch.shape[1], device=self.device)
        # Added layers have not run over leaves, and do not need their states.
        capacity = max(layer.capacity for layer in self.layers)
        for layer in self.layers:
            layer.grow(capacity)
            for buffer in layer.buffers:
                rows = torch.arange(buffer.shape[0], device=buffer.device)[:, None]
                source = (starts + branch).to(buffer.device)
                buffer[rows, :, target.to(buffer.device)] = buffer[rows, :, source]

    def add_layer(self, window: int | None, owner: object, skips_first: bool = False) -> int:
        """Add a layer, which holds nothing for the committed tokens.

        Args:
            window: its sliding window in tokens, or `None`.
            owner: the head that it belongs to; buffers of an earlier call are used by the same one.
            skips_first: whether it holds nothing for the next token of each row either.

        Returns:
            Its number among the added layers, from 1.
        """
        free = next((layer for layer in self._free if layer.owner is owner), None)
        if free is None:
            free = self._layer_class(window, owner)
        else:
            self._free.remove(free)
        self.layers.append(free)
        self.added_from = [length + skips_first for length in self.lengths]
        return len(self.layers) - self.depth

    def drop_added(self) -> None:
        """Forget the added layers."""
        del self.layers[self.depth :]
        self.added_from = [0] * self.rows

    def recycle(self) -> None:
        """Remove all tokens and the added layers, but keep the buffers for another call."""
        rows = max(layer.reserved_rows for layer in self.layers[: self.depth])
        self._free = [
            layer for layer in self.layers[self.depth :] if layer.reserved_rows in (0, rows)
        ]
        for layer in self.layers:
            layer.reclaim()
        self.lengths, self.switches = [0] * rows, None
        self.drop_added()
        self.reset()

    def fits(self, rows: int, capacity: int, page: int) -> bool:
        """Whether the buffers fit a call with this number of rows, slots, and slots per page."""
        reserved = max(layer.capacity for layer in self.layers)
        return (self.rows, self._page) == (rows, page) and reserved >= capacity

    def select(self, rows: Sequence[int]) -> None:
        """Keep only some rows, in the given order."""
        self.lengths = [self.lengths[row] for row in rows]
        self.added_from = [self.added_from[row] for row in rows]
        self.shift = None if self.shift is None else self.shift[..., list(rows)]
        self.will_commit = [0] * self.rows
        if self.switches is not None:
            self.switches = [self.switches[row] for row in rows]
        self.recurrent = {index: layer.part(rows) for index, layer in self.recurrent.items()}
        for layer in self.layers:
            layer.select(rows)

    def join(self, other: SlotCache, room: int = 0) -> None:
        """Move the rows of another cache of the same layers to the end of this one.

        They take the place of rows that were left out by `select`; memory grows only if there are
        not enough of these.

        Args:
            other: the other cache.
            room: slots that its longest row needs beyond its committed tokens.
        """
        rows, length = (self.rows, other.rows), max(other.lengths)
        for layer in self.layers:  # the other's memory is freed layer by layer
            layer.join(other.layers.pop(0), rows, length, length + room)
        self.shift = joined_shifts([self, other])
        self.lengths = self.lengths + other.lengths
        self.added_from = self.added_from + other.added_from
        if self.switches is not None and other.switches is not None:
            self.switches = self.switches + other.switches
        self.recurrent = {
            index: RecurrentLayer.join([layer, other.recurrent[index]], rows)
            for index, layer in self.recurrent.items()
        }
        self.will_commit = [0] * self.rows

    def empty(self, rows: int) -> SlotCache:
        """A cache like this one, for other rows."""
        kept_in, page, recurrent = self._kv_cache_dtype, self._page, list(self.recurrent)
        return SlotCache(self._windows, rows, 0, self.device, kept_in, page, recurrent)

    def take(self, other: SlotCache) -> None:
        """Take over the content of another cache."""
        self.layers, self.lengths, self.shift = other.layers, other.lengths, other.shift
        self.added_from, self.recurrent = other.added_from, other.recurrent
        self.will_commit = [0] * self.rows

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers and states."""
        layers = *self.layers, *self.recurrent.values()
        return sum(layer.nbytes for layer in layers)

    @property
    def state_bytes(self) -> tuple[int, int]:
        """Bytes of one row's recurrent states, and of the inputs kept for uncommitted tokens."""
        layers, rows = self.recurrent.values(), self.rows
        states = sum(layer.nbytes for layer in layers)
        return states // rows, sum(layer.uncommitted.nbytes for layer in layers) // rows

    @property
    def token_bytes(self) -> list[int]:
        """Bytes of one token of one row, in each layer that has been written."""
        sizes = [(layer.nbytes, self.rows * layer.capacity) for layer in self.layers]
        return [nbytes // slots if slots else 0 for nbytes, slots in sizes]

    def reset(self) -> None:
        """Forget every token; buffers stay."""
        self.lengths, self.shift = [0] * self.rows, None
        self.recurrent = {index: RecurrentLayer() for index in self.recurrent}

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of each row; as in transformers, their number negated."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes the number of tokens to remove, negated, got {tokens_to_remove}"
            )
        if tokens_to_remove and self.recurrent:
            raise ValueError(
                "committed tokens cannot be removed from recurrent layers, which have no state of "
                "an earlier position; begin with an empty cache"
            )
        self.lengths = [max(length - abs(tokens_to_remove), 0) for length in self.lengths]

    # Methods of transformers' caches for callers that move rows

    def _pick(self, rows: Sequence[int]) -> None:
        """Replace the rows by copies of `rows`, among which one may be several times."""
        self.lengths = [self.lengths[row] for row in rows]
        self.drop_added()
        self.will_commit = [0] * self.rows
        self.recurrent = {index: layer.part(rows) for index, layer in self.recurrent.items()}
        for layer in self.layers:
            if layer.is_initialized:
                layer.hold([buffer[list(rows)] for buffer in layer.buffers])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row, as `num_return_sequences` repeats the prompts."""
        self._pick([row for row in range(self.rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor | Sequence[int]) -> None:
        """Keep these rows, in the given order; `indices` may be a mask of bools."""
        self._pick(torch.arange(self.rows)[torch.as_tensor(indices, device="cpu")].tolist())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row `beam_idx[i]`."""
        self.batch_select_indices(beam_idx)

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.rows

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` works."""
        return not self.recurrent

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Whether a recurrent layer (by default the last one) holds a state."""
        index = max(self.recurrent, default=None) if layer_idx is None else layer_idx
        if index not in self.recurrent:
            raise ValueError(f"layer {index} has no recurrent state")
        layer = self.recurrent[index]
        return layer.state is not None or bool(layer.convs)

    def _refused(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            "a SlotCache is written by SelfSpecModel only, stays on the devices of the layers, and "
            "takes back rejected drafts by itself; for the model's own generate pass a "
            "transformers DynamicCache"
        )

    get_conv_state = update_conv_state = _refused
    get_recurrent_state = update_recurrent_state = update_indexer = _refused
    prefetch = offload = early_initialization = activate_past_recording = _refused

    def load(self, cache: DynamicCache) -> None:
        """Copy the KV and states of a `DynamicCache` without padding into this empty cache."""
        length = cache.get_seq_length()
        for index, layer in enumerate(cache.layers):
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                self.recurrent[index] = RecurrentLayer.load(layer)
            if keys is not None and values is not None:
                kept = keys.shape[2]
                with self.writing(kept, length - kept):
                    self.update(keys, values, index)
        self.lengths = [length] * self.rows

    def store(self, cache: DynamicCache, beyond: int) -> None:
        """Append the tokens from position `beyond` on to a `DynamicCache`.

        All rows must have the same length.
        """
        for index, layer in enumerate(self.layers):
            if index in self.recurrent:
                theirs = cache.layers[index]
                assert isinstance(theirs, LinearAttentionCacheLayerMixin)  # others are refused
                self.recurrent[index].store(theirs)
            if layer.is_initialized:
                keys, values = layer.seen(self.lengths[0])
                cache.update(keys[:, :, beyond:], values[:, :, beyond:], index)

    def fork(self, shared: bool = True) -> SlotCache:
        """A copy of this cache; later changes of one do not affect the other.

        Args:
            shared: whether keys and values of a single row may be shared: those of committed tokens
                are overwritten only where a family prefills again (`Decoder.prefills_again`).
        """
        other = self.empty(self.rows)
        other.layers = [copy.copy(layer) for layer in self.layers[: self.depth]]
        apart = self.rows > 1 or not shared  # `select` moves rows in place
        for layer in other.layers if apart else ():
            if layer.is_initialized:
                layer.hold([buffer.clone() for buffer in layer.buffers])
        other.lengths, other.shift = list(self.lengths), self.shift
        everyone = range(self.rows)
        other.recurrent = {index: layer.part(everyone) for index, layer in self.recurrent.items()}
        return other


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


def joined_shifts(parts: Sequence[SlotCache | RowStates]) -> Tensor | None:
    """The `SlotCache.shift` of all rows of several caches."""
    shifts = [part.shift for part in parts]
    like = next((shift for shift in shifts if shift is not None), None)
    if like is None:
        return None
    rows = [part.rows if isinstance(part, SlotCache) else 1 for part in parts]
    zeros = [like.new_zeros(*like.shape[:-1], count) for count in rows]
    return torch.cat([z if s is None else s for s, z in zip(shifts, zeros, strict=True)], dim=-1)


def join_rows(states: Sequence[RowStates], like: SlotCache) -> SlotCache:
    """A cache of rows as `take_row` returns them, taken from caches like this one."""
    slots = like.empty(len(states))
    slots.lengths = [row.length for row in states]
    slots.shift = joined_shifts(states)
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


class StepCache(SlotCache):
    """Keys and values of layers that are unrolled over several draft steps in training.

    Nothing is written in place, so gradients flow through every step.

    Args:
        windows: per layer of the model, the sliding window in tokens, or `None`.
        rows: number of rows.
        device: where positions are made.
    """

    def __init__(self, windows: Sequence[int | None], rows: int, device: torch.device):
        super().__init__(windows, rows, device=device)
        self._states: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Add a step's states; returns those of all steps, concatenated."""
        steps = self._states.setdefault(layer_idx, [])
        steps.append((key_states, value_states))
        keys, values = zip(*steps, strict=True)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the steps before this one."""
        steps = min(self._states.values(), key=len, default=[])
        return sum(keys.shape[2] for keys, _ in steps)
