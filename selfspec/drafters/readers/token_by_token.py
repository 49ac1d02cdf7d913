"""Readers of heads that draft token by token: without a layer of their own, and with one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from selfspec.decoder import Decoder, OwnLayer, Pass, Span
from selfspec.decoder.cache import SlotCache
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.drafters.readers.verified import OwnKV, VerifiedStates, column, pick, pick_from, put
from selfspec.heads import Calibrator, Confidence, ExitHead
from selfspec.sampling.draft import Tree


class ExitReader:
    """Draft logits of a head that reads only the exit's hidden state of the token itself.

    Args:
        engine: the target and its passes.
        head: the exit head.

    Attributes:
        keep: hidden states that prefill and verification keep for the head.
        vocabulary: the tokens of the head's logits.
    """

    keep: tuple[int, ...] = ()

    def __init__(self, engine: Engine, head: ExitHead):
        self.engine, self.decoder, self.head = engine, engine.decoder, head
        self.vocabulary = head.vocabulary(self.decoder)
        self._confidence: Confidence | None = None

    @property
    def depth(self) -> int:
        """Number of layers below the states that verification resumes from; 0 if there are none."""
        return 0 if self.decoder.approximates_layers else self.head.exit_layer

    def prefilled(self, state: State, block: Pass, offset: int, counts: Sequence[int]) -> None:
        """Called after each block of the prefill; see `Drafter.prefilled`."""

    def begin(self, most: int) -> None:
        """Begin a round that drafts at most `most` tokens in sequence."""

    def read(
        self,
        state: State,
        tokens: Tensor,
        offset: int,
        tree: Tree | None = None,
        parents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layers below the exit, and the head, over the next tokens of the block.

        Args:
            state: the call.
            tokens: `[rows, width]` the pending token (offset 0), or the last drafts.
            offset: slots between the pending token's and the first of theirs.
            tree: the token tree; `None` for a chain, and for the pending token.
            parents: `[rows, width]` index of each token's parent in the last call; `None` for a
                chain, and for the pending token.

        Returns:
            Logits `[rows, width, n]`, and the exit's hidden states `[rows, width, hidden]`,
            from which verification resumes; `None` if the exit is at the embeddings, or if the
            layers did not run over these tokens.
        """
        at_exit = self.engine.shallow(
            state, tokens, self.head.exit_layer, offset, unembed=self.head.is_plain, tree=tree
        )
        if self.head.is_plain:
            return at_exit.output, at_exit.hidden
        with state.stats.clock("head"):
            return self._logits(at_exit.hidden), at_exit.hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._checked(self.head.logits(self.decoder, hidden))

    def _checked(self, logits: Tensor) -> Tensor:
        """The logits; ValueError if the head made other ones than it is asked for."""
        size, ids = self.vocabulary.size, self.vocabulary.ids
        width, expected = logits.shape[-1], size if ids is None else len(ids)
        right = width >= size if ids is None else width == len(ids)
        if logits.ndim != 3 or not right:
            raise ValueError(
                f"the {self.head.kind} head ({type(self.head).__qualname__}) returned logits of "
                f"shape {tuple(logits.shape)}, expected [rows, width, {expected}]"
            )
        return logits

    def calibrator(self, sampled: bool) -> Calibrator:
        """The head's calibrator; an unfitted one if the head has none."""
        name = "sampled" if sampled else "greedy"
        known, device = self.head.calibrators, self.decoder.device
        with torch.inference_mode(False), device:  # the calibrator outlives this call
            fitted = known[name] if name in known else Calibrator()
            assert isinstance(fitted, Calibrator)
            return fitted.to(device)

    def confidence(self, scores: Tensor, probs: Tensor | None, depth: int) -> list[float]:
        """The `Confidence` in the last draft, from its scores by the head's calibrator."""
        if self._confidence is None:
            self._confidence = self.calibrator(sampled=False).confidence()
        return self._confidence(scores, probs, depth)

    def verified(self, state: State, drafted: int, verified: Verified) -> None:
        """Called after verification of a chain, before it is committed.

        Args:
            state: the call.
            drafted: number of drafts that the head proposed; 0 if another drafter did.
            verified: results at the pending token and the drafts.
        """

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""

    def join(self, other: Any) -> None:
        """Append the rows of another reader of the same head."""


class LayerRunner:
    """Runs a head's own layer, whose KV is stored beside the target's.

    For each token the layer reads the exit's hidden state, and the features of the token before it;
    `None` if the head has no features.

    Args:
        decoder: the target.
        head: the head.
    """

    def __init__(self, decoder: Decoder, head: ExitHead):
        assert head.layer is not None  # `make_reader` gives other heads another reader
        self._decoder, self._head, self._layer = decoder, head, head.layer
        self._added = 0  # index of the layer among the layers added to the slots

    def make_room(self, slots: SlotCache) -> None:
        """Add room for the layer's KV, before the first block of the prompt."""
        window = self._decoder.windows[self._head.place]
        add = partial(slots.add_layer, window, self._head, self._head.skips_first)
        self._added, *_ = [add() for _ in range(OwnLayer(self._layer).depth)]

    def fits_shallow_pass(self, slots: SlotCache) -> bool:
        """Whether the pass below the exit may continue through the layer.

        This saves the overhead of a second pass. It needs the same attention mask, and the layer
        has to take the place of the next layer.
        """
        head = self._head
        return not head.exit_layer or (
            head.place == head.exit_layer
            and not any(slots.added_from)
            and not self._decoder.windows_own_layer
        )

    def in_shallow_pass(self, features: Tensor | None) -> OwnLayer:
        """The layer, for the pass below the exit, with the features of that pass's tokens."""
        enter = partial(self._head.enter, features=features)
        embed = partial(self._head.embed, self._decoder)
        return OwnLayer(self._layer, enter, self._added, self._head.place, embed)

    def run(
        self,
        state: State,
        hidden: Tensor,
        features: Tensor | None,
        offset: int | Sequence[int],
        tree: Tree | None = None,
    ) -> Tensor:
        """`[rows, width, hidden]` the layer's output, in a pass of its own."""
        with state.stats.clock("head"):
            entered = self._head.enter(hidden, features)
        tokens = state.pending.new_zeros(entered.shape[:2])  # the layer starts from `entered`
        span = Span(self._head.place, self._head.place + 1)
        own = OwnLayer(self._layer, added=self._added)
        slots = state.slots
        out = self._decoder.run(tokens, span, slots, entered, offset=offset, own=own, tree=tree)
        state.stats.seconds["head"] += out.head_seconds
        return out.hidden


class LayerReader(ExitReader):
    """Draft logits of a head with a decoder layer of its own.

    A round begins by running the layer up to the pending token over all tokens that have no KV of
    it yet, or whose KV was made from the head's own output; each draft then adds one. Slots after
    the pending token are overwritten later, so rows that accepted fewer drafts need no special
    treatment.
    """

    _ahead = 0  # masks that are read after the pending token

    def __init__(self, engine: Engine, head: ExitHead):
        super().__init__(engine, head)
        self._layer = LayerRunner(self.decoder, head)
        self.keep = (head.exit_layer, *head.feature_layers)
        self._states = VerifiedStates(head.fuse_features if head.feature_layers else None)
        self._kv = OwnKV()
        self._one_pass = False  # whether shallow passes also run the layer
        self._last = torch.empty(0)  # [rows, width, hidden] the layer's last output

    # The prompt

    def prefilled(self, state: State, block: Pass, offset: int, counts: Sequence[int]) -> None:
        """Run the head's layer over the prompt; keep what the next tokens need."""
        lengths = state.slots.lengths
        ends = [length + count for length, count in zip(lengths, counts, strict=True)]
        left = [count - offset for count in counts]
        features = self._states.read_prompt(block.kept, offset == 0, left, ends)
        if offset == 0:
            self._layer.make_room(state.slots)
        hidden = block.kept[0]
        if self.head.exit_layer:
            self._layer.run(state, hidden, features, offset)
        else:
            starts = [length + offset for length in lengths]
            tokens = tokens_from(state, starts, hidden.shape[1])
            own = self._layer.in_shallow_pass(features)
            self.engine.shallow(state, tokens, 0, offset, own=own)
        self._kv.written(ends)

    # After verification

    def verified(self, state: State, drafted: int, verified: Verified) -> None:
        """Keep exit states and features of the pending token and the drafts."""
        lengths = state.slots.lengths
        if not drafted:
            self._kv.rejected(lengths)
            _, lags = self._kv.missing(lengths)
            # A bound for the memory of their states, and the length of the pass that catches up.
            if max(lags) < 512:
                self._states.note(lengths, verified.hidden_states)
                return
            self.begin(1)  # without masks
            if self.head.exit_layer:
                self._read_states(state, verified.hidden_states[0][:, :1])
            else:
                self._read_tokens(state)
        with state.stats.clock("head"):
            self._states.replace(lengths, verified.hidden_states)
        # The pending token's KV is final. So is that of drafts, unless the head read masks in their
        # place, or its own output in place of the target's features.
        again = self._states.has_features or self.head.drafts_at_once
        self._kv.written([length + (1 if again else max(1, drafted)) for length in lengths])

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self._states.select(rows)
        self._kv.select(rows)

    def join(self, other: Self) -> None:
        """Append the rows of another reader."""
        self._states.join(other._states)
        self._kv.join(other._kv)

    # Drafting

    def read(
        self,
        state: State,
        tokens: Tensor,
        offset: int,
        tree: Tree | None = None,
        parents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layers below the exit and the head's own over the next tokens of the block."""
        if offset:
            before = self._last if parents is None else pick(self._last, parents)
            at_exit = self._read_drafts(state, tokens, offset, tree, before)
        else:
            self._one_pass = self._layer.fits_shallow_pass(state.slots)
            at_exit = self._catch_up(state, tokens)
        with state.stats.clock("head"):
            return self._logits(self._last), at_exit

    def _read_drafts(
        self, state: State, tokens: Tensor, offset: int, tree: Tree | None, before: Tensor
    ) -> Tensor | None:
        """Read the last drafts, `before` being the layer's output at the token before each.

        Returns:
            The exit's hidden states; `None` if the exit is at the embeddings.
        """
        exit_layer = self.head.exit_layer
        if self._one_pass:
            own = self._layer.in_shallow_pass(before)
            out = self.engine.shallow(state, tokens, exit_layer, offset, tree=tree, own=own)
            self._last = out.hidden
            return out.kept[0] if exit_layer else None
        at_exit = self.engine.shallow(state, tokens, exit_layer, offset, tree=tree).hidden
        self._last = self._layer.run(state, at_exit, before, offset, tree)
        return at_exit

    # Catching up with the verified tokens

    def _catch_up(self, state: State, pending: Tensor) -> Tensor | None:
        """Run everything up to the pending token `[rows, 1]`, and the masks after it.

        Returns:
            `[rows, 1, hidden]` the exit's state; `None` if the exit is at the embeddings.
        """
        exit_layer = self.head.exit_layer
        if not exit_layer:
            self._last = self._read_tokens(state)
            return None
        block, embeds = self._inputs(pending, [0] * state.rows)
        at_exit = self.engine.shallow(state, block, exit_layer, 0, embeds=embeds).hidden
        self._last = self._read_states(state, at_exit)
        return at_exit[:, :1]

    def _read_states(self, state: State, pending: Tensor) -> Tensor:
        """Run the layer from the first token without final KV on.

        Args:
            state: the call.
            pending: `[rows, width, hidden]` states at the exit of the pending token and masks.

        Returns:
            `[rows, width, hidden]` the layer's output there.
        """
        starts, ends = self._missing(state)
        if max(ends) == 0 and not self._states.has_features:
            return self._layer.run(state, pending, None, 0)
        width, end = pending.shape[1], column(ends, pending)
        hidden = self._states.exit_from(starts, max(ends) + width, pending[:, :1])
        hidden, features = put(hidden, pending, end), self._features(starts, ends)
        out = self._layer.run(state, hidden, features, [-end for end in ends])
        return pick(out, end + torch.arange(width, device=end.device))

    def _read_tokens(self, state: State) -> Tensor:
        """`_read_states` of a head at the embeddings, which reads tokens instead."""
        starts, ends = self._missing(state)
        features = self._features(starts, ends)
        block, embeds = self._inputs(tokens_to_pending(state, starts, ends), ends)
        own = self._layer.in_shallow_pass(features)
        offsets = [-end for end in ends]
        out = self.engine.shallow(state, block, 0, offsets, own=own, embeds=embeds)
        return pick_from(out.hidden, ends, 1 + self._ahead)

    def _missing(self, state: State) -> tuple[list[int], list[int]]:
        """`OwnKV.missing`, after the states of all verified tokens have been merged."""
        with state.stats.clock("head"):
            self._states.merge()
        return self._kv.missing(state.slots.lengths)

    def _features(self, starts: Sequence[int], ends: Sequence[int]) -> Tensor | None:
        """`[rows, width, hidden]` features from `starts` to the pending token, and of masks."""
        if not self._states.has_features:
            return None
        return self._states.features_before(starts, max(ends) + 1)

    def _inputs(self, tokens: Tensor, ends: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """The block to run, and its embeddings if they are not those of its tokens.

        Args:
            tokens: `[rows, width]` tokens up to the pending one.
            ends: per row, the index of the pending token.
        """
        return tokens, None

    # Confidence

    def confidence(self, scores: Tensor, probs: Tensor | None, depth: int) -> list[float]:
        """As for any head, but of sampled drafts from the confidence output, if there is one."""
        if probs is None or self.head.confidence is None:
            return super().confidence(scores, probs, depth)
        return chances(self.head.confidence(self.head(self._state(depth)))[:, 0, 0])

    def _state(self, depth: int) -> Tensor:
        """`[rows, 1, hidden]` the layer's output that the last draft was read from."""
        return self._last


def tokens_to_pending(state: State, starts: Sequence[int], ends: Sequence[int]) -> Tensor:
    """`[rows, width]` each row's tokens from `starts` on, its pending one, at `ends`, repeated."""
    most = max(ends)
    if state.emitted is not None and min(ends) == most == state.emitted.shape[1] - 1:
        return state.emitted  # as after most rounds
    return tokens_from(state, starts, most + 1)


def tokens_from(state: State, starts: Sequence[int], width: int) -> Tensor:
    """`[rows, width]` each row's tokens from a position on, its last one again beyond its end."""
    text = state.context.text
    tokens = [
        (text[row][start : start + width] + text[row][-1:] * width)[:width]
        for row, start in zip(state.context.rows, starts, strict=True)
    ]
    return torch.tensor(tokens, device=state.pending.device)


def chances(odds: Tensor) -> list[float]:
    """Probabilities of log odds `[rows]`; 0 for NaN."""
    # `max(0.0, nan)` is 0.0; in the other order it would be NaN.
    return [max(0.0, chance) for chance in odds.float().sigmoid().tolist()]
