"""The strategy that is expected to be fastest in each round, plain decoding among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from selfspec.config import DraftConfig
from selfspec.decoder import Pass
from selfspec.drafters.chain import ExitDrafter
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.drafters.exit_reader import make_reader, pick
from selfspec.drafters.suffix_lookup import MOST, Lookup
from selfspec.heads import ExitHead
from selfspec.sampling.draft import Draft, Verdict
from selfspec.schedule import OptimalStop, Work

_TRIED = 32  # last tokens of the prompt at which an unfitted exit is compared with the last layer


class Auto(ExitDrafter):
    """Chooses plain decoding, a chain of drafts or a lookup, round by round, by expected speed.

    A model of a round (`RoundModel`) predicts tokens and seconds of each. It starts from priors,
    the head's calibrator and its share of the layers, and learns from every round. Uncertain times
    are taken optimistically, so that every candidate is tried. A chain ends where another draft is
    not worth its time (`OptimalStop`).

    With `times="assumed"` no time is measured: costs are shares of the weights, and acceptance is
    counted in this call only. An exit without a fitted head is then compared with the
    last layer at the end of the prompt, and drafts only if it agrees often enough.

    Trees are not among the candidates: where verification is expensive, as on a CPU, chains are
    faster; where it is nearly free, ask for `tree`.

    Args:
        engine: the target and its passes.
        head: the exit head.
        config: how to look up, and the most drafts of a round.
    """

    name = "auto"

    def __init__(self, engine: Engine, head: ExitHead, config: DraftConfig):
        self.model = engine.round_model(head=head, times=config.times)
        stop = OptimalStop(self.model, config.most_tokens)
        super().__init__(make_reader(engine, head), config.most_tokens, stop)
        self.timer = stop.timer
        self.lookup, self._shortest = Lookup(config.lookup), config.lookup.shortest
        self.work = Work()
        self._tried = head.is_plain and not self.model.measured
        if self._tried:
            self.keep = (head.exit_layer,)

    @classmethod
    def from_config(cls, engine: Engine, config: DraftConfig) -> Auto:
        """Take the head that the config names, or else the one that is expected to be fastest.

        The head is chosen for a whole call: another one would lack KV for the tokens so far.
        """
        head = engine.head(config)
        if config.exit_layer is None and config.head is None:
            longest = config.most_tokens
            others = [other for other in engine.heads if other is not head]
            head = max(
                [head, *others],
                key=lambda head: engine.round_model(head=head, times=config.times).speedup(longest),
            )
        return cls(engine, head, config)

    def prefilled(self, state: State, block: Pass, offset: int, counts: Sequence[int]) -> None:
        """Index the prompt, and show it to the head."""
        self.lookup.read(state.context)
        if self._tried:
            self._try_exit(state, block, [count - offset for count in counts])
        super().prefilled(state, block, offset, counts)

    def _try_exit(self, state: State, block: Pass, ends: Sequence[int]) -> None:
        """Learn how often the exit agrees with the last layer at the last tokens of the prompt.

        Args:
            state: the call.
            block: a block of the prefill.
            ends: index in the block of each row's end.
        """
        last, width = max(1, _TRIED // len(ends)), block.output.shape[1]
        indices = [[end - 1 - back for back in range(last)] for end in ends]
        places = torch.tensor(indices, device=block.output.device).clamp(min=0)
        head, decoder, sampled = self.reader.head, self.reader.decoder, state.sampler.do_sample
        drafts = head.logits(decoder, pick(block.kept[0], places)).float()
        targets = decoder.unembed(pick(block.output, places)).float()
        if sampled:
            chances = torch.minimum(drafts.softmax(-1), targets.softmax(-1)).sum(-1)
        else:
            chances = (drafts.argmax(-1) == targets.argmax(-1)).float()
        for row, agreed in zip(indices, chances.tolist(), strict=True):
            for place, chance in zip(row, agreed, strict=True):
                if 0 <= place < width:
                    self.model.drafts[sampled].learn(0, chance)

    def propose(self, state: State, limit: int) -> Draft:
        """Draft with the strategy that is expected to be fastest in this round."""
        self.timer.begin()
        self.work = self._choose(state, limit)
        if self.work.drafts:
            return super().propose(state, limit)
        if self.work.copies:
            return self.lookup.draft(state.context, self.work.copies)
        return Draft.empty(state.rows, state.pending.device)

    def _choose(self, state: State, limit: int) -> Work:
        sampled = state.sampler.do_sample
        self.model.learn_copies(sampled, self.lookup.predicted(state.context))
        lengths = [index.match.length for index in self.lookup.read(state.context)]
        matches = [length if length >= self._shortest else 0 for length in lengths]
        longest = min(limit, self.longest)
        choices = [
            self.model.best_chain(state.rows, sampled, longest, hopeful=True),
            self.model.best_lookup(sampled, matches, min(limit, MOST)),
            self.model.plain(state.rows),
        ]
        return max(choices, key=lambda choice: choice.rate).work

    def commit(self, state: State, draft: Draft, verified: Verified, verdict: Verdict) -> None:
        """Learn from the round, and show the head what was accepted."""
        if self.work.drafts and draft.length:
            super().commit(state, draft, verified, verdict)
            return
        self.reader.verified(state, 0, verified)
        # The drafts of a round that this drafter did not propose cost as much as copies.
        self.timer.end(state.rows, Work(copies=verified.logits.shape[1] - 1))
        self.model.drafts[state.sampler.do_sample].fade()  # so that drafts are tried again

    def join(self, other: Any) -> None:
        """Append the rows of another drafter."""
        super().join(other)
        self.lookup.join(other.lookup)
