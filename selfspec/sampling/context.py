"""The tokens so far, and the texts before the positions of a block of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from selfspec.sampling.processors import Prefixes


class Context:
    """The tokens so far, as processors and stopping criteria see them.

    One buffer holds every row of the call, finished ones included, because a processor may depend
    on the index of a row. `rows` are the unfinished ones. Most calls never read the buffer before
    they end, so committed tokens are written to it when it is read.

    Args:
        tokens: `[batch, capacity]` the caller's prompt, left padding included, then free space.
        lengths: committed tokens of each row of the call, padding included.
        rows: indices of the unfinished rows, in the order of the model's tensors.
        text: committed tokens of each row on the host, without padding.
        padding: the token after the end of finished rows.

    Attributes:
        alike: whether the processors of all rows differ only in what depends on the prompt.
    """

    alike: bool = True

    def __init__(
        self,
        tokens: Tensor,
        lengths: list[int],
        rows: list[int],
        text: Sequence[list[int]] = (),
        padding: int = 0,
    ):
        self.padding = padding
        self.lengths, self.text = dict(enumerate(lengths)), dict(enumerate(text))  # by row
        self.rows = rows
        self._tokens, self._filled = tokens, dict(self.lengths)

    @property
    def device(self) -> torch.device:
        """The buffer's device."""
        return self._tokens.device

    @property
    def tokens(self) -> Tensor:
        """`[batch, capacity]` the prompt, the emitted tokens, and space for drafts."""
        if self._filled != self.lengths:
            # Tensors that were made in inference mode can be changed in inference mode only.
            with torch.inference_mode(self._tokens.is_inference()):
                self._fill()
        return self._tokens

    def _fill(self) -> None:
        for row, length in self.lengths.items():
            missing = length - self._filled[row]
            if missing:
                new = torch.tensor(self.text[row][-missing:], device=self.device)
                self._put(row, length - missing, new)
                self._filled[row] = length

    def reserve(self, width: int) -> None:
        """Reserve space for rows of `width` tokens."""
        missing = width - self._tokens.shape[1]
        if missing > 0:
            self._tokens = torch.nn.functional.pad(self._tokens, (0, missing))

    def write(self, block: Tensor, offset: int = 0) -> None:
        """Write `block` `[rows, n]` at `offset` after the committed tokens of unfinished rows."""
        starts, width = [self.lengths[row] + offset for row in self.rows], block.shape[1]
        if len(starts) == 1:
            return self._put(self.rows[0], starts[0], block[0])
        if max(starts) + width > self._tokens.shape[1]:
            self.reserve(2 * (max(starts) + width))
        indices = [[self._index(row) for row in self.rows], starts]
        rows, firsts = torch.tensor(indices, device=self.device)[..., None]
        columns = firsts + torch.arange(width, device=self.device)
        self._tokens[rows, columns] = block.to(self.device)

    def _index(self, row: int) -> int:
        """Index of a row in the buffer."""
        return row

    def _put(self, row: int, start: int, tokens: Tensor) -> None:
        stop = start + len(tokens)
        if stop > self._tokens.shape[1]:
            self.reserve(2 * stop)
        self._tokens[self._index(row), start:stop] = tokens

    def commit(self, row: int, tokens: Sequence[int], written: bool) -> None:
        """Commit tokens of a row; `written` ones are in the buffer already."""
        if written and self._filled[row] == self.lengths[row]:
            self._filled[row] += len(tokens)
        self.lengths[row] += len(tokens)
        self.text[row].extend(tokens)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only some of the unfinished rows, by their index among these."""
        self.rows = [self.rows[index] for index in rows]

    def new(self, row: int, start: int) -> list[int]:
        """Committed tokens of a row from index `start` on, padding counted."""
        return self.text[row][start - self.lengths[row] :] if start < self.lengths[row] else []

    def padded(self, ahead: int = 0) -> Tensor:
        """`[batch, longest + ahead]` the tokens of every row, padded behind the shorter ones.

        Args:
            ahead: tokens after the committed ones, written before, that unfinished rows also have.
        """
        width = max(self.lengths.values()) + ahead
        ends = [length + ahead * (row in self.rows) for row, length in self.lengths.items()]
        lengths = torch.tensor(ends, device=self.device)[:, None]
        behind = torch.arange(width, device=self.device) >= lengths
        return self.tokens[:, :width].masked_fill(behind, self.padding)

    def column(self, tokens: Tensor) -> Tensor:
        """`[batch, 1]` one more token of every unfinished row, and padding in the others."""
        column = torch.full((len(self.lengths), 1), self.padding, device=self.device)
        column[self.rows, 0] = tokens.to(self.device)
        return column

    def first(self, width: int) -> Tensor:
        """`[rows, width]` the first tokens of unfinished rows."""
        indices, tokens = [self._index(row) for row in self.rows], self.tokens
        if indices == list(range(tokens.shape[0])):
            return tokens[:, :width]
        return tokens[indices, :width]


def before_chain(context: Context, width: int, offset: int, filler: int) -> Prefixes:
    """The texts before `width` positions of every unfinished row, row by row.

    Args:
        context: the tokens so far.
        width: number of positions.
        offset: distance of the first one from the end of the committed tokens; the tokens
            between have been written.
        filler: stands behind the end of shorter texts.
    """
    counts = [context.lengths[row] + offset for row in context.rows]
    shortest, longest = min(counts), max(counts) + width - 1

    @cache
    def lengths() -> Tensor:
        ahead = torch.arange(width, device=context.device)
        return (torch.tensor(counts, device=context.device)[:, None] + ahead).flatten()

    def tokens() -> Tensor:
        text = context.first(longest)
        if shortest == longest:
            return text
        behind = torch.arange(longest, device=context.device) >= lengths()[:, None]
        return text.repeat_interleave(width, 0).masked_fill_(behind, filler)

    rows = [row for row in context.rows for _ in range(width)]
    return Prefixes(rows, shortest, longest, tokens, lengths)


def before_nodes(context: Context, drafts: Tensor, above: Tensor, filler: int) -> Prefixes:
    """The texts before positions of a tree of every unfinished row, row by row.

    Args:
        context: the tokens so far.
        drafts: `[rows, drafts]` the tree's tokens.
        above: `[rows, n, drafts]` which of them are on the branch to each position.
        filler: stands behind the end of shorter texts.
    """
    counts = [context.lengths[row] for row in context.rows]
    committed = torch.tensor(counts, device=context.device)[:, None]
    longest, room = max(counts), drafts.shape[1]

    def tokens() -> Tensor:
        behind = torch.arange(longest, device=context.device) >= committed
        text = context.first(longest).masked_fill(behind, filler)
        text = torch.nn.functional.pad(text, (0, room + 1), value=filler)
        text = text[:, None].repeat(1, above.shape[1], 1)
        # Tokens on other branches go to a column that is dropped.
        columns = torch.where(above, committed[..., None] + above.cumsum(-1) - 1, longest + room)
        text.scatter_(2, columns, drafts[:, None].expand_as(above))
        return text[..., :-1].flatten(0, 1)

    rows = [row for row in context.rows for _ in range(above.shape[1])]
    lengths = (committed + above.sum(-1)).flatten()
    return Prefixes(rows, min(counts), longest + room, tokens, lambda: lengths)
