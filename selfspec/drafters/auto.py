"""The way to draft that is fastest here and now, plain decoding among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile

from selfspec.config import DraftConfig
from selfspec.decoder import Pass
from selfspec.drafters.base import Drafter
from selfspec.drafters.copying import CopyingChain, CopyingStop
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.drafters.exit_readers import ExitReader, make_reader
from selfspec.drafters.suffix_lookup import Lookup
from selfspec.drafters.tree_expansion import ExitGrowth, share
from selfspec.heads import ExitHead
from selfspec.sampling.draft import Draft, Verdict
from selfspec.schedule import OptimalStop
from selfspec.schedule.policy import PLAIN, Policy

_CHAIN = 12  # the most drafts of a chain, whose schedule decides

# Drafts at most so many levels.
Propose = Callable[[State, int], Draft]


class Auto(Drafter):
    """Chooses exit, length and strategy online, and falls back to plain decoding.

    The ways are: for the first head of each exit an optimally stopped chain and a tree, no drafts
    at all, and a lookup where the text repeats itself. What is best there says nothing of
    elsewhere, so there are two policies, one for places with a confident match and one for all
    others. Each way is judged by the tokens and seconds of its own rounds; trials of the others
    lose a hundredth of the time, those of ways that were never tried half as much (`policy`). Heads
    not in use follow the text in wide passes, now and then, and say how often they would have
    agreed with it.

    A chain that leads into what the text has said before is copied on (`copying`).

    Args:
        engine: the target and its passes.
        heads: exit heads, the one to begin with first.
        config: what lookups and trees look like.
    """

    name = "auto"
    makes_trees = True

    def __init__(self, engine: Engine, heads: Sequence[ExitHead], config: DraftConfig):
        self.engine = engine
        self.readers = [make_reader(engine, head) for head in heads]
        self.keep = tuple(sorted({layer for reader in self.readers for layer in reader.keep}))
        self._streams = [
            [self.keep.index(layer) for layer in reader.keep] for reader in self.readers
        ]
        self.lookup, self.confident = Lookup(config.lookup), config.lookup.confident
        self.policies: dict[bool, Policy] = {}  # by whether the text repeats itself
        self.ways: dict[str, Propose] = {}
        self._chains: dict[str, CopyingChain] = {}
        self._of: dict[str, ExitReader] = {}
        self._stops: dict[str, OptimalStop] = {}  # of chains, by the names of their heads
        self._levels: dict[str, int] = {}  # the most drafts that a round of theirs can keep
        self._add_ways(config)
        self._used, self._where = "", False
        self._began: float | None = None
        self._gained = 0.0
        self._firsts: float | None = None

    @classmethod
    def from_config(cls, engine: Engine, config: DraftConfig) -> Auto:
        """Every head that was fitted may draft, or the one that the config names."""
        chosen = engine.head(config)
        if config.exit_layer is not None or config.head is not None:
            return cls(engine, [chosen], config)
        firsts = {head.exit_layer: head for head in reversed(engine.heads)}
        others = [head for layer, head in sorted(firsts.items()) if layer != chosen.exit_layer]
        return cls(engine, [chosen, *others], config)

    def _add_ways(self, config: DraftConfig) -> None:
        length, depth = config.num_draft_tokens or _CHAIN, self.engine.decoder.depth
        widths = share(config.tree.nodes, min(config.tree.nodes, config.num_draft_tokens or 4))
        # In the order in which they are tried: first the fitted head, then what costs least.
        for reader in self.readers:
            chain, tree = (f"{shape} {_name(reader)}" for shape in ("chain", "tree"))
            stop = self._stops[_name(reader)] = CopyingStop(
                self.engine.pace(self.name, _name(reader)),
                depth / max(1, depth - reader.head.exit_layer),
            )
            self._chains[chain] = CopyingChain(reader, length, stop, self.lookup)
            self.ways[chain] = partial(self._draft_chain, self._chains[chain])
            self._of[chain], self._levels[chain] = reader, length
            self.ways.setdefault(PLAIN, self._draft_nothing)
            if not self.engine.decoder.counts_keys:
                self.ways[tree] = ExitGrowth(reader, widths).propose
                self._of[tree], self._levels[tree] = reader, len(widths)

    def _draft_nothing(self, state: State, limit: int) -> Draft:
        return Draft.empty(state.rows, state.pending.device)

    def _draft_chain(self, chain: CopyingChain, state: State, limit: int) -> Draft:
        # Where the text repeats itself already, to copy at once is a way of its own.
        return chain.propose(state, limit, copying=not self._where)

    def _look_up(self, state: State, limit: int) -> Draft:
        return self.lookup.draft(state.context, limit)

    def prefilled(self, state: State, block: Pass, offset: int, counts: Sequence[int]) -> None:
        """Index the prompt, and show it to every head."""
        # What is known belongs to a batch of that size, decoded in that way.
        key = (self.name, state.rows, state.sampler.do_sample)
        self.policies = {where: self.engine.policy(*key, where) for where in (False, True)}
        self.lookup.read(state.context)
        for reader, streams in zip(self.readers, self._streams, strict=True):
            reader.shadow = self.policies[False].shadow(_name(reader))
            kept = [block.kept[place] for place in streams]
            reader.prefilled(state, block._replace(kept=kept), offset, counts)
        for where, policy in self.policies.items():
            for name, reader in self._of.items():
                levels = self._levels[name]
                way = policy.way(name, levels)
                way.shadow = self.policies[False].shadow(_name(reader))
                shared = self._levels.get(f"tree {_name(reader)}")
                if shared is not None and not where:
                    way.pair(policy.firsts(_name(reader), shared))

    def propose(self, state: State, limit: int) -> Draft:
        """Draft in the way that the policy of such places chooses."""
        now = self.engine.ranks.clock()
        if self._began is not None:
            seconds = now - self._began
            self.policies[self._where].learn(self._used, self._gained, seconds, self._firsts)
        self._where = self._repeats(state)
        ways = {"lookup": self._look_up, **self.ways} if self._where else self.ways
        if not self.policies[self._where].is_settled:
            self._guess()
        used, self._used = self._used, self.policies[self._where].choose(ways)
        if used in self._chains and used != self._used:
            self._chains[used].pause()
        self._began = now
        return ways[self._used](state, limit)

    def _guess(self) -> None:
        """Tell the policy here what is known elsewhere of ways that were not used here."""
        here, elsewhere = self.policies[self._where], self.policies[not self._where]
        for name in self.ways:
            if here.way(name).pace.known:
                here.way(name).guess = None
                continue
            other = elsewhere.way(name)
            # Drafts are kept more often where the text repeats itself: no guess for other places.
            holds = other.pace.known and (self._where or name == PLAIN)
            here.way(name).guess = other.rate if holds else None
        first = _name(self.readers[0])
        times, chain = self.engine.pace(self.name, first), here.way(f"chain {first}").pace
        if not here.way(PLAIN).known and chain.known and times.fixed_seconds.value:
            # A round of plain decoding takes no longer than one with drafts does without them;
            # what share that is holds for other batches, too.
            share = times.fixed_seconds.value / times.round_seconds.value
            here.way(PLAIN).guess = 1 / (share * chain.round_seconds.value)

    def _repeats(self, state: State) -> bool:
        """Whether the end of every row has occurred in it before."""
        indexes = self.lookup.read(state.context)
        return min(index.match.length for index in indexes) >= self.confident

    def commit(self, state: State, draft: Draft, verified: Verified, verdict: Verdict) -> None:
        """Show every head what the target made of the drafts, whoever's they were."""
        accepted = verdict.kept
        self._gained = 1 + sum(accepted) / len(accepted)
        if verdict.branch is not None:
            verified = verified.along(verdict.branch)
        own = self._of.get(self._used) if draft.levels else None
        chain = self._chains.get(self._used) if draft.levels else None
        drafted = draft.levels if chain is None else chain.drafted
        for reader, streams in zip(self.readers, self._streams, strict=True):
            kept = [verified.kept[place] for place in streams]
            seen = verified._replace(kept=kept)
            reader.verified(state, drafted if reader is own else 0, seen)
        self._firsts = None
        if own is not None and not (state.sampler.do_sample or self._where):
            self._show(own, drafted, draft, verdict)
        if chain is not None:
            chain.end(accepted)

    def _show(self, own: ExitReader, drafted: int, draft: Draft, verdict: Verdict) -> None:
        """What a head's first choices brought in a greedy round, whichever of its ways drafted.

        A chain is made of them, and so is a branch of a tree, but for what was pruned of it: what
        else a tree keeps is what it brings more, on the same text and with the same luck.
        """
        assert own.shadow is not None
        chosen = _first_choices(draft, verdict)
        for count in chosen:
            own.shadow.add(float(count > 0))
        name = _name(own)
        levels, stop = self._levels.get(f"tree {name}"), self._stops[name]
        if levels is None:
            return
        if draft.tree is not None:
            stop.seen(drafted, chosen)
        made = min(drafted, levels)
        further = stop.further(made, levels)  # would have been kept of drafts that were not made
        tokens = [1 + min(count, made) + further * (count >= made) for count in chosen]
        self._firsts = sum(tokens) / len(tokens)
        self.policies[False].firsts(name, levels).add(self._firsts)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with some rows only."""
        for reader in self.readers:
            reader.select(rows)


def _name(reader: ExitReader) -> str:
    return f"{reader.head.kind}@{reader.head.exit_layer}"


def _first_choices(draft: Draft, verdict: Verdict) -> list[int]:
    """Of each row, how many drafts were kept before one that was not its head's first choice."""
    if draft.tree is None or verdict.branch is None:
        return verdict.kept
    ranks = draft.tree.ranks.gather(1, (verdict.branch - 1).clamp_min(0)).tolist()
    kept = zip(ranks, verdict.kept, strict=True)
    return [len(list(takewhile(lambda rank: rank == 0, row[:count]))) for row, count in kept]
