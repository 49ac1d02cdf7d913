"""What transformers asks of a cache, and its methods for callers that move rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from selfspec.decoder.cache.layer import SlotLayer
from selfspec.decoder.cache.recurrent import RecurrentLayer
from selfspec.decoder.cache.rows import RowSlots


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
