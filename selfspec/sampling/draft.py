"""`Draft` and `Verdict`: what drafting, verification and acceptance exchange.

Legend: batch = rows; n = drafted tokens of a row; block = the pending token and the drafts after
it, n + 1 positions, the pending token at position 0; vocab = the target's vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass
class Draft:
    """What a drafter proposes for one round: a chain after the pending token, or a tree.

    Attributes:
        tokens: `[batch, n]` proposed token ids; of a chain, the continuation of the pending token.
        probs: `[batch, m, vocab]` q, after the caller's processors: at each position of the block
            the distribution that the next draft (or the children) were drawn from. `None` if drafts
            were not sampled.
        depth: layers that the drafter has already run over its prefix (E for early exit); 0 when
            nothing can be reused.
        hidden: `[batch, <= n + 1, width]` hidden states after layer `depth - 1` for the first
            positions of the block; `None` when `depth` is 0.
        tree: the token tree; `None` for a chain.
        counts: `[batch]` drafts of each row, before padding. `None`: all n.
    """

    tokens: Tensor
    probs: Tensor | None = None
    depth: int = 0
    hidden: Tensor | None = None
    tree: Tree | None = None
    counts: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of drafted tokens of a row, padding included."""
        return self.tokens.shape[1]

    @property
    def levels(self) -> int:
        """The most tokens that a row can have accepted."""
        return self.length if self.tree is None else self.tree.levels

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> Draft:
        """No proposal: the round is a plain decoding step."""
        return cls(torch.empty(rows, 0, dtype=torch.long, device=device))

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], device: torch.device) -> Draft:
        """Chains that were not sampled, one for each row."""
        counts = [len(row) for row in rows]
        tokens = [[*row, *[0] * (max(counts) - len(row))] for row in rows]
        if not any(counts):
            return cls.empty(len(rows), device)
        tokens, counts = (torch.tensor(part, device=device) for part in (tokens, counts))
        return cls(tokens, counts=counts)

    def of_row(self, row: int) -> Draft:
        """The draft of one row, without hidden states."""
        here = slice(row, row + 1)
        probs, counts = (None if part is None else part[here] for part in (self.probs, self.counts))
        tree = None if self.tree is None else self.tree.of_row(row)
        return Draft(self.tokens[here], probs, tree=tree, counts=counts)

    def as_tree(self) -> Tree:
        """The tree; that of a chain has one branch."""
        if self.tree is not None:
            return self.tree
        parents = torch.arange(self.length, device=self.tokens.device).expand_as(self.tokens)
        if self.counts is not None:
            parents = parents.masked_fill(parents >= self.counts[:, None], -1)
        return Tree(parents, self.length, 1)


class Tree:
    """Token trees, one per row.

    Args:
        parents: `[batch, n]` the parent's position in the block, smaller than the draft's own; 0 is
            the pending token. -1 for padding, which has no children.
        levels: the most drafts on one branch.
        siblings: the most drafts that continue one position.
    """

    def __init__(self, parents: Tensor, levels: int, siblings: int):
        self.parents, self.levels, self.siblings = parents, levels, siblings

    def of_row(self, row: int) -> Tree:
        """The tree of one row."""
        return Tree(self.parents[row : row + 1], self.levels, self.siblings)

    @cached_property
    def ancestors(self) -> Tensor:
        """`[batch, n + 1, n + 1]` whether position j is an ancestor of position i, or i itself."""
        rows, drafts = self.parents.shape
        own = torch.arange(drafts + 1, device=self.parents.device).expand(rows, -1)
        above = torch.nn.functional.pad(self.parents, (1, 0))
        above = torch.where(above < 0, own, above)
        seen = torch.eye(drafts + 1, dtype=torch.bool, device=own.device).repeat(rows, 1, 1)
        ancestor = own
        for _ in range(self.levels):
            ancestor = above.gather(1, ancestor)
            seen.scatter_(2, ancestor[..., None], True)
        return seen

    @cached_property
    def depths(self) -> Tensor:
        """`[batch, n + 1]` depth of each position; 0 for the pending token."""
        return self.ancestors.sum(-1) - 1

    @cached_property
    def ranks(self) -> Tensor:
        """`[batch, n]` earlier siblings of each draft."""
        same = self.parents[:, :, None] == self.parents[:, None]
        return same.tril(-1).sum(-1)

    def branch(self, end: Tensor) -> Tensor:
        """`[batch, levels]` the positions on the branch to `end` `[batch]`, then 0."""
        drafts = self.parents.shape[1]
        rows = torch.arange(len(end), device=end.device)
        own = torch.arange(drafts + 1, device=end.device)
        beyond = torch.where(self.ancestors[rows, end], own, drafts + 1)
        branch = beyond[:, 1:].sort(-1).values[:, : self.levels]
        return branch.masked_fill(branch > drafts, 0)

    def below(self, position: Tensor) -> Tensor:
        """`[batch]` the first of the deepest descendants of `position` `[batch]`, or itself."""
        rows = torch.arange(len(position), device=position.device)
        return torch.where(self.ancestors[rows, :, position], self.depths, -1).argmax(-1)


@dataclass
class Verdict:
    """What verification decided.

    Attributes:
        accepted: `[batch]` number of accepted drafts.
        tokens: `[batch, levels + 1]` the accepted drafts, then at index `accepted` the target's
            token (the correction, or the bonus after the last draft). The rest is undefined.
        branch: of a tree, `[batch, levels]` the positions in the block of the accepted drafts and
            of a continuation of that branch, then 0; `None` for a chain.
        cut: if the stopping criteria have been asked, how many tokens of each row are kept, and
            whether the row stops there.
    """

    accepted: Tensor
    tokens: Tensor
    branch: Tensor | None = None
    cut: tuple[list[int], list[bool]] | None = None

    @cached_property
    def accepted_counts(self) -> list[int]:
        """`accepted` on the host; once `remember` was called, reading it waits for nothing."""
        return self.accepted.tolist()

    def remember(self, accepted_counts: list[int]) -> None:
        """Keep `accepted_counts`, which were copied to the host together with other tensors."""
        self.accepted_counts = accepted_counts

    def stop(self, row: int) -> None:
        """Keep nothing of a row that has been cut, and stop it."""
        assert self.cut is not None
        counts, stops = self.cut
        counts[row], stops[row] = 0, True

    @classmethod
    def nothing(cls, draft: Draft) -> Verdict:
        """Keep nothing of a draft, and stop its rows."""
        tokens = draft.tokens.new_zeros(len(draft.tokens), draft.levels + 1)
        branch = None if draft.tree is None else tokens[:, 1:]
        cut = [0] * len(tokens), [True] * len(tokens)
        return cls(tokens[:, 0], tokens, branch, cut)

    @classmethod
    def join(cls, verdicts: Sequence[Verdict]) -> Verdict:
        """One verdict of the rows of several, all of which have been cut."""
        accepted = torch.cat([verdict.accepted for verdict in verdicts])
        tokens = torch.cat([verdict.tokens for verdict in verdicts])
        branches = [verdict.branch for verdict in verdicts if verdict.branch is not None]
        kept, ended = zip(*(verdict.cut for verdict in verdicts if verdict.cut), strict=True)
        cut = [*itertools.chain(*kept)], [*itertools.chain(*ended)]
        return cls(accepted, tokens, torch.cat(branches) if branches else None, cut)
