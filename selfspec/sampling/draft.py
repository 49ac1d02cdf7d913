"""`Draft` and `Verdict`: what drafting, verification and acceptance exchange.

Legend: batch = rows; n = drafted tokens of a row; block = the pending token and the drafts after
it, n + 1 positions, the pending token at position 0; vocab = the target's vocabulary.
"""

from __future__ import annotations

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

    @cached_property
    def ancestors(self) -> Tensor:
        """`[batch, n + 1, n + 1]` whether position j is an ancestor of position i, or i itself."""
        rows, drafts = self.parents.shape
        own = torch.arange(drafts + 1, device=self.parents.device).expand(rows, -1)
        above = torch.nn.functional.pad(self.parents, (1, 0))
        above = torch.where(above < 0, own, above)
        seen = torch.eye(drafts + 1, dtype=torch.bool, device=own.device).repeat(rows, 1, 1)
        place = own
        for _ in range(self.levels):
            place = above.gather(1, place)
            seen.scatter_(2, place[..., None], True)
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

    def branch(self, place: Tensor) -> Tensor:
        """`[batch, levels]` the positions on the branch to `place` `[batch]`, then 0."""
        drafts = self.parents.shape[1]
        rows = torch.arange(len(place), device=place.device)
        own = torch.arange(drafts + 1, device=place.device)
        beyond = torch.where(self.ancestors[rows, place], own, drafts + 1)
        branch = beyond[:, 1:].sort(-1).values[:, : self.levels]
        return branch.masked_fill(branch > drafts, 0)

    def below(self, place: Tensor) -> Tensor:
        """`[batch]` the first of the deepest descendants of `place` `[batch]`, or itself."""
        rows = torch.arange(len(place), device=place.device)
        return torch.where(self.ancestors[rows, :, place], self.depths, -1).argmax(-1)


@dataclass
class Verdict:
    """What verification decided.

    Attributes:
        accepted: `[batch]` number of accepted drafts.
        tokens: `[batch, levels + 1]` the accepted drafts, then at index `accepted` the target's
            token (the correction, or the bonus after the last draft). The rest is undefined.
        branch: of a tree, `[batch, levels]` the positions in the block of the accepted drafts and
            of a continuation of that branch, then 0; `None` for a chain.
    """

    accepted: Tensor
    tokens: Tensor
    branch: Tensor | None = None

    @cached_property
    def kept(self) -> list[int]:
        """`accepted` on the host."""
        return self.accepted.tolist()
