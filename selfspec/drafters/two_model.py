"""A chain of drafts from a smaller model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from typing_extensions import Self

from selfspec.config import DraftConfig
from selfspec.decoder import Pass
from selfspec.decoder.cache import SlotCache
from selfspec.drafters.base import Drafter
from selfspec.drafters.chain import draft_chain
from selfspec.drafters.draft_models import DraftModel
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.sampling.draft import Draft, Verdict
from selfspec.schedule import Schedule, make_schedule, uncalibrated

_CHUNK = 512  # tokens per pass when the smaller model catches up


class TwoModel(Drafter):
    """Drafts with a smaller model (Leviathan et al. 2023).

    Its tokenizer may be another one. Then tokens that both vocabularies have are drafted, and the
    smaller model reads the text in its own tokens (`SharedTokens`).

    The smaller model has a KV cache of its own. A round begins by running it over each row up to
    the pending token: after a full acceptance the last draft has no KV yet, and after rounds
    without drafts more is missing.

    Args:
        model: the smaller model; may be the target itself.
        longest: the most tokens drafted in a round.
        schedule: when to stop earlier.
    """

    name = "two_model"
    takes_exit = False
    takes_schedule = True

    def __init__(self, model: DraftModel, longest: int, schedule: Schedule):
        decoder, self.tokens = model
        self.small, self.decoder, self.decoders = Engine(decoder), decoder, (decoder,)
        self.drafting = decoder
        self.longest, self.schedule, self._confidence = longest, schedule, uncalibrated()
        # Made when the prompt is prefilled. Of each row: the target's tokens that were encoded for
        # the smaller model, and those ids that it has not run over yet.
        self.slots: SlotCache
        self._encoded: list[int] = []
        self._unread: list[list[int]] = []

    @classmethod
    def from_config(cls, engine: Engine, config: DraftConfig) -> TwoModel:
        """Take the smaller model that the config, the call or the engine names.

        Raises:
            OSError: there is no checkpoint at `draft_model`.
            ValueError: no model is named, or one that cannot draft for the target.
        """
        model = engine.draft_models.chosen(config)
        name, depth = model.decoder.causal_lm.name_or_path, model.decoder.depth
        rounds = engine.rounds(config, cls.name, name, depth)
        return cls(model, config.most_tokens, make_schedule(config, rounds))

    def prefilled(self, state: State, block: Pass, offset: int, counts: Sequence[int]) -> None:
        """Prefill the smaller model with the whole prompt, earlier turns included."""
        if offset == 0:
            self.slots = self.decoder.new_slots(state.rows)
            self._encoded, self._unread = [0] * state.rows, [[] for _ in range(state.rows)]
            self._encode(state)
            if self._room() > 0:
                self._read_on(replace(state, slots=self.slots))

    def propose(self, state: State, limit: int) -> Draft:
        """Draft token by token; nothing if the sequence outgrows the smaller model."""
        self._encode(state)
        room = self._room()
        if room < 1:
            return Draft.empty(state.rows, state.pending.device)
        longest = min(self.longest, limit, room)
        read = partial(self._read, replace(state, slots=self.slots))
        drafted = self.tokens.vocabulary
        return draft_chain(state, longest, self.schedule, self._confidence, read, drafted)

    def _read(self, state: State, token: Tensor, step: int) -> tuple[Tensor, None]:
        """Logits `[rows, 1, n]` after the pending token or the last draft."""
        if step == 0:
            with state.stats.clock("shallow"):
                logits = self._read_on(state)
        else:
            token = self.tokens.drafted(token.to(self.decoder.device))
            # The pending token is committed here, so the first draft is at offset 0.
            depth, offset = self.decoder.depth, step - 1
            logits = self.small.shallow(state, token, depth, offset, unembed=True).output
        return self.tokens.logits(logits).to(state.pending.device), None

    def _read_on(self, state: State) -> Tensor:
        """Run over each row's new tokens; `[rows, 1, vocab]` logits after the last one."""
        counts = [len(tokens) for tokens in self._unread]
        rows = [tokens + [0] * (max(counts) - len(tokens)) for tokens in self._unread]
        block = torch.tensor(rows, device=self.decoder.device)
        logits = self.small.prefill(state, block, counts, chunk=_CHUNK)
        self.slots.commit(counts)
        self._unread = [[] for _ in counts]
        return logits

    def _encode(self, state: State) -> None:
        """Encode each row's new tokens for the smaller model."""
        for index, row in enumerate(state.context.rows):
            text, known = state.context.text[row], self._encoded[index]
            self._unread[index] += self.tokens.encode(text[known:], text[:known])
            self._encoded[index] = len(text)

    def _room(self) -> int:
        """The most drafts that fit into the smaller model's positions, once it has read all."""
        longest = max(
            have + len(new) for have, new in zip(self.slots.lengths, self._unread, strict=True)
        )
        positions = self.decoder.max_positions
        return self.longest if positions is None else min(self.longest, positions - longest + 1)

    def commit(self, state: State, draft: Draft, verified: Verified, verdict: Verdict) -> None:
        """Commit the accepted drafts; the very last draft has not been run."""
        if draft.length:
            accepted = verdict.accepted_counts
            run = [min(kept, draft.length - 1) for kept in accepted]
            self.slots.commit(run)
            self._encoded = [one + more for one, more in zip(self._encoded, run, strict=True)]
            self.schedule.end(draft.length, accepted)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.slots.select(rows)
        self._encoded = [self._encoded[row] for row in rows]
        self._unread = [self._unread[row] for row in rows]

    def join(self, other: Self) -> None:
        """Append the rows of another drafter."""
        self.slots.join(other.slots)
        self._encoded, self._unread = self._encoded + other._encoded, self._unread + other._unread

    def pause(self) -> None:
        """End the timing of the last round."""
        self.schedule.pause()
