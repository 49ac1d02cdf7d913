"""A chain of drafts from an exit head after the first layers."""

from __future__ import annotations

from selfspec.config import DraftConfig
from selfspec.drafters.chain import ExitDrafter
from selfspec.drafters.engine import Engine
from selfspec.drafters.readers import make_reader
from selfspec.schedule import make_schedule


class EarlyExit(ExitDrafter):
    """Self-speculation through an early exit (LayerSkip, Elhoushi et al. 2024).

    k drafts cost k shallow passes; verification resumes from their hidden states.
    """

    name = "early_exit"
    takes_schedule = True

    @classmethod
    def from_config(cls, engine: Engine, config: DraftConfig) -> EarlyExit:
        """Take the head that the config names."""
        head = engine.head(config)
        schedule = make_schedule(config, engine.rounds(*config.approximated, head=head))
        return cls(make_reader(engine, head), config.most_tokens, schedule)
