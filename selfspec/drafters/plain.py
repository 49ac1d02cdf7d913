"""No drafts: plain decoding through the same loop."""

from __future__ import annotations

from selfspec.config import DraftConfig
from selfspec.drafters.base import Drafter
from selfspec.drafters.engine import Engine, State
from selfspec.sampling.draft import Draft


class Plain(Drafter):
    """Proposes nothing, so that every round is one step of the target."""

    name = "none"
    drafts = False

    @classmethod
    def from_config(cls, engine: Engine, config: DraftConfig) -> Plain:
        """Nothing to configure."""
        return cls()

    def propose(self, state: State, limit: int) -> Draft:
        """An empty draft."""
        return Draft.empty(state.rows, state.pending.device)
