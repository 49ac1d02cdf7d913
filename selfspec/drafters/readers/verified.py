"""What readers keep of the newest verified tokens, row by row.

`VerifiedStates` has what the target computed for them, as a head's own layer reads it; `OwnKV` how
much of that layer's KV is final. Both are about positions only. The functions read and write states
`[rows, n, hidden]` at indices that differ by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

Fuse = Callable[[list[Tensor]], Tensor]


class VerifiedStates:
    """Exit states and fused features of the newest verified tokens.

    For each token a head's own layer reads the exit's state of the token and the features of the
    token *before* it, so features begin one token earlier than exit states. Blocks of rounds in
    which another drafter drafted are only noted, and merged when they are needed: features are
    then fused for accepted tokens alone, many at a time.

    Args:
        fuse: makes features `[rows, n, hidden]` of the residual streams at a head's feature
            layers; `None` for a head that reads none.

    Attributes:
        starts: per row, the position of the first token whose exit state is here.
    """

    def __init__(self, fuse: Fuse | None = None):
        self.starts: list[int] = []
        self._fuse = fuse
        self._exit = torch.empty(0)  # [rows, m, hidden] from `starts` on
        # [rows, m + 1, hidden] from `starts` - 1 on, in two parts: the first, and the others.
        self._features: list[Tensor] = []
        self._noted: list[tuple[list[int], list[Tensor]]] = []  # blocks, each with its starts

    @property
    def has_features(self) -> bool:
        """Whether the head reads features."""
        return self._fuse is not None

    def read_prompt(
        self, kept: Sequence[Tensor], first: bool, counts: Sequence[int], ends: Sequence[int]
    ) -> Tensor | None:
        """Take one block of the prompt; only the features of each row's last token are kept.

        Args:
            kept: `[rows, width, hidden]` each: the exit's states, and the residual streams that
                features are made of.
            first: whether it is the first block, before which there are no features.
            counts: tokens that each row still has, in this block and later ones.
            ends: per row, the position after the prompt.

        Returns:
            `[rows, width, hidden]` the features of the token before each; `None` without features.
        """
        hidden, *streams = kept
        self._exit, self.starts = hidden[:, :0], list(ends)
        if self._fuse is None:
            return None
        fused = self._fuse(streams)
        last = torch.zeros_like(fused[:, :1]) if first else self._features[0]
        before = torch.cat([last, fused], dim=1)
        here = torch.tensor(counts, device=before.device)
        at_end = pick(before, here.clamp(0, fused.shape[1])[:, None])
        last = torch.where((here > 0)[:, None, None], at_end, last)
        self._features = [last, last[:, :0]]
        return before[:, :-1]

    def replace(self, starts: Sequence[int], kept: Sequence[Tensor]) -> None:
        """Keep a round's block, and of what was before it only the features of the last token.

        Args:
            starts: per row, the position of the block's first token, the pending one.
            kept: `[rows, n + 1, hidden]` each, as in `read_prompt`.
        """
        self.merge()
        hidden, *streams = kept
        if self._fuse is not None:
            self._features = [self.features_before(starts), self._fuse(streams)]
        self._exit, self.starts = hidden, list(starts)

    def note(self, starts: Sequence[int], kept: Sequence[Tensor]) -> None:
        """Add the block of a round that another drafter drafted; arguments as in `replace`."""
        self._noted.append((list(starts), list(kept)))

    def merge(self) -> None:
        """Append what was noted, without the tokens that were rejected since."""
        if not self._noted:
            return
        starts = [self.starts, *(begins for begins, _ in self._noted)]
        blocks = [kept for _, kept in self._noted]
        widths = [self._exit.shape[1], *(kept[0].shape[1] for kept in blocks)]
        at = torch.tensor(accepted_indices(starts, widths), device=self._exit.device)
        hidden, *streams = [torch.cat(parts, dim=1) for parts in zip(*blocks, strict=True)]
        self._exit = pick(torch.cat([self._exit, hidden], dim=1), at)
        if self._fuse is not None:
            first, later = self._features
            self._features = [first, pick(torch.cat([later, self._fuse(streams)], dim=1), at)]
        self._noted = []

    def features_before(self, positions: Sequence[int], width: int = 1) -> Tensor:
        """Features `[rows, width, hidden]` from the token before each row's position on."""
        first, later = self._features
        indices = self._indices(positions)
        if min(indices) > 0:
            return pick_from(later, [index - 1 for index in indices], width)
        return pick_from(torch.cat([first, later], dim=1), indices, width)

    def exit_from(self, positions: Sequence[int], width: int, pending: Tensor) -> Tensor:
        """Exit states `[rows, width, hidden]` from each row's position on.

        Args:
            positions: per row, the first position.
            width: number of states.
            pending: `[rows, 1, hidden]` the state that repeats after the last one here.
        """
        states = torch.cat([self._exit, pending], dim=1)
        here = torch.arange(width, device=states.device)
        return pick(states, column(self._indices(positions), states) + here)

    def _indices(self, positions: Sequence[int]) -> list[int]:
        return [position - start for position, start in zip(positions, self.starts, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        kept = list(rows)
        self._exit = self._exit[kept]
        self._features = [states[kept] for states in self._features]
        self.starts = [self.starts[row] for row in kept]
        self._noted = [
            ([starts[row] for row in kept], [states[kept] for states in streams])
            for starts, streams in self._noted
        ]

    def join(self, other: VerifiedStates) -> None:
        """Append the rows of another."""
        self.merge()
        other.merge()
        self._exit = append_rows(self._exit, other._exit)
        self._features = list(map(append_rows, self._features, other._features))
        self.starts = self.starts + other.starts


def accepted_indices(starts: Sequence[Sequence[int]], widths: Sequence[int]) -> list[list[int]]:
    """Indices of each row's accepted tokens in concatenated blocks of successive rounds.

    What a block has beyond the start of the next one was rejected. Shorter rows repeat their last
    index.

    Args:
        starts: per block, the position of its first token in each row.
        widths: widths of the blocks.
    """
    found: list[list[int]] = []
    for row in range(len(starts[0])):
        indices: list[int] = []
        first = 0
        for block, width in enumerate(widths):
            ends = block + 1 < len(starts)
            accepted = starts[block + 1][row] - starts[block][row] if ends else width
            indices.extend(range(first, first + accepted))
            first += width
        found.append(indices)
    longest = max(map(len, found))
    return [indices + indices[-1:] * (longest - len(indices)) for indices in found]


class OwnKV:
    """Per row, the number of first tokens whose KV of the head's own layer is final.

    KV is final if the layer made it of what the target computed for the token. What it made of
    masks, or of its own output in place of the target's features, is made again once the tokens
    are verified. All of this is about positions only; the KV itself is in the slots.
    """

    def __init__(self) -> None:
        self._final: list[int] = []

    def written(self, lengths: Sequence[int]) -> None:
        """The KV of the first `lengths` tokens is final: after a prompt, or a verification."""
        self._final = list(lengths)

    def rejected(self, lengths: Sequence[int]) -> None:
        """What follows the first `lengths` tokens came from rejected drafts."""
        self._final = [min(final, n) for final, n in zip(self._final, lengths, strict=True)]

    def missing(self, lengths: Sequence[int]) -> tuple[list[int], list[int]]:
        """What the layer has to run over before it can draft.

        Args:
            lengths: per row, the position of the pending token.

        Returns:
            Per row, the position of the first token without final KV, and the number of tokens
            from it to the pending token.
        """
        starts = [min(final, n) for final, n in zip(self._final, lengths, strict=True)]
        return starts, [n - start for n, start in zip(lengths, starts, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self._final = [self._final[row] for row in rows]

    def join(self, other: OwnKV) -> None:
        """Append the rows of another."""
        self._final += other._final


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
