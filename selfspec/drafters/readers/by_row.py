"""States `[rows, n, hidden]`, read and written at indices that differ by row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


def column(values: Sequence[int], like: Tensor) -> Tensor:
    """`[rows, 1]` one number per row, on the device of `like`."""
    return torch.tensor(values, device=like.device)[:, None]


def pick(states: Tensor, indices: Tensor) -> Tensor:
    """`[rows, n, hidden]` the states at `indices` `[rows, n]`, clamped to the last."""
    indices = indices.to(states.device).clamp(max=states.shape[1] - 1)
    return states.gather(1, indices[..., None].expand(-1, -1, states.shape[2]))


def pick_from(states: Tensor, starts: Sequence[int], width: int = 1) -> Tensor:
    """`[rows, width, hidden]` the states from one index per row on, clamped to the last.

    A view if all rows start at the same index.
    """
    first = starts[0]
    if first + width <= states.shape[1] and starts.count(first) == len(starts):
        return states.narrow(1, first, width)
    return pick(states, column(starts, states) + torch.arange(width, device=states.device))


def put(states: Tensor, others: Tensor, start: Tensor) -> Tensor:
    """The states, from `start` `[rows, 1]` on replaced by `others` `[rows, m, hidden]`."""
    indices = start + torch.arange(others.shape[1], device=start.device)
    return states.scatter(1, indices[..., None].expand_as(others), others.to(states))


def append_rows(states: Tensor, others: Tensor) -> Tensor:
    """The rows of both; states of the shorter ones are padded with zeros."""
    width = max(states.shape[1], others.shape[1])
    return torch.cat([pad(each, (0, 0, 0, width - each.shape[1])) for each in (states, others)])
