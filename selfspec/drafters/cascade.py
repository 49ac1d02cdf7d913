"""Lookup where the sequence repeats itself, early-exit drafts elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from typing_extensions import Self

from selfspec.config import DraftConfig
from selfspec.decoder import Pass
from selfspec.drafters.chain import ExitDrafter
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.drafters.readers import ExitReader, make_reader
from selfspec.drafters.suffix_lookup import Lookup
from selfspec.sampling.draft import Draft, Verdict
from selfspec.schedule import Schedule, make_schedule


class Cascade(ExitDrafter):
    """Looks up drafts where a match is long enough, and drafts with an exit head elsewhere.

    A lookup needs a match of at least `confident` tokens in every row, because a round has one
    drafter, and a row that finds nothing would wait for the others.

    Args:
        reader: the exit head.
        longest: the most tokens that the head drafts in a round.
        schedule: when the head stops earlier.
        lookup: the index of each row.
        confident: tokens of the shortest match that is used.
    """

    name = "cascade"
    takes_schedule = True

    def __init__(
        self,
        reader: ExitReader,
        longest: int,
        schedule: Schedule,
        lookup: Lookup,
        confident: int,
    ):
        super().__init__(reader, longest, schedule)
        self.lookup, self.confident = lookup, confident

    @classmethod
    def from_config(cls, engine: Engine, config: DraftConfig) -> Cascade:
        """Take the head that the config names.

        Raises:
            ValueError: there is no such head, or no match can be long enough.
        """
        lookup = config.lookup
        confident = max(lookup.shortest, lookup.confident)
        if lookup.index == "ngram" and confident > lookup.longest:
            raise ValueError(
                f"lookup.confident={confident} is more than lookup.longest={lookup.longest}, so "
                "that no n-gram would do; raise longest, or take index='suffix', which has no limit"
            )
        head = engine.head(config)
        schedule = make_schedule(config, engine.rounds(config, head=head))
        reader = make_reader(engine, head)
        return cls(reader, config.most_tokens, schedule, Lookup.of(engine, lookup), confident)

    def prefilled(self, state: State, block: Pass, offset: int, counts: Sequence[int]) -> None:
        """Index the prompt, and show it to the head."""
        self.lookup.read(state.context)
        super().prefilled(state, block, offset, counts)

    def propose(self, state: State, limit: int) -> Draft:
        """Draft in the way that is chosen for the round."""
        match = min(index.match.length for index in self.lookup.read(state.context))
        return self.choose(state, match)(state, limit)

    def choose(self, state: State, match: int) -> Callable[[State, int], Draft]:
        """How to draft if every row has a match of at least that length."""
        return self.copy if match >= self.confident else self.chain

    def copy(self, state: State, limit: int) -> Draft:
        """Copy what followed each row's match."""
        self.schedule.pause()
        return self.lookup.draft(state.context, limit)

    def chain(self, state: State, limit: int) -> Draft:
        """Draft token by token."""
        return super().propose(state, limit)

    def commit(self, state: State, draft: Draft, verified: Verified, verdict: Verdict) -> None:
        """Show the head what was accepted, also of looked-up drafts."""
        if draft.counts is not None:  # copies
            self.reader.verified(state, 0, verified)
        else:
            super().commit(state, draft, verified, verdict)

    def join(self, other: Self) -> None:
        """Append the rows of another drafter."""
        super().join(other)
        self.lookup.join(other.lookup)
