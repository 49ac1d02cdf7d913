"""Drafts the tokens that followed an earlier occurrence of the sequence's end."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import Self

from selfspec.config import DraftConfig
from selfspec.decoder import Pass
from selfspec.drafters.base import Drafter
from selfspec.drafters.engine import Engine, State
from selfspec.drafters.suffix_lookup import Lookup
from selfspec.sampling.draft import Draft


class PromptLookup(Drafter):
    """Proposes what followed an earlier occurrence of the last tokens, in prompt or output.

    Prompt lookup decoding (Saxena 2023); with the suffix index, the online part of SAM decoding
    (Hu et al. 2024).

    Args:
        lookup: the index of each row.
    """

    name = "prompt_lookup"
    takes_exit = False

    def __init__(self, lookup: Lookup):
        self.lookup = lookup

    @classmethod
    def from_config(cls, engine: Engine, config: DraftConfig) -> PromptLookup:
        """Needs nothing of the model itself."""
        return cls(Lookup.of(engine, config.lookup, config.num_draft_tokens))

    def prefilled(self, state: State, block: Pass, offset: int, counts: Sequence[int]) -> None:
        """Index the prompt while the device may still run the prefill."""
        self.lookup.read(state.context)

    def propose(self, state: State, limit: int) -> Draft:
        """Copy what followed each row's match; rows without one draft nothing."""
        return self.lookup.draft(state.context, limit)

    def join(self, other: Self) -> None:
        """Append the rows of another drafter."""
        self.lookup.join(other.lookup)
