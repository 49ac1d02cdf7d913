"""A chain of drafts from an exit head after the first layers."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.config import DraftConfig
from selfspec.decoder import Pass
from selfspec.drafters.base import Drafter
from selfspec.drafters.chain import ExitChain
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.drafters.exit_reader import make_reader
from selfspec.sampling.draft import Draft, Verdict
from selfspec.schedule import make_schedule


class EarlyExit(Drafter):
    """Self-speculation through an early exit (LayerSkip, Elhoushi et al. 2024).

    k drafts cost k shallow passes; verification resumes from the hidden states they left.

    Args:
        chain: the exit head, and how long it drafts.
    """

    name = "early_exit"
    takes_schedule = True

    def __init__(self, chain: ExitChain):
        self.chain, self.keep = chain, chain.keep

    @classmethod
    def from_config(cls, engine: Engine, config: DraftConfig) -> EarlyExit:
        """Take the head that the config asks for."""
        head = engine.head(config)
        schedule = make_schedule(config, engine.round_model(head=head))
        return cls(ExitChain(make_reader(engine, head), config.most_tokens, schedule))

    def prefilled(self, state: State, block: Pass, offset: int, counts: Sequence[int]) -> None:
        """Show the head the prompt."""
        self.chain.prefilled(state, block, offset, counts)

    def propose(self, state: State, limit: int) -> Draft:
        """Draft token by token."""
        return self.chain.propose(state, limit)

    def commit(self, state: State, draft: Draft, verified: Verified, verdict: Verdict) -> None:
        """Show the head what the target made of the drafts."""
        if draft.length:
            self.chain.commit(state, draft, verified, verdict)
        else:
            self.chain.skipped(state, verified)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with some rows only."""
        self.chain.select(rows)
