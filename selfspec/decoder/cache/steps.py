"""Keys and values of an unrolled layer: what it made of the same text in each of its steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.decoder.cache.cache import SlotCache


class StepCache(SlotCache):
    """Keeps the states of one layer that reads the same text several times, step after step.

    Nothing is written in place, so gradients flow through every step.

    Args:
        windows: per layer of the model, the sliding window in tokens, or `None`.
        rows: number of rows.
        device: where positions are made.
    """

    def __init__(self, windows: Sequence[int | None], rows: int, device: torch.device):
        super().__init__(windows, rows, device=device)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Keep a step's states; returns those of all steps, end to end."""
        self._keys.append(key_states)
        self._values.append(value_states)
        return torch.cat(self._keys, dim=2), torch.cat(self._values, dim=2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the steps before this one."""
        return sum(keys.shape[2] for keys in self._keys)
