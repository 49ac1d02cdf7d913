"""One round on the host: read in one synchronisation, cut at stops; scores of every step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfspec.sampling.draft import Draft, Verdict
from selfspec.schedule.stats import Round


class RowRound(NamedTuple):
    """One row's round before it is cut.

    Attributes:
        accepted: number of accepted drafts.
        drafted: drafts on the accepted branch.
        block: the accepted drafts and the target's token.
        branch: positions of these drafts in the block; empty for a chain.
        proposed: tokens that the target verified, including other branches.
        broken: whether logits that decided about tokens are NaN or infinite.
    """

    accepted: int
    drafted: list[int]
    block: list[int]
    branch: list[int]
    proposed: int
    broken: bool

    @property
    def moved(self) -> bool:
        """Whether the accepted drafts are not consecutive in the block."""
        kept = self.branch[: self.accepted]
        return kept != list(range(1, len(kept) + 1))

    def cut(self, count: int) -> Round:
        """The round cut to `count` tokens; drafts after a stop do not count."""
        if count > self.accepted:
            target = self.block[self.accepted]
            return Round(tuple(self.drafted), self.accepted, target, self.proposed)
        return Round(tuple(self.drafted[:count]), count, None, self.proposed)


def broken_positions(logits: Tensor, branch: Tensor | None, sampled: bool) -> Tensor:
    """`[rows, m + 1]` whether the logits are NaN, or infinite where tokens are sampled.

    Args:
        logits: `[rows, n + 1, vocab]` the target's logits.
        branch: `[rows, m]` positions of the accepted branch of a tree.
        sampled: whether tokens are sampled.
    """
    top = logits.amax(-1)  # NaN where any logit is
    if branch is not None:
        top = top.gather(1, torch.nn.functional.pad(branch, (1, 0)))
    return ~(top < torch.inf) if sampled else top.isnan()


def read_rounds(draft: Draft, verdict: Verdict, broken: Tensor) -> list[RowRound]:
    """Copy a round's drafts and verdict to the host.

    Args:
        draft: the proposal.
        verdict: the verdict.
        broken: `[rows, m + 1]` from `broken_positions`.
    """
    tree, branch = draft.tree, verdict.branch
    parts = [verdict.accepted, verdict.tokens, draft.tokens, broken]
    if branch is not None:
        assert tree is not None
        parts[2] = draft.tokens.gather(1, (branch - 1).clamp_min(0))
        parts += [(branch > 0).sum(-1), (tree.parents >= 0).sum(-1), branch]
    elif draft.counts is not None:
        parts.append(draft.counts)
    accepted_counts, blocks, drafted, breaks, *more = on_host(parts)
    verdict.remember(accepted_counts)
    if branch is not None:
        counts, proposed, branches = more
    else:
        counts = more[0] if more else [draft.length] * len(blocks)
        proposed, branches = counts, [[]] * len(blocks)
    return [
        RowRound(
            accepted,
            tokens[:count],
            block[: accepted + 1],
            branch[:count],
            checked,
            any(breaks[: accepted + 1]),
        )
        for accepted, tokens, block, count, branch, checked, breaks in zip(
            accepted_counts, drafted, blocks, counts, branches, proposed, breaks, strict=True
        )
    ]


def on_host(parts: Sequence[Tensor]) -> list[list[Any]]:
    """Tensors as lists. On a GPU they are joined first, so that one transfer is enough."""
    here = parts[0].device.type == "cpu"
    return list(map(Tensor.tolist, parts)) if here else fetch(parts)


def fetch(parts: Sequence[Tensor]) -> list[list[Any]]:
    """Tensors `[rows]` or `[rows, n]` as lists, in one transfer from the device."""
    columns = [part if part.dim() > 1 else part[:, None] for part in parts]
    ends = list(itertools.accumulate(column.shape[1] for column in columns))
    rows = torch.cat(columns, dim=1).tolist()
    return [
        [row[end - column.shape[1] : end] if part.dim() > 1 else row[end - 1] for row in rows]
        for part, column, end in zip(parts, columns, ends, strict=True)
    ]


@dataclass
class StepRecord:
    """One `[vocab]` vector (scores or logits) per emitted token of each row, if asked for.

    Attributes:
        wanted: whether the caller asked for them.
        rows: the vectors so far, per row of the call.
        block: `[rows, k + 1, vocab]` vectors of the current round, of unfinished rows.
    """

    wanted: bool
    rows: list[list[Tensor]] = field(default_factory=list)
    block: Tensor | None = None

    def begin(self, block: Tensor, branch: Tensor | None) -> None:
        """Store the vectors of a round before its tokens are cut.

        Args:
            block: `[rows, n + 1, vocab]` vectors at each position of the block.
            branch: `[rows, levels]` positions of the accepted branch of a tree.
        """
        if self.wanted:
            if branch is not None:
                way = torch.nn.functional.pad(branch, (1, 0))[..., None]
                block = block.gather(1, way.expand(-1, -1, block.shape[2]))
            self.block = block.float()

    def append(self, rows: Sequence[int], step: Tensor) -> None:
        """Keep one vector `[rows, vocab]` for each unfinished row."""
        if self.wanted:
            for row, vector in zip(rows, step, strict=True):
                self.rows[row].append(vector)

    def keep(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Keep the first `counts` vectors of the round."""
        if self.block is None:
            return
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            self.rows[row].extend(self.block[index, :count].unbind(0))

    def until(self, row: int, index: int, count: int) -> tuple[Tensor, ...] | None:
        """The scores that a stopping criterion gets for `row` after `count` new tokens.

        As in plain decoding, a tuple of `[batch, vocab]`, one per step; every row has this row's.
        """
        if self.block is None:
            return None
        steps = [*self.rows[row], *self.block[index, :count].unbind(0)]
        return tuple(step.expand(len(self.rows), -1) for step in steps)

    def steps(self) -> tuple[Tensor, ...] | None:
        """`[batch, vocab]` per step, as transformers returns them; zeros where a row has ended."""
        if not self.wanted:
            return None
        longest = max((len(row) for row in self.rows), default=0)
        blank = next((torch.zeros_like(row[0]) for row in self.rows if row), None)
        return tuple(
            torch.stack([row[step] if step < len(row) else blank for row in self.rows])  # type: ignore[misc]
            for step in range(longest)
        )
