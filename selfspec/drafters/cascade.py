"""Lookup where the sequence repeats itself, early-exit drafts elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.config import DraftConfig
from selfspec.decoder import Pass
from selfspec.drafters.base import Drafter
from selfspec.drafters.chain import ExitChain
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.drafters.exit_reader import make_reader
from selfspec.drafters.suffix_lookup import Lookup
from selfspec.sampling.draft import Draft, Verdict
from selfspec.schedule import make_schedule


class Cascade(Drafter):
    """Asks the cheapest drafter first: a lookup where it is confident, an early exit otherwise.

    A lookup is confident where every row's match has at least `confident` tokens: a round has one
    drafter, and a row that finds nothing would wait for the others.

    Args:
        lookup: the index of each row.
        confident: tokens of the shortest match to be confident of.
        chain: the exit's drafts.
    """

    name = "cascade"
    takes_schedule = True

    def __init__(self, lookup: Lookup, confident: int, chain: ExitChain):
        self.lookup, self.confident = lookup, confident
        self.chain, self.keep = chain, chain.keep
        self._copies = False  # whether the round's drafts are copies

    @classmethod
    def from_config(cls, engine: Engine, config: DraftConfig) -> Cascade:
        """Take the head that the config asks for.

        Raises:
            ValueError: there is no such head, or no lookup could ever be confident.
        """
        lookup = config.lookup
        confident = max(lookup.shortest, lookup.confident)
        if lookup.index == "ngram" and confident > lookup.longest:
            raise ValueError(
                f"lookup.confident={confident} is more than lookup.longest={lookup.longest}, so "
                "that no n-gram would do; raise longest, or take index='suffix', which has no limit"
            )
        head = engine.head(config)
        schedule = make_schedule(config, engine.round_model(head=head))
        chain = ExitChain(make_reader(engine, head), config.most_tokens, schedule)
        return cls(Lookup(lookup), confident, chain)

    def prefilled(self, state: State, block: Pass, offset: int, counts: Sequence[int]) -> None:
        """Index the prompt, and show it to the head."""
        self.lookup.read(state.context)
        self.chain.prefilled(state, block, offset, counts)

    def propose(self, state: State, limit: int) -> Draft:
        """Copy what followed each row's match, or draft token by token."""
        indexes = self.lookup.read(state.context)
        self._copies = min(index.match.length for index in indexes) >= self.confident
        if not self._copies:
            return self.chain.propose(state, limit)
        self.chain.pause()
        return self.lookup.draft(state.context, limit)

    def commit(self, state: State, draft: Draft, verified: Verified, verdict: Verdict) -> None:
        """Show the head what the target made of the drafts, whoever's they were."""
        if draft.length and not self._copies:
            self.chain.commit(state, draft, verified, verdict)
        else:
            self.chain.skipped(state, verified)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with some rows only."""
        self.chain.select(rows)
