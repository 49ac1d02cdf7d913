"""A tree of drafts from an exit head behind the first layers."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.config import DraftConfig
from selfspec.decoder import Pass
from selfspec.drafters.base import Drafter
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.drafters.exit_readers import ExitReader, make_reader
from selfspec.drafters.tree_expansion import ExitGrowth, share
from selfspec.sampling.draft import Draft, Verdict


class ExitTree(Drafter):
    """Self-speculation with a token tree behind an early exit.

    Args:
        reader: the exit head and the passes behind it.
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
