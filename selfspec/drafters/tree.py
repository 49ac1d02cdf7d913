"""A token tree from an exit head, expanded where acceptance is likely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from selfspec.config import DraftConfig
from selfspec.decoder import Pass
from selfspec.drafters.base import Drafter
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.drafters.exit_reader import ExitReader, make_reader
from selfspec.sampling.draft import Draft, Tree, Verdict

# What is left of the chance of a sibling when the one before it has fallen. Any value is exact;
# this one grows the trees that the target follows furthest.
_SECOND_CHANCE = 0.5


@dataclass
class _Growth:
    """A tree as far as it has grown.

    Attributes:
        reach: `[rows, width]` log of how likely each draft of the last level is to be reached.
        tokens: `[rows, n]` drafts.
        parents: `[rows, n]` positions of what they continue.
        widths: drafts of each level.
        hidden: the exit's hidden states of each level that was read; none at the embedding.
        probs: `[rows, width, vocab]` q after each level, where drafts are drawn.
    """

    reach: Tensor
    tokens: Tensor
    parents: Tensor
    widths: list[int] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, pending: Tensor) -> _Growth:
        """Nothing after the pending tokens `[rows, 1]`."""
        reach = torch.zeros(pending.shape, device=pending.device)
        return cls(reach, pending[:, :0], pending[:, :0])

    @property
    def last(self) -> int:
        """Place of the first draft of the last level; 0 while there is none."""
        return self.tokens.shape[1] + 1 - self.widths[-1] if self.widths else 0

    @property
    def tree(self) -> Tree | None:
        """Which continues which."""
        return Tree(self.parents, len(self.widths), max(self.widths)) if self.widths else None

    def add(self, tokens: Tensor, parents: Tensor, reach: Tensor) -> None:
        """Add a level; `parents` `[rows, width]` counts the drafts of the last."""
        self.parents = torch.cat([self.parents, parents + self.last], dim=1)
        self.tokens = torch.cat([self.tokens, tokens], dim=1)
        self.widths.append(tokens.shape[1])
        self.reach = reach


class ExitGrowth:
    """Trees from an exit head (EAGLE-2's growth, Li et al. 2024).

    Level by level: the drafts of a level run through the shallow layers and the head in one pass;
    of all their children, the ones that the target will most likely reach make the next level.
    How many children a position gets depends on the head's confidence, not on what was drawn there,
    so that sampled trees are lossless.

    Args:
        reader: the exit head and the passes after it.
        widths: drafts of each level.
    """

    def __init__(self, reader: ExitReader, widths: Sequence[int]):
        self.reader, self.widths = reader, list(widths)

    def propose(self, state: State, limit: int) -> Draft:
        """Grow the tree level by level."""
        growth, depth = _Growth.of(state.pending), self.reader.head.exit_layer
        tokens, parents, tree = state.pending, None, None
        for width in self.widths[:limit]:
            logits, at_exit = self.reader.read(state, tokens, growth.last, tree, parents)
            if at_exit is not None:
                growth.hidden.append(at_exit)
            with state.stats.clock("sampling"):
                tokens, parents = self._extend(state, logits, growth, width)
            tree = growth.tree
        return Draft(
            tokens=growth.tokens,
            probs=torch.cat(growth.probs, dim=1) if growth.probs else None,
            depth=depth,
            hidden=torch.cat(growth.hidden, dim=1) if depth else None,
            tree=tree,
        )

    def _extend(
        self, state: State, logits: Tensor, growth: _Growth, width: int
    ) -> tuple[Tensor, Tensor]:
        """Give the drafts of the last level children, `width` in all where the vocabulary allows.

        Returns:
            Their tokens `[rows, width]`, and which draft of the last level each continues.
        """
        scores = self._scores(state, logits, growth)
        sampler, level = state.sampler, len(growth.widths)
        order = sampler.order(scores, state.context, level)
        if sampler.do_sample:
            growth.probs.append(scores.softmax(-1))
        most = min(width, scores.shape[-1])
        children = order.topk(most, dim=-1).indices
        chances = self._chances(scores, most, level, sampler.do_sample)
        reach = (growth.reach[..., None] + chances).flatten(1)
        best = reach.topk(min(width, reach.shape[1]), dim=-1)
        tokens = children.flatten(1).gather(1, best.indices)
        parents = best.indices // most
        growth.add(tokens, parents, best.values)
        return tokens, parents

    def _scores(self, state: State, logits: Tensor, growth: _Growth) -> Tensor:
        sampler, context, tree = state.sampler, state.context, growth.tree
        if tree is None:
            scores = sampler.scores(logits, context)
        else:
            scores = sampler.tree_scores(logits, context, growth.tokens, tree, growth.last)
        return scores if self.reader.head.vocab_ids is None else sampler.drawable(scores)

    def _chances(self, scores: Tensor, width: int, depth: int, sampled: bool) -> Tensor:
        """`[rows, positions, width]` log of how likely each child is kept, falling child by child.

        Of a drawn child it depends on the distribution alone: which token was drawn must not
        decide whether it becomes a candidate. Logs never underflow to equal values, among which a
        later sibling might be taken before an earlier one.
        """
        judge = self.reader.calibrator(sampled)
        first = judge(scores.flatten(0, 1), depth).view(*scores.shape[:2], 1)
        ranks = torch.arange(width, device=scores.device)
        return first.log() + ranks * ((1 - first) * _SECOND_CHANCE).log()


def share(nodes: int, levels: int) -> list[int]:
    """`nodes` drafts shared out over `levels`, the first ones the wider."""
    return [nodes // levels + (level < nodes % levels) for level in range(levels)]


# A tree of drafts from an exit head after the first layers.


class ExitTree(Drafter):
    """Self-speculation with a token tree after an early exit.

    Args:
        reader: the exit head and the passes after it.
        widths: drafts of each level.
    """

    name = "tree"
    makes_trees = True

    def __init__(self, reader: ExitReader, widths: Sequence[int]):
        self.reader, self.keep = reader, reader.keep
        self.growth = ExitGrowth(reader, widths)

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
        """Grow a tree."""
        return self.growth.propose(state, limit)

    def commit(self, state: State, draft: Draft, verified: Verified, verdict: Verdict) -> None:
        """Show the head what the target made of the kept branch."""
        if verdict.branch is not None:
            verified = verified.along(verdict.branch)
        self.reader.verified(state, draft.levels, verified)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with some rows only."""
        self.reader.select(rows)
