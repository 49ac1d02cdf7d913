"""The fastest way of each round: plain decoding, a lookup, or a chain that ends itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from selfspec.config import DraftConfig
from selfspec.decoder import Pass
from selfspec.drafters.chain import ExitDrafter
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.drafters.readers import make_reader
from selfspec.drafters.readers.by_row import pick
from selfspec.drafters.suffix_lookup import Lookup
from selfspec.heads import ExitHead
from selfspec.sampling.draft import Draft, Verdict
from selfspec.schedule import OptimalStop

_TRIED = 32  # last tokens of the prompt at which an unfitted exit is compared with the last layer


class Auto(ExitDrafter):
    """Chooses plain decoding, a chain of drafts or a lookup, round by round, by measured speed.

    `Rounds` keeps moving averages of what each way brings: of copies by the length of the match, of
    chains, of plain steps. The best way is taken, and the others are tried again now and then. A
    chain ends where another draft is not worth its time (`OptimalStop`).

    An exit without a fitted head is compared with the last layer at the end of the prompt, and
    drafts only if it is expected to be faster.

    Trees are not among the ways: where verification is expensive, as on a CPU, chains are faster;
    where it is nearly free, ask for `tree`.

    Args:
        engine: the target and its passes.
        head: the exit head.
        config: how to look up, and the most drafts of a round.
    """

    name = "auto"

    def __init__(self, engine: Engine, head: ExitHead, config: DraftConfig):
        self.rounds = engine.rounds(*config.approximated, head=head)
        reader, longest = make_reader(engine, head), config.most_tokens
        stop = OptimalStop(self.rounds)
        super().__init__(reader, longest, stop)
        self.timer = stop.timer
        self.lookup, self._shortest = Lookup.of(engine, config.lookup), config.lookup.shortest
        self.batch = self.rounds.batch(1, sampled=False)
        # The states of a whole model, which drafts by approximate passes, tell nothing of these.
        self._tries = head.is_plain and head.exit_layer < engine.decoder.depth
        self.way, self._drafts = self.batch.plain, not self._tries
        if self._tries:
            self.keep = (head.exit_layer,)

    @classmethod
    def from_config(cls, engine: Engine, config: DraftConfig) -> Auto:
        """Take the head that the config names, or else the one that is expected to be fastest.

        The head is chosen for a whole call: another one would lack KV for the tokens so far.
        """
        head = engine.head(config)
        if config.exit_layer is None and config.head is None:
            others = [other for other in engine.heads if other is not head]
            head = max(
                [head, *others],
                key=lambda head: engine.rounds(*config.approximated, head=head).speedup(),
            )
        return cls(engine, head, config)

    def prefilled(self, state: State, block: Pass, offset: int, counts: Sequence[int]) -> None:
        """Index the prompt, and show it to the head."""
        self.lookup.read(state.context)
        if self._tries:
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
        there = torch.tensor(indices, device=block.output.device).clamp(min=0)
        head, decoder, sampled = self.reader.head, self.reader.decoder, state.sampler.do_sample
        drafts = head.logits(decoder, pick(block.kept[0], there)).float()
        targets = decoder.unembed(pick(block.output, there)).float()
        if sampled:
            chances = torch.minimum(drafts.softmax(-1), targets.softmax(-1)).sum(-1)
        else:
            chances = (drafts.argmax(-1) == targets.argmax(-1)).float()
        for row, agreed in zip(indices, chances.tolist(), strict=True):
            for index, chance in zip(row, agreed, strict=True):
                if 0 <= index < width:
                    self.rounds.acceptance[sampled].learn(0, chance)
        self._drafts = self.rounds.batch(state.rows, sampled).speedup > 1

    def propose(self, state: State, limit: int) -> Draft:
        """Draft in the way that brings the most tokens per second."""
        self.timer.begin()
        self.batch = self.rounds.batch(state.rows, state.sampler.do_sample)
        match = min(index.match.length for index in self.lookup.read(state.context))
        ways = [self.batch.plain]
        if self._drafts:
            ways.insert(0, self.batch.chain)
        if match >= self._shortest:
            ways.append(self.batch.copying(match))
        self.way = self.batch.choose(ways)
        if self.way is self.batch.chain:
            return super().propose(state, limit)
        if self.way is self.batch.plain:
            return Draft.empty(state.rows, state.pending.device)
        return self.lookup.draft(state.context, limit)

    def commit(self, state: State, draft: Draft, verified: Verified, verdict: Verdict) -> None:
        """Learn from the round, and show the head what was accepted."""
        if self.way is self.batch.chain and draft.length:
            super().commit(state, draft, verified, verdict)
            return
        self.reader.verified(state, 0, verified)
        drafted = verified.logits.shape[1] - 1
        if drafted == draft.length:  # otherwise a grammar's tokens were verified
            self.timer.end(self.way, drafted, verdict.accepted_counts)

    def join(self, other: Any) -> None:
        """Append the rows of another drafter."""
        super().join(other)
        self.lookup.join(other.lookup)
