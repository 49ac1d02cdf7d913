"""Additive attention masks over slots: 0 where a query may look, the dtype's least elsewhere.

Legend: rows = rows of the cache; width = tokens of the pass; end = slots that it sees.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.decoder.cache.window import GROWTH, Window
from selfspec.sampling.draft import Tree

WIDEST = 64  # queries in the table; a wider pass builds its own mask


def hide(keys: Tensor, queries: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """`[..., queries, keys]` mask for the positions of keys and queries."""
    hidden = keys > queries[..., None]
    if window is not None:
        hidden = hidden | (keys <= queries[..., None] - window)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=keys.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)


def tree_mask(
    active: Window,
    tree: Tree,
    slots: Tensor,
    lengths: Tensor,
    window: int | None,
    dtype: torch.dtype,
) -> Tensor:
    """`[rows, width, end]` mask of a pass over a tree: a draft sees only its ancestors.

    Args:
        active: the pass.
        tree: the token tree.
        slots: `[1, end]` 0, 1, 2, …, or `[1 or rows, n]` those that are seen.
        lengths: `[rows]` committed tokens.
        window: the sliding window in positions, or `None`.
        dtype: of the mask.
    """
    committed = lengths[:, None]
    at = slots - committed  # index in the block; negative for committed tokens
    last = tree.depths.shape[1] - 1
    inside = at.clamp(0, last)
    keys = torch.where(at < 0, slots, committed + tree.depths.gather(1, inside))
    mask = hide(keys[:, None], active.positions, window, dtype)
    queries = tree.ancestors[:, active.first : active.first + active.width]
    related = queries.gather(2, inside[:, None].expand(-1, active.width, -1))
    strange = (at >= 0)[:, None] & (~related | (at > last)[:, None])
    return mask.masked_fill_(strange, torch.finfo(dtype).min)


class CausalMasks:
    """Causal masks of rows that write the same slots, as views of one table.

    Query i of a pass sees one key more than query i - 1, wherever the pass starts. One table, whose
    middle column is the first slot of the pass, therefore contains all such masks.

    Args:
        device: the table's device.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._tables: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def view(self, active: Window, window: int | None, dtype: torch.dtype) -> Tensor:
        """`[rows, 1, width, end]` the mask of a pass of at most `WIDEST` tokens."""
        table = self._table(window, dtype, active.end)
        rows, length = len(active.starts), table.shape[1]
        whole = active.width * length  # the strides that a new mask of one row would have
        return table.as_strided(
            (rows, 1, active.width, active.end),
            (0 if rows > 1 else whole, whole, length, 1),
            length // 2 - active.starts[0],
        )

    def _table(self, window: int | None, dtype: torch.dtype, end: int) -> Tensor:
        table = self._tables.get((window, dtype))
        if table is None or table.shape[1] < 2 * end:
            half = max(2 * end, GROWTH)
            keys = torch.arange(-half, half, device=self.device)
            queries = torch.arange(WIDEST, device=self.device)
            table = self._tables[window, dtype] = hide(keys, queries, window, dtype)
        return table
