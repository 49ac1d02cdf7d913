"""The fastest way of each round: plain decoding, a lookup, or a chain that ends itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from selfspec.config import DraftConfig
from selfspec.decoder import Pass
from selfspec.drafters.cascade import Cascade
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.drafters.readers import ExitReader, make_reader
from selfspec.drafters.readers.verified import pick
from selfspec.drafters.suffix_lookup import Lookup
from selfspec.heads import ExitHead
from selfspec.sampling.draft import Draft, Verdict
from selfspec.schedule import MEMORY, OptimalStop, Way


class Auto(Cascade):
    """A cascade that may also decode plainly, and chooses round by round by measured speed.

    The way that is expected to gain most is taken (`Batch.choose`). A chain ends where another
    draft is not worth its time (`OptimalStop`), and so does what is looked up.

    An exit without a fitted head is compared with the last layer at the end of the prompt, and
    drafts only if it is expected to be faster.

    Trees are not among the ways: where verification is expensive, as on a CPU, chains are faster;
    where it is nearly free, ask for `tree`.
    """

    name = "auto"
    takes_schedule = False

    def __init__(
        self, reader: ExitReader, longest: int, stop: OptimalStop, lookup: Lookup, shortest: int
    ):
        super().__init__(reader, longest, stop, lookup, shortest)
        self.stop = stop
        self._way: Way | None = None  # of this round, unless it is a chain
        # The states of a whole model, which drafts by approximate passes, tell nothing of these.
        self._tries = reader.head.is_plain and reader.head.exit_layer < reader.decoder.depth
        self._drafts = not self._tries
        if self._tries:
            self.keep = (reader.head.exit_layer,)

    @classmethod
    def from_config(cls, engine: Engine, config: DraftConfig) -> Auto:
        """Take the head that the config names, or else the one that is expected to be fastest.

        The head is chosen for a whole call: another one would lack KV for the tokens so far.
        """

        def speedup(head: ExitHead) -> float:
            rounds = engine.rounds(config, head=head)
            return sum(rounds.speedup(1, sampled) for sampled in (False, True))

        head = engine.head(config)
        if config.exit_layer is None and config.head is None:
            head = max([head, *(other for other in engine.heads if other is not head)], key=speedup)
        stop = OptimalStop(engine.rounds(config, head=head))
        reader, lookup = make_reader(engine, head), Lookup.of(engine, config.lookup)
        return cls(reader, config.most_tokens, stop, lookup, config.lookup.shortest)

    def prefilled(self, state: State, block: Pass, offset: int, counts: Sequence[int]) -> None:
        """Index the prompt, and show it to the head."""
        if self._tries:
            self._try_exit(state, block, [count - offset for count in counts])
        super().prefilled(state, block, offset, counts)

    def _try_exit(self, state: State, block: Pass, ends: Sequence[int]) -> None:
        """Learn how often the exit agrees with the last layer at the last tokens of the prompt.

        `ends` are the indices in the block of the rows' ends.
        """
        last, sampled = max(1, MEMORY // len(ends)), state.sampler.do_sample
        there = torch.tensor(ends, device="cpu")[:, None] - 1 - torch.arange(last, device="cpu")
        head, decoder = self.reader.head, self.reader.decoder
        known = [pick(states, there.clamp(min=0)) for states in (block.kept[0], block.output)]
        drafts = head.logits(decoder, known[0]).float()
        targets = decoder.unembed(known[1]).float()
        if sampled:
            chances = torch.minimum(drafts.softmax(-1), targets.softmax(-1)).sum(-1)
        else:
            chances = (drafts.argmax(-1) == targets.argmax(-1)).float()
        inside = (there >= 0) & (there < block.output.shape[1])
        for chance in chances.cpu()[inside].tolist():
            self.stop.rounds.acceptance[sampled].learn(0, chance)
        self._drafts = self.stop.rounds.speedup(state.rows, sampled) > 1

    def choose(self, state: State, match: int) -> Callable[[State, int], Draft]:
        """The way that brings the most tokens per second."""
        self.stop.pause()
        batch = self.stop.rounds.batch(state.rows, state.sampler.do_sample)
        ways = [batch.plain, batch.chain] if self._drafts else [batch.plain]
        if match >= self.confident:
            ways.append(batch.copying(match))
        way = batch.choose(ways)
        if way is batch.chain:
            return self.chain
        self._way = way
        if way is batch.plain:
            return self.step
        most = way.outlook(batch.rate).drafts
        return lambda state, limit: self.copy(state, min(limit, most))

    def step(self, state: State, limit: int) -> Draft:
        """Draft nothing."""
        return Draft.empty(state.rows, state.pending.device)

    def commit(self, state: State, draft: Draft, verified: Verified, verdict: Verdict) -> None:
        """Learn from the round, and show the head what was accepted."""
        super().commit(state, draft, verified, verdict)
        if self._way is not None:  # `None`: a chain, a grammar's tokens, or no room for drafts
            drafted = [draft.length] * state.rows if draft.counts is None else draft.counts.tolist()
            self.stop.verified(self._way, drafted, verdict.accepted_counts)
        self._way = None
