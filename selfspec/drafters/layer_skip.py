"""Drafts with sublayers skipped: a fixed set, or one found while generating (CLaSp)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.config import DraftConfig, SkipConfig
from selfspec.decoder import Decoder, Skips, Span
from selfspec.decoder.cache import SlotCache
from selfspec.drafters.base import Drafter
from selfspec.drafters.chain import draft_chain
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.sampling.draft import Draft, Tree, Verdict
from selfspec.schedule import Schedule, make_schedule, plain_judge


class FixedSkips:
    """The same sublayers all the time.

    Args:
        skips: the sublayers.

    Attributes:
        skips: the sublayers to skip from now on.
        keep: residual streams that the next verification has to keep, by the layers below.
    """

    def __init__(self, skips: Skips):
        self.skips = skips
        self.keep: tuple[int, ...] = ()

    def begin(self, state: State) -> None:
        """A round begins."""

    def verified(self, verified: Verified, verdict: Verdict) -> None:
        """See what the verification kept."""

    def select(self, rows: Sequence[int]) -> None:
        """Go on with some rows only."""


class ClaspSkips(FixedSkips):
    """Whole layers, chosen anew every so many tokens (CLaSp, Chen et al. 2025).

    A verification that keeps all residual streams resumes from nothing; the round after it begins
    with a search over the streams of each row's last committed token. All rows skip the same
    layers. Before the first search, layers are skipped evenly.

    Args:
        decoder: the target.
        count: layers to skip; `None` takes half.
        every: tokens from one search to the next.

    Raises:
        ValueError: the target has not that many layers to spare, or its attention cannot compare
            states at one position.
    """

    def __init__(self, decoder: Decoder, count: int | None, every: int):
        depth = decoder.depth
        self.decoder, self.every = decoder, every
        self.count = max(1, depth // 2) if count is None else count
        if self.count >= depth:
            raise ValueError(
                f"skip.layers must be below the model's {depth} layers, got {self.count}; "
                "at least one has to draft"
            )
        if decoder.counts_keys:
            raise ValueError(
                f"{type(decoder.causal_lm).__name__} biases attention by the number of a key, so "
                "skip.search='clasp' cannot compare states at one position; name the sublayers to "
                "skip in skip.attention and skip.mlp"
            )
        super().__init__(_whole(middle_layers(depth, self.count)))
        self._states: list[Tensor] = []
        self._due = 0  # tokens of the longest row at the next search

    def begin(self, state: State) -> None:
        """Search, if there is something to search in."""
        length = max(state.slots.lengths)
        if self._states:
            with state.stats.clock("shallow"):
                layers = similar_layers(self.decoder, state.slots, self._states, self.count)
            self.skips, self._states, self._due = _whole(layers), [], length + self.every
        self.keep = tuple(range(self.decoder.depth + 1)) if length >= self._due else ()

    def verified(self, verified: Verified, verdict: Verdict) -> None:
        """Keep the streams of each row's last kept token."""
        rows, at = torch.arange(len(verdict.accepted)), verdict.accepted
        self._states = [
            kept[rows.to(kept.device), at.to(kept.device)][:, None] for kept in verified.kept
        ]

    def select(self, rows: Sequence[int]) -> None:
        """Keep some rows."""
        self._states = [states[list(rows)] for states in self._states]


def make_skips(decoder: Decoder, config: SkipConfig) -> FixedSkips:
    """What a config names.

    Raises:
        ValueError: its set skips everything or what is not there, or the target is none to search.
    """
    if config.searches:
        return ClaspSkips(decoder, config.layers, config.every)
    skips = Skips.of(config.attention, config.mlp)
    decoder.check_skips(skips)
    return FixedSkips(skips)


def _whole(layers: Sequence[int]) -> Skips:
    return Skips.of(layers, layers)


def middle_layers(depth: int, count: int) -> tuple[int, ...]:
    """`count` of `depth` layers, spread evenly; the first and the last are spared if possible."""
    first, room = (1, depth - 2) if count <= depth - 2 else (0, depth)
    return tuple(first + (2 * i + 1) * room // (2 * count) for i in range(count))


def similar_layers(
    decoder: Decoder, slots: SlotCache, states: Sequence[Tensor], count: int
) -> tuple[int, ...]:
    """The `count` layers without which a token's hidden state stays most like itself.

    CLaSp's dynamic programme (Chen et al. 2025): of the states after i layers, j of them skipped,
    only the one nearest to the full pass is carried on; it comes from j - 1 by skipping layer i, or
    from j by running it. Rows share one set: nearness is the cosine, averaged over rows.

    Args:
        decoder: the target, whose attention must allow for trees.
        slots: the KV cache; states after the committed tokens are overwritten.
        states: `[rows, 1, hidden]` each, the L + 1 residual streams of each row's last committed
            token in a full pass.
        count: layers to skip, fewer than L.
    """
    carried, least = states[0], 0  # `[rows, n, hidden]` with `least`, `least` + 1, … layers skipped
    ways: list[tuple[int, Tensor]] = []
    slots.crop(-1)  # the token itself is not what its states may look at
    try:
        for layer in range(decoder.depth):
            ran = _run_layer(decoder, slots, carried, layer)
            carried, skipped = _nearer(ran, carried, states[layer + 1])
            # Too few skipped to reach `count` in the layers left, or too many already.
            low = max(least, count - (decoder.depth - 1 - layer))
            kept = slice(low - least, count + 1 - least)
            carried, least = carried[:, kept], low
            ways.append((low, skipped[kept]))
    finally:
        slots.commit([1] * slots.rows)
    return _way_to(count, ways)


def _run_layer(decoder: Decoder, slots: SlotCache, carried: Tensor, layer: int) -> Tensor:
    """Run all states through a layer, as siblings at the token's position: none sees another."""
    rows, width = carried.shape[:2]
    alone = torch.full((rows, width), -1, device=slots.device)
    tree = Tree(alone, levels=1, siblings=width)
    span = Span(layer, layer + 1)
    tokens = torch.zeros_like(alone)  # the layer starts from `carried`
    # Place 0 of the block is the slot of the token itself, whose KV stays.
    return decoder.run(tokens, span, slots, carried, offset=1, tree=tree).hidden


def _nearer(ran: Tensor, carried: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
    """The better way to each number of skips.

    Returns:
        States `[rows, n + 1, hidden]`, and `[n + 1]` whether the layer was skipped for them.
    """
    pad = torch.nn.functional.pad
    carried, full = carried.to(ran.device), full.to(ran.device)
    options = torch.stack([pad(ran, (0, 0, 0, 1)), pad(carried, (0, 0, 1, 0))])
    nearness = torch.cosine_similarity(options.float(), full.float(), dim=-1).mean(1)
    nearness[0, -1] = nearness[1, 0] = -torch.inf  # no state comes that way
    skipped = nearness[1] > nearness[0]
    return torch.where(skipped[:, None], options[1], options[0]), skipped


def _way_to(count: int, ways: Sequence[tuple[int, Tensor]]) -> tuple[int, ...]:
    """The skipped layers on the way to `count` of them."""
    skipped = torch.cat([choices.to(ways[0][1].device) for _, choices in ways]).tolist()
    ends = len(skipped)
    layers: list[int] = []
    for layer in range(len(ways) - 1, -1, -1):
        low, choices = ways[layer]
        start = ends - len(choices)
        if skipped[start + count - low]:
            layers.insert(0, layer)
            count -= 1
        ends = start
    return tuple(layers)


# A chain of drafts from the target itself, with sublayers left out.


class SkipLayers(Drafter):
    """Drafts with attention and MLP sublayers skipped (Draft & Verify, Zhang et al. 2024).

    The layers below the first skipped sublayer run exactly, and verification resumes above them.
    The others write approximate KV after the committed tokens; verification overwrites it, so that
    there is nothing to roll back.

    Args:
        engine: the target and its passes.
        chooser: what says which sublayers to skip.
        longest: the most tokens drafted in a round.
        schedule: when to stop earlier.
    """

    name = "layer_skip"
    takes_schedule = True

    def __init__(self, engine: Engine, chooser: FixedSkips, longest: int, schedule: Schedule):
        self.decoder, self.chooser = engine.decoder, chooser
        self.longest, self.schedule, self._judge = longest, schedule, plain_judge()

    @classmethod
    def from_config(cls, engine: Engine, config: DraftConfig) -> SkipLayers:
        """Take the sublayers that the config names, or search for some.

        Raises:
            ValueError: it skips everything or what is not there, or the target is none to search.
        """
        chooser = make_skips(engine.decoder, config.skip)
        schedule = make_schedule(config, engine.round_model(cls.name, config.skip))
        return cls(engine, chooser, config.most_tokens, schedule)

    def propose(self, state: State, limit: int) -> Draft:
        """Draft token by token."""
        self.chooser.begin(state)
        state.keep = self.chooser.keep
        depth = 0 if state.keep else self._exact
        return draft_chain(
            state,
            min(self.longest, limit),
            self.schedule,
            self._judge,
            lambda token, step: self._read(state, token, step, depth),
            depth,
        )

    @property
    def _exact(self) -> int:
        """Layers below the first skipped sublayer; the last layer is always verification's."""
        last = self.decoder.depth - 1
        return min((last, *self.chooser.skips.attention, *self.chooser.skips.mlp))

    def _read(
        self, state: State, token: Tensor, step: int, depth: int
    ) -> tuple[Tensor, Tensor | None]:
        everything, keep = Span(0, self.decoder.depth), (depth,) if depth else ()
        skips = self.chooser.skips
        left = self.decoder.run(
            token, everything, state.slots, offset=step, unembed=True, keep=keep, skips=skips
        )
        state.stats.seconds["shallow"] += left.layer_seconds
        state.stats.seconds["head"] += left.head_seconds
        return left.output, left.kept[0] if depth else None

    def commit(self, state: State, draft: Draft, verified: Verified, verdict: Verdict) -> None:
        """Learn what was accepted, and what verification left for a search."""
        self.chooser.verified(verified, verdict)
        if draft.length:
            self.schedule.end(draft.length, verdict.kept)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with some rows only."""
        self.chooser.select(rows)
