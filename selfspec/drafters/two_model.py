"""A chain of drafts from a smaller model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from selfspec.config import DraftConfig
from selfspec.decoder import Decoder, Pass
from selfspec.decoder.cache import SlotCache
from selfspec.drafters.base import Drafter
from selfspec.drafters.chain import draft_chain
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.sampling.draft import Draft, Verdict
from selfspec.schedule import Schedule, make_schedule, uncalibrated

_PIECE = 512  # tokens per pass when the smaller model catches up


class TwoModel(Drafter):
    """Drafts with a smaller model of the same tokenizer (Leviathan et al. 2023).

    Vocabularies may be padded to different sizes. Then tokens that both models have are drafted,
    and of a text, tokens that the smaller one lacks are shown to it as token 0.

    The smaller model has a KV cache of its own. A round begins by running it over each row up to
    the pending token: after a full acceptance the last draft has no KV yet, and after rounds
    without drafts more is missing.

    Args:
        decoder: the smaller model; may be the target itself.
        longest: the most tokens drafted in a round.
        schedule: when to stop earlier.
        vocab_size: tokens of the target.
    """

    name = "two_model"
    takes_schedule = True

    def __init__(self, decoder: Decoder, longest: int, schedule: Schedule, vocab_size: int):
        self.small, self.decoder, self.decoders = Engine(decoder), decoder, (decoder,)
        self.drafting = decoder
        self.longest, self.schedule, self._confidence = longest, schedule, uncalibrated()
        self._vocab_size, self._lacks_tokens = vocab_size, decoder.vocab_size < vocab_size
        self.slots: SlotCache  # made when the prompt is prefilled

    @classmethod
    def from_config(cls, engine: Engine, config: DraftConfig) -> TwoModel:
        """Take the smaller model that the config, the call or the engine names.

        Raises:
            OSError: there is no checkpoint at `draft_model`.
            ValueError: no model is named, or one that cannot draft for the target.
        """
        decoder = engine.draft_models.chosen(config)
        name = decoder.causal_lm.name_or_path
        key = cls.name, name, decoder.depth, *config.approximated
        schedule = make_schedule(config, engine.rounds(*key))
        return cls(decoder, config.most_tokens, schedule, engine.decoder.vocab_size)

    def prefilled(self, state: State, block: Pass, offset: int, counts: Sequence[int]) -> None:
        """Prefill the smaller model with the whole prompt, earlier turns included."""
        if offset == 0:
            self.slots = self.decoder.new_slots(state.rows)
            if self._room(state) > 0:
                self._read_on(replace(state, slots=self.slots))

    def propose(self, state: State, limit: int) -> Draft:
        """Draft token by token; nothing if the sequence outgrows the smaller model."""
        room = self._room(state)
        if room < 1:
            return Draft.empty(state.rows, state.pending.device)
        longest = min(self.longest, limit, room)
        read = partial(self._read, replace(state, slots=self.slots))
        return draft_chain(
            state, longest, self.schedule, self._confidence, read, trimmed=self._lacks_tokens
        )

    def _read(self, state: State, token: Tensor, step: int) -> tuple[Tensor, None]:
        """Logits `[rows, 1, vocab]` after the pending token or the last draft."""
        if step == 0:
            with state.stats.clock("shallow"):
                logits = self._read_on(state)
        else:
            token = self._readable(token.to(self.decoder.device))
            # The pending token is committed here, so the first draft is at offset 0.
            depth, offset = self.decoder.depth, step - 1
            logits = self.small.shallow(state, token, depth, offset, unembed=True).output
        return self._of_target(logits).to(state.pending.device), None

    def _readable(self, tokens: Tensor) -> Tensor:
        """The tokens, with 0 in the place of those that the smaller model lacks."""
        return tokens.masked_fill(tokens >= self.decoder.vocab_size, 0)

    def _of_target(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary, -inf for tokens that the smaller model lacks."""
        shared = logits[..., : self._vocab_size]
        return pad(shared, (0, self._vocab_size - shared.shape[-1]), value=float("-inf"))

    def _read_on(self, state: State) -> Tensor:
        """Run over each row's new tokens; `[rows, 1, vocab]` logits after the last one."""
        texts = [state.context.text[row] for row in state.context.rows]
        new = [text[have:] for text, have in zip(texts, self.slots.lengths, strict=True)]
        counts = [len(tokens) for tokens in new]
        rows = [tokens + [0] * (max(counts) - len(tokens)) for tokens in new]
        block = self._readable(torch.tensor(rows, device=self.decoder.device))
        logits = self.small.prefill(state, block, counts, chunk=_PIECE)
        self.slots.commit(counts)
        return logits

    def _room(self, state: State) -> int:
        """The most drafts that fit into the smaller model's positions."""
        longest = max(len(state.context.text[row]) for row in state.context.rows)
        positions = self.decoder.max_positions
        return self.longest if positions is None else min(self.longest, positions - longest + 1)

    def commit(self, state: State, draft: Draft, verified: Verified, verdict: Verdict) -> None:
        """Commit the accepted drafts; the very last draft has not been run."""
        if draft.length:
            accepted = verdict.kept
            self.slots.commit([min(kept, draft.length - 1) for kept in accepted])
            self.schedule.end(draft.length, accepted)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.slots.select(rows)

    def join(self, other: Any) -> None:
        """Append the rows of another drafter."""
        self.slots.join(other.slots)

    def pause(self) -> None:
        """End the timing of the last round."""
        self.schedule.pause()
