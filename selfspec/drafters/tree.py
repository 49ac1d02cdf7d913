"""A token tree from an exit head, expanded where acceptance is likely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import Self

from selfspec.config import DraftConfig
from selfspec.decoder import Pass
from selfspec.drafters.base import Drafter
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.drafters.readers import ExitReader, make_reader
from selfspec.sampling.draft import Draft, Tree, Verdict

# Fraction of a sibling's chance that is left once the one before it was rejected. Any is exact;
# this one gave the longest accepted branches.
SECOND_CHANCE = 0.5


@dataclass
class _PartialTree:
    """A partial tree.

    Attributes:
        reach: `[rows, width]` log of the chance that each draft of the last level is accepted.
        tokens: `[rows, n]` drafts.
        parents: `[rows, n]` positions of their parents.
        widths: drafts of each level.
        hidden: the exit's hidden states of each level; none if the exit is at the embeddings.
        probs: `[rows, width, vocab]` q after each level, if drafts are sampled.
    """

    reach: Tensor
    tokens: Tensor
    parents: Tensor
    widths: list[int] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, pending: Tensor) -> _PartialTree:
        """An empty tree after the pending tokens `[rows, 1]`."""
        reach = torch.zeros(pending.shape, device=pending.device)
        return cls(reach, pending[:, :0], pending[:, :0])

    @property
    def last(self) -> int:
        """Position of the first draft of the last level; 0 for an empty tree."""
        return self.tokens.shape[1] + 1 - self.widths[-1] if self.widths else 0

    @property
    def tree(self) -> Tree | None:
        """The tree; `None` if it is empty."""
        return Tree(self.parents, len(self.widths), max(self.widths)) if self.widths else None

    def add(self, tokens: Tensor, parents: Tensor, reach: Tensor) -> None:
        """Add a level; `parents` `[rows, width]` are indices into the last level."""
        self.parents = torch.cat([self.parents, parents + self.last], dim=1)
        self.tokens = torch.cat([self.tokens, tokens], dim=1)
        self.widths.append(tokens.shape[1])
        self.reach = reach


class TreeExpansion:
    """Expands trees from an exit head (EAGLE-2, Li et al. 2024).

    The drafts of a level run through the shallow layers and the head in one pass; of all their
    children, those most likely to be accepted form the next level. The number of children of a
    position depends on the head's confidence and not on the drawn tokens, so that sampled trees are
    lossless.

    Args:
        reader: the exit head and the passes after it.
        widths: drafts of each level.
    """

    def __init__(self, reader: ExitReader, widths: Sequence[int]):
        self.reader, self.widths = reader, list(widths)[: reader.head.longest]

    def propose(self, state: State, limit: int) -> Draft:
        """Expand the tree level by level."""
        partial, depth = _PartialTree.of(state.pending), self.reader.depth
        tokens, parents, tree = state.pending, None, None
        widths = self.widths[:limit]
        self.reader.begin(len(widths))
        for width in widths:
            logits, at_exit = self.reader.read(state, tokens, partial.last, tree, parents)
            if at_exit is not None:
                partial.hidden.append(at_exit)
            with state.stats.clock("sampling"):
                tokens, parents = self._extend(state, logits, partial, width)
            tree = partial.tree
        return Draft(
            tokens=partial.tokens,
            probs=torch.cat(partial.probs, dim=1) if partial.probs else None,
            depth=depth,
            hidden=torch.cat(partial.hidden, dim=1) if depth else None,
            tree=tree,
        )

    def _extend(
        self, state: State, logits: Tensor, partial: _PartialTree, width: int
    ) -> tuple[Tensor, Tensor]:
        """Add `width` children of the last level, or fewer if the vocabulary is smaller.

        Returns:
            Their tokens `[rows, width]`, and which draft of the last level each continues.
        """
        sampler, level = state.sampler, len(partial.widths)
        scored = sampler.scored(self.reader.vocabulary)
        scores = self._scores(state, logits, partial)
        order = sampler.order(scores, state.context, level, scored)
        if sampler.do_sample:
            partial.probs.append(scored.spread(scores.softmax(-1), 0.0))
        most = min(width, scores.shape[-1])
        children = order.topk(most, dim=-1).indices
        chances = self._chances(scores, most, level, sampler.do_sample)
        reach = (partial.reach[..., None] + chances).flatten(1)
        best = reach.topk(min(width, reach.shape[1]), dim=-1)
        tokens = scored.tokens(children.flatten(1).gather(1, best.indices))
        parents = best.indices // most
        partial.add(tokens, parents, best.values)
        return tokens, parents

    def _scores(self, state: State, logits: Tensor, partial: _PartialTree) -> Tensor:
        sampler, context, tree = state.sampler, state.context, partial.tree
        if sampler.reads_ids:
            logits = self.reader.vocabulary.spread(logits, -torch.inf)
        if tree is None:
            scores = sampler.scores(logits, context)
        else:
            scores = sampler.tree_scores(logits, context, partial.tokens, tree, partial.last)
        return sampler.drawable(scores)

    def _chances(self, scores: Tensor, width: int, depth: int, sampled: bool) -> Tensor:
        """`[rows, positions, width]` log chance of each child, decreasing from child to child.

        It depends on the distribution alone: the token that was drawn must not decide whether it
        becomes a candidate. Logs do not underflow to equal values, which could put a later sibling
        before an earlier one.
        """
        judge = self.reader.calibrator(sampled)
        first = judge(scores.flatten(0, 1), depth).view(*scores.shape[:2], 1)
        ranks = torch.arange(width, device=scores.device)
        return first.log() + ranks * ((1 - first) * SECOND_CHANCE).log()


def share(nodes: int, levels: int) -> list[int]:
    """`nodes` drafts shared out over `levels`, the first ones the wider."""
    return [nodes // levels + (level < nodes % levels) for level in range(levels)]


class ExitTree(Drafter):
    """Self-speculation with a token tree after an early exit.

    Args:
        reader: the exit head and the passes after it.
        widths: drafts of each level.
    """

    name = "tree"
    makes_trees = True

    def __init__(self, reader: ExitReader, widths: Sequence[int]):
        self.reader, self.keep, self.drafting = reader, reader.keep, reader.decoder
        self.expansion = TreeExpansion(reader, widths)

    @classmethod
    def from_config(cls, engine: Engine, config: DraftConfig) -> ExitTree:
        """Share the node budget out over the levels.

        Raises:
            ValueError: fewer nodes than levels, or positions that a tree would confuse.
        """
        levels, nodes = config.most_tokens, config.tree.nodes
        if nodes < levels:
            raise ValueError(
                f"tree.nodes={nodes} is fewer than num_draft_tokens={levels}, the depth of the "
                "tree; every level needs a node"
            )
        engine.decoder.check_trees()
        reader = make_reader(engine, engine.head(config))
        return cls(reader, share(nodes, levels))

    def prefilled(self, state: State, block: Pass, offset: int, counts: Sequence[int]) -> None:
        """Show the head the prompt."""
        self.reader.prefilled(state, block, offset, counts)

    def propose(self, state: State, limit: int) -> Draft:
        """Draft a tree."""
        return self.expansion.propose(state, limit)

    def commit(self, state: State, draft: Draft, verified: Verified, verdict: Verdict) -> None:
        """Show the head the results along the accepted branch."""
        if verdict.branch is not None:
            verified = verified.along(verdict.branch)
        self.reader.verified(state, draft.levels, verified)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.reader.select(rows)

    def join(self, other: Self) -> None:
        """Append the rows of another drafter."""
        self.reader.join(other.reader)
