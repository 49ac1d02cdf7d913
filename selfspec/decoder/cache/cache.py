"""The KV cache of all layers, as transformers sees it, and the one that training unrolls."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from selfspec.config import KVCacheDtype
from selfspec.decoder.cache.int8 import Int8Layer
from selfspec.decoder.cache.layer import SlotLayer
from selfspec.decoder.cache.recurrent import RecurrentLayer
from selfspec.decoder.cache.rows import RowSlots, joined_shifts


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


class CacheInterface(RowSlots, Cache):
    """The interface of a transformers cache, over rows of slots.

    Args:
        layers: keys and values of each layer.
        recurrent: indices of the layers with a recurrent state.
        rows: number of rows.
        device: where positions and masks are made.
        page: narrow passes see a multiple of this number of slots.

    Attributes:
        layers: keys and values of each layer, then of the added ones.
        depth: number of layers that are not added.
        recurrent: the states of recurrent layers, by index.
    """

    def __init__(
        self,
        layers: list[SlotLayer],
        recurrent: Sequence[int],
        rows: int,
        device: torch.device | str,
        page: int,
    ):
        RowSlots.__init__(self, rows, device, page)
        Cache.__init__(self, layers=[*layers])
        self.layers: list[SlotLayer]
        self.depth = len(layers)
        self.recurrent = {index: RecurrentLayer() for index in recurrent}
        self._sliding, self._never = [layer.is_sliding for layer in layers], [False] * len(layers)

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

    # Every layer has keys and values of its own.
    is_dummy = is_linear  # pyright: ignore[reportIncompatibleMethodOverride]

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

    def drop_added(self) -> None:
        """Forget the added layers."""
        del self.layers[self.depth :]
        self.added_from = [0] * self.rows

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

    batch_size = RowSlots.rows  # pyright: ignore[reportIncompatibleMethodOverride]

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` works."""
        return not self.recurrent

    @property
    def is_inference(self) -> bool:
        """Whether it was filled in inference mode, and can be written in this mode only."""
        return any(buffer.is_inference() for layer in self.layers for buffer in layer.buffers)

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Whether a recurrent layer (by default the last one) holds a state."""
        index = max(self.recurrent, default=None) if layer_idx is None else layer_idx
        if index not in self.recurrent:
            raise ValueError(f"layer {index} has no recurrent state")
        layer = self.recurrent[index]
        return layer.state is not None or bool(layer.convs)

    def _refused(self, *args: object, **kwargs: object) -> NoReturn:
        raise ValueError(
            "a SlotCache is written by SelfSpecModel only, stays on the devices of the layers, and "
            "takes back rejected drafts by itself; for the model's own generate pass a "
            "transformers DynamicCache"
        )

    get_conv_state = update_conv_state = _refused
    get_recurrent_state = update_recurrent_state = update_indexer = _refused
    prefetch = offload = early_initialization = activate_past_recording = _refused


class CacheSizes(NamedTuple):
    """Bytes that a cache holds.

    Attributes:
        whole: of all buffers and states.
        state: of one row's recurrent states.
        pending: of the inputs that are kept for one row's uncommitted tokens.
        token: of one token of one row, in each layer that has been written.
    """

    whole: int
    state: int
    pending: int
    token: list[int]


class SlotCache(CacheInterface):
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
        made_for: dtype and devices of the layers that it was made for, if a decoder made it.
    """

    made_for: tuple[object, ...] | None = None

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
        layers = [self._layer_class(window) for window in windows]
        super().__init__(layers, recurrent, rows, device, page)
        self._windows = windows
        self._kv_cache_dtype: KVCacheDtype = kv_cache_dtype
        self._reserved = -(-capacity // page) * page
        self._free: list[SlotLayer] = []  # added layers of an earlier call

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
        layer.make_room(active.end)
        return layer.keys, layer.values, active.slots, self._counted.wholes[0][0, : active.end]

    def _written(self, layer_idx: int) -> SlotLayer:
        added = self._to_added.get(layer_idx)
        return self.layers[layer_idx if added is None else self.depth + added - 1]

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
        self.shift = joined_shifts([(self.shift, rows[0]), (other.shift, rows[1])])
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
        other = SlotCache(self._windows, rows, 0, self.device, kept_in, page, recurrent)
        other.made_for = self.made_for
        return other

    def take(self, other: SlotCache) -> None:
        """Take over the content of another cache."""
        self.layers, self.lengths, self.shift = other.layers, other.lengths, other.shift
        self.added_from, self.recurrent = other.added_from, other.recurrent
        self.will_commit = [0] * self.rows

    @property
    def sizes(self) -> CacheSizes:
        """Bytes of buffers and states."""
        layers, states, rows = self.layers, self.recurrent.values(), self.rows
        of_states = sum(state.nbytes for state in states)
        slots = [(layer.nbytes, rows * layer.capacity) for layer in layers]
        return CacheSizes(
            whole=sum(layer.nbytes for layer in layers) + of_states,
            state=of_states // rows,
            pending=sum(state.uncommitted.nbytes for state in states) // rows,
            token=[nbytes // count if count else 0 for nbytes, count in slots],
        )

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
