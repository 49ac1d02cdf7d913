"""Numbers of tokens to places of their states in blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def newest(starts: Sequence[Sequence[int]], widths: Sequence[int]) -> list[list[int]]:
    """Places of each row's tokens in blocks laid one behind the other.

    A block starts, in each row, at the token of that number; what it has beyond the start of the
    next did not stand. Shorter rows end with their last place, again.

    Args:
        starts: per block, one number a row.
        widths: of the blocks.
    """
    found: list[list[int]] = []
    for row in range(len(starts[0])):
        places: list[int] = []
        first = 0
        for block, width in enumerate(widths):
            ends = block + 1 < len(starts)
            stood = starts[block + 1][row] - starts[block][row] if ends else width
            places.extend(range(first, first + stood))
            first += width
        found.append(places)
    longest = max(map(len, found))
    return [places + places[-1:] * (longest - len(places)) for places in found]


def column(values: Sequence[int], like: Tensor) -> Tensor:
    """`[rows, 1]` one number a row, where `like` is."""
    return torch.tensor(values, device=like.device)[:, None]


def pick(states: Tensor, places: Tensor) -> Tensor:
    """`[rows, n, hidden]` the states at `[rows, n]` places; beyond the last it is the last."""
    places = places.to(states.device).clamp(max=states.shape[1] - 1)
    return states.gather(1, places[..., None].expand(-1, -1, states.shape[2]))


def pick_from(states: Tensor, starts: Sequence[int], width: int = 1) -> Tensor:
    """`[rows, width, hidden]` the states from one place a row on; beyond the last it is the last.

    A view where all rows begin at one place.
    """
    first = starts[0]
    if first + width <= states.shape[1] and starts.count(first) == len(starts):
        return states.narrow(1, first, width)
    return pick(states, column(starts, states) + torch.arange(width, device=states.device))
