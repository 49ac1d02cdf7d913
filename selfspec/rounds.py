"""A round on the host: brought there in one synchronisation, then cut at its rows' stops."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.draft import Draft, Verdict
from selfspec.stats import Round


class RowRound(NamedTuple):
    """One row's round before it is cut.

    Attributes:
        accepted: drafts that were kept.
        drafted: tokens proposed on the branch of the kept ones.
        block: the kept drafts and the token of the target.
        branch: places of the drafted in the block; empty for a chain.
        proposed: tokens that the target checked, those of other branches included.
    """

    accepted: int
    drafted: list[int]
    block: list[int]
    branch: list[int]
    proposed: int

    @property
    def moved(self) -> bool:
        """Whether kept drafts lie apart."""
        kept = self.branch[: self.accepted]
        return kept != list(range(1, len(kept) + 1))

    def cut(self, count: int) -> Round:
        """The round as it stands with `count` tokens; drafts behind a stop do not count."""
        if count > self.accepted:
            target = self.block[self.accepted]
            return Round(tuple(self.drafted), self.accepted, target, self.proposed)
        return Round(tuple(self.drafted[:count]), count, None, self.proposed)


def broken_places(logits: Tensor, branch: Tensor | None, sampled: bool) -> Tensor:
    """`[rows, m + 1]` behind which places of a row's branch no token can be told.

    Args:
        logits: `[rows, n + 1, vocab]` what tokens are told from.
        branch: `[rows, m]` the places that count, of a tree.
        sampled: whether tokens are drawn, which bears no infinity either.
    """
    top = logits.amax(-1)  # NaN where any logit is
    if branch is not None:
        top = top.gather(1, torch.nn.functional.pad(branch, (1, 0)))
    return ~(top < torch.inf) if sampled else top.isnan()


def read_rounds(draft: Draft, verdict: Verdict, broken: Tensor) -> list[RowRound]:
    """Bring what was drafted and decided to the host.

    Args:
        draft: the proposal.
        verdict: what was decided.
        broken: `[rows, m + 1]` behind which places nothing could be.

    Raises:
        ValueError: one of these counts: the logits are NaN, or infinite where tokens are drawn.
    """
    places, drafted, numbers = verdict.branch, draft.tokens, [verdict.accepted]
    if draft.tree is not None and places is not None:
        drafted = draft.tokens.gather(1, (places - 1).clamp_min(0))
        numbers += [(places > 0).sum(-1), (draft.tree.parents >= 0).sum(-1)]
    elif draft.counts is not None:
        numbers += [draft.counts, draft.counts]
    columns = [number.unsqueeze(1) for number in numbers] + ([] if places is None else [places])
    rows = _on_host([*columns, drafted, verdict.tokens, broken])
    first = len(rows[0]) - broken.shape[1]
    if any(any(row[first : first + row[0] + 1]) for row in rows):
        raise ValueError(
            "the model's logits are NaN or infinite; check its weights and dtype (float16 "
            "overflows where bfloat16 and float32 do not)"
        )
    if len(numbers) == 1:  # all drafts are real
        rows = [[row[0], draft.length, draft.length, *row[1:]] for row in rows]
    verdict.kept = [row[0] for row in rows]
    branch = 0 if places is None else places.shape[1]
    return [_taken_apart(row, branch, drafted.shape[1]) for row in rows]


def _on_host(parts: list[Tensor]) -> list[list[int]]:
    """The rows of all parts, side by side; a device is waited for once."""
    if parts[0].device.type != "cpu":
        return torch.cat(parts, dim=1).tolist()
    rows = zip(*map(Tensor.tolist, parts), strict=True)
    return [list(itertools.chain(*row)) for row in rows]


def _taken_apart(row: list[int], places: int, drafted: int) -> RowRound:
    """`[accepted, count, proposed, places, drafts, drafts + 1 tokens, ...]` by name."""
    accepted, count, proposed = row[:3]
    branch, rest = row[3 : 3 + places], row[3 + places :]
    block = rest[drafted : drafted + accepted + 1]
    return RowRound(accepted, rest[:count], block, branch[:count], proposed)
