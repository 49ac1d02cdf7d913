"""Drafting a chain token by token: the loop of all chain drafters, and those with an exit head."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from selfspec.config import DraftConfig
from selfspec.decoder import Pass
from selfspec.drafters.base import Drafter
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.drafters.readers import ExitReader, make_reader
from selfspec.heads import Confidence
from selfspec.sampling.draft import Draft, Verdict
from selfspec.sampling.vocabulary import DraftVocabulary
from selfspec.schedule import Schedule, make_schedule

# Maps the next token `[rows, 1]` of each row and its index in the draft to logits
# `[rows, 1, n]` and the hidden states `[rows, 1, hidden]` that verification may resume from.
Read = Callable[[Tensor, int], tuple[Tensor, Tensor | None]]


def draft_chain(
    state: State,
    limit: int,
    schedule: Schedule,
    confidence: Confidence,
    read: Read,
    drafted: DraftVocabulary,
    depth: int = 0,
) -> Draft:
    """Draft after each row's pending token until the schedule stops.

    Args:
        state: the call.
        limit: the most tokens to draft.
        schedule: when to stop earlier.
        confidence: the chance that a draft is accepted, for schedules that use it.
        read: runs the drafting model on one more token.
        drafted: the tokens that the logits of `read` belong to.
        depth: layers below the hidden states that `read` returns; 0 if there are none.
    """
    sampler, context, seconds = state.sampler, state.context, state.stats.seconds
    schedule.begin(confidence, state.rows, sampler.do_sample)
    scored = sampler.scored(drafted)
    token = state.pending
    tokens: list[Tensor] = []
    probs: list[Tensor] = []
    hidden: list[Tensor] = []
    for step in range(limit):
        logits, at_exit = read(token, step)
        began = time.perf_counter()
        if sampler.reads_ids:
            logits = drafted.spread(logits, -torch.inf)
        scores = sampler.drawable(sampler.scores(logits, context, offset=step))
        drawn, drawn_from = sampler.draw(scores, context, step, scored)
        token = scored.tokens(drawn)
        seconds["sampling"] += time.perf_counter() - began
        if sampler.reads_prefix:
            context.write(token, offset=step)
        tokens.append(token)
        if at_exit is not None:
            hidden.append(at_exit)
        if drawn_from is not None:
            probs.append(drawn_from)
        if not schedule.goes_on(scores, drawn, drawn_from):
            break
    began = time.perf_counter()
    q = scored.spread(torch.cat(probs, dim=1), 0.0) if probs else None  # as large as logits
    seconds["sampling"] += time.perf_counter() - began
    return Draft(
        tokens=torch.cat(tokens, dim=1),
        probs=q,
        depth=depth,
        hidden=torch.cat(hidden, dim=1) if depth else None,
    )


class ExitDrafter(Drafter):
    """Drafts chains with an exit head; the base of the strategies that do.

    Args:
        reader: the exit head.
        longest: the most tokens drafted in a round.
        schedule: when to stop earlier.
    """

    def __init__(self, reader: ExitReader, longest: int, schedule: Schedule):
        self.reader, self.schedule = reader, schedule
        self.longest = min(longest, reader.head.longest or longest)
        self.keep, self.drafting = reader.keep, reader.decoder

    def prefilled(self, state: State, block: Pass, offset: int, counts: Sequence[int]) -> None:
        """Show the prompt to the head."""
        self.reader.prefilled(state, block, offset, counts)

    def propose(self, state: State, limit: int) -> Draft:
        """Draft token by token."""
        longest = min(self.longest, limit)
        self.reader.begin(longest)
        return draft_chain(
            state,
            longest,
            self.schedule,
            self.reader.confidence,
            partial(self.reader.read, state),
            self.reader.vocabulary,
            self.reader.depth,
        )

    def commit(self, state: State, draft: Draft, verified: Verified, verdict: Verdict) -> None:
        """Show the head and the schedule what was accepted."""
        self.reader.verified(state, draft.length, verified)
        if draft.length:
            self.schedule.end(draft.length, verdict.accepted_counts)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.reader.select(rows)

    def join(self, other: Any) -> None:
        """Append the rows of another drafter."""
        self.reader.join(other.reader)

    def pause(self) -> None:
        """End the timing of the last round."""
        self.schedule.pause()


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
        schedule = make_schedule(config, engine.rounds(config, head=head))
        return cls(make_reader(engine, head), config.most_tokens, schedule)
