"""Drafts with sublayers skipped: a fixed set, or one chosen while generating (CLaSp)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Self

from selfspec.config import DraftConfig, SkipConfig
from selfspec.decoder import Decoder, Skips, Span
from selfspec.decoder.cache import SlotCache
from selfspec.drafters.base import Drafter
from selfspec.drafters.chain import draft_chain
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.sampling.draft import Draft, Tree, Verdict
from selfspec.sampling.vocabulary import DraftVocabulary
from selfspec.schedule import Schedule, make_schedule, uncalibrated


class FixedSkips:
    """A fixed set of sublayers.

    Args:
        skips: the sublayers.

    Attributes:
        skips: the sublayers to skip from now on.
        keep: hidden states that the next verification keeps, by the number of layers below.
    """

    def __init__(self, skips: Skips):
        self.skips = skips
        self.keep: tuple[int, ...] = ()

    def begin(self, state: State) -> None:
        """A round begins."""

    def verified(self, verified: Verified, verdict: Verdict) -> None:
        """Called after verification."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""

    def join(self) -> None:
        """Append more rows."""


class ClaspSkips(FixedSkips):
    """Whole layers, chosen again at intervals (CLaSp, Chen et al. 2025).

    Before a search, one verification runs all layers and keeps all hidden states; the next round
    begins with a search over those of each row's last committed token. All rows skip the same
    layers. Before the first search, evenly spaced layers are skipped.

    Args:
        decoder: the target.
        count: layers to skip; `None` takes half.
        every: tokens from one search to the next.

    Raises:
        ValueError: `count` is not below the number of layers, or the target cannot run trees.
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
        decoder.check_trees("name the sublayers to skip in skip.attention and skip.mlp")
        super().__init__(_whole(middle_layers(depth, self.count)))
        self._states: list[Tensor] = []
        self._due = 0  # tokens of the longest row at the next search

    def begin(self, state: State) -> None:
        """Search, if the last verification kept its states."""
        length = max(state.slots.lengths)
        self._due = min(self._due, length + self.every)  # the longest row may have been removed
        if self._states:
            with state.stats.clock("shallow"):
                layers = similar_layers(self.decoder, state.slots, self._states, self.count)
            self.skips, self._states, self._due = _whole(layers), [], length + self.every
        self.keep = tuple(range(self.decoder.depth + 1)) if length >= self._due else ()

    def verified(self, verified: Verified, verdict: Verdict) -> None:
        """Keep the hidden states of each row's last accepted token."""
        rows, at = torch.arange(len(verdict.accepted), device="cpu"), verdict.accepted
        self._states = [
            states[rows.to(states.device), at.to(states.device)][:, None]
            for states in verified.hidden_states
        ]

    def select(self, rows: Sequence[int]) -> None:
        """Keep some rows."""
        self._states = [states[list(rows)] for states in self._states]

    def join(self) -> None:
        """Postpone the search, because rows that have just joined have no states."""
        self._states = []


def make_skips(decoder: Decoder, config: SkipConfig) -> FixedSkips:
    """The skips that a config describes.

    Raises:
        ValueError: its set skips everything, names missing sublayers, or cannot be searched.
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
    """The `count` layers whose omission changes a token's hidden state least.

    CLaSp's dynamic program (Chen et al. 2025): among the states after i layers with j of them
    skipped, only the one nearest to the full pass is kept; it comes from j - 1 by skipping layer i,
    or from j by running it. Rows share one set: nearness is the mean cosine over rows.

    Args:
        decoder: the target, which must support trees.
        slots: the KV cache; states after the committed tokens are overwritten.
        states: `[rows, 1, hidden]` each, the L + 1 hidden states of each row's last committed
            token in a full pass.
        count: layers to skip, fewer than L.
    """
    carried, least = states[0], 0  # `[rows, n, hidden]` with `least`, `least` + 1, … layers skipped
    choices: list[tuple[int, Tensor]] = []
    slots.crop(-1)  # the states must not attend to the token's own KV
    try:
        for layer in range(decoder.depth):
            ran = _run_layer(decoder, slots, carried, layer)
            carried, skipped = _nearer(ran, carried, states[layer + 1])
            # Too few skipped to reach `count` in the layers left, or too many already.
            low = max(least, count - (decoder.depth - 1 - layer))
            kept = slice(low - least, count + 1 - least)
            carried, least = carried[:, kept], low
            choices.append((low, skipped[kept]))
    finally:
        slots.commit([1] * slots.rows)
    return _trace_back(count, choices)


def _run_layer(decoder: Decoder, slots: SlotCache, carried: Tensor, layer: int) -> Tensor:
    """Run all states through a layer as siblings at the token's position."""
    rows, width = carried.shape[:2]
    alone = torch.full((rows, width), -1, device=slots.device)
    tree = Tree(alone, levels=1, siblings=width)
    span = Span(layer, layer + 1)
    tokens = torch.zeros_like(alone)  # the layer starts from `carried`
    # Position 0 of the block is the slot of the token itself, whose KV is kept.
    return decoder.run(tokens, span, slots, carried, offset=1, tree=tree).hidden


def _nearer(ran: Tensor, carried: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
    """The better predecessor for each number of skips.

    Returns:
        States `[rows, n + 1, hidden]`, and `[n + 1]` whether the layer was skipped for them.
    """
    pad = torch.nn.functional.pad
    carried, full = carried.to(ran.device), full.to(ran.device)
    options = torch.stack([pad(ran, (0, 0, 0, 1)), pad(carried, (0, 0, 1, 0))])
    nearness = torch.cosine_similarity(options.float(), full.float(), dim=-1).mean(1)
    nearness[0, -1] = nearness[1, 0] = -torch.inf  # impossible
    skipped = nearness[1] > nearness[0]
    return torch.where(skipped[:, None], options[1], options[0]), skipped


def _trace_back(count: int, ways: Sequence[tuple[int, Tensor]]) -> tuple[int, ...]:
    """The skipped layers, traced back from `count` of them."""
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


class SkipSublayers(Drafter):
    """Drafts with attention and MLP sublayers skipped (Draft & Verify, Zhang et al. 2024).

    The layers below the first skipped sublayer are exact, so verification resumes above them. The
    others write approximate KV after the committed tokens, which verification overwrites.

    Args:
        engine: the target and its passes.
        chooser: chooses the sublayers to skip.
        longest: the most tokens drafted in a round.
        schedule: when to stop earlier.
    """

    name = "skip_sublayers"
    takes_exit = False
    takes_schedule = True

    def __init__(self, engine: Engine, chooser: FixedSkips, longest: int, schedule: Schedule):
        self.decoder = self.drafting = engine.decoder
        self.chooser = chooser
        self.longest, self.schedule, self._confidence = longest, schedule, uncalibrated()

    @classmethod
    def from_config(cls, engine: Engine, config: DraftConfig) -> SkipSublayers:
        """Take the sublayers that the config names, or search for some.

        Raises:
            ValueError: the set skips everything, names missing sublayers, or cannot be searched.
        """
        chooser = make_skips(engine.decoder, config.skip)
        schedule = make_schedule(config, engine.rounds(config, cls.name, config.skip))
        return cls(engine, chooser, config.most_tokens, schedule)

    def propose(self, state: State, limit: int) -> Draft:
        """Draft token by token."""
        self.chooser.begin(state)
        state.keep = self.chooser.keep
        depth = 0 if state.keep or self.decoder.approximates_layers else self._exact
        return draft_chain(
            state,
            min(self.longest, limit),
            self.schedule,
            self._confidence,
            lambda token, step: self._read(state, token, step, depth),
            DraftVocabulary(self.decoder.vocab_size),
            depth,
        )

    @property
    def _exact(self) -> int:
        """Layers below the first skipped sublayer; verification always runs the last layer."""
        last = self.decoder.depth - 1
        return min((last, *self.chooser.skips.attention, *self.chooser.skips.mlp))

    def _read(
        self, state: State, token: Tensor, step: int, depth: int
    ) -> tuple[Tensor, Tensor | None]:
        everything, keep = Span(0, self.decoder.depth), (depth,) if depth else ()
        skips = self.chooser.skips
        out = self.decoder.run(
            token, everything, state.slots, offset=step, unembed=True, keep=keep, skips=skips
        )
        state.stats.seconds["shallow"] += out.layer_seconds
        state.stats.seconds["head"] += out.head_seconds
        return out.output, out.kept[0] if depth else None

    def commit(self, state: State, draft: Draft, verified: Verified, verdict: Verdict) -> None:
        """Keep states for a search, and tell the schedule what was accepted."""
        self.chooser.verified(verified, verdict)
        if draft.length:
            self.schedule.end(draft.length, verdict.accepted_counts)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.chooser.select(rows)

    def join(self, other: Self) -> None:
        """Append the rows of another drafter."""
        self.chooser.join()

    def pause(self) -> None:
        """End the timing of the last round."""
        self.schedule.pause()
