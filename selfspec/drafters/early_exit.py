"""A chain of drafts from an exit head behind the first layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.config import DraftConfig
from selfspec.decoder import Pass
from selfspec.draft import Draft, Verdict
from selfspec.drafters.base import Drafter, drawable
from selfspec.engine import Engine, State, Verified
from selfspec.reading import ExitReader, make_reader
from selfspec.schedule import Schedule, make_schedule


class EarlyExit(Drafter):
    """Self-speculation through an early exit (LayerSkip, Elhoushi et al. 2024).

    k drafts cost k shallow passes; verification resumes from the hidden states they left.

    Args:
        reader: the exit head and the passes behind it.
        num_draft_tokens: the most tokens drafted in a round.
        schedule: when to stop earlier.
    """

    name = "early_exit"

    def __init__(self, reader: ExitReader, num_draft_tokens: int, schedule: Schedule):
        self.reader = reader
        self.keep = reader.keep
        self.num_draft_tokens = num_draft_tokens
        self.schedule = schedule

    @classmethod
    def from_config(cls, engine: Engine, config: DraftConfig) -> EarlyExit:
        """Take the head that the config asks for."""
        reader = make_reader(engine, engine.head(config))
        return cls(reader, config.most_tokens, make_schedule(config))

    def prefilled(self, state: State, block: Pass, offset: int, counts: Sequence[int]) -> None:
        """Show the head the prompt."""
        self.reader.prefilled(state, block, offset, counts)

    def propose(self, state: State, limit: int) -> Draft:
        """Draft token by token."""
        token = state.pending
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        hidden: list[Tensor] = []
        for step in range(min(self.num_draft_tokens, limit)):
            logits, at_exit = self.reader.read(state, token, step)
            scores = state.sampler.scores(logits, state.context, offset=step)[:, 0]
            if self.reader.head.vocab_ids is not None:
                scores = drawable(scores)
            drawn, drawn_from = state.sampler.draw(scores)
            token = drawn[:, None]
            if state.sampler.reads_prefix:
                state.context.write(token, offset=step)
            tokens.append(token)
            hidden.append(at_exit)
            if drawn_from is not None:
                probs.append(drawn_from)
            if not self.schedule.goes_on(scores, drawn):
                break
        return Draft(
            tokens=torch.cat(tokens, dim=1),
            probs=torch.stack(probs, dim=1) if probs else None,
            depth=self.reader.head.exit_layer,
            hidden=torch.cat(hidden, dim=1),
        )

    def commit(self, state: State, draft: Draft, verified: Verified, verdict: Verdict) -> None:
        """Show the head what the target made of the drafts."""
        self.reader.verified(state, draft.length, verified)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with some rows only."""
        self.reader.select(rows)
