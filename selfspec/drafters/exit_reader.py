"""Reads an exit head token by token, while it drafts.

Heads with their own layer keep its KV beside the target's, and catch up with the verified tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from selfspec.decoder import OwnLayer, Pass, Span
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.heads import Calibrator, Confidence, DFlashHead, ExitHead
from selfspec.heads.mask import MaskToken
from selfspec.sampling.draft import Tree


class ExitReader:
    """Draft logits of a head that reads only the exit's hidden state of the token itself.

    Args:
        engine: the target and its passes.
        head: the exit head.

    Attributes:
        keep: hidden states that prefill and verification keep for the head.
    """

    keep: tuple[int, ...] = ()

    def __init__(self, engine: Engine, head: ExitHead):
        self.engine, self.decoder, self.head = engine, engine.decoder, head
        self._trimmed = head.vocab_ids is not None
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
        place: int,
        tree: Tree | None = None,
        parents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layers below the exit, and the head, over the next tokens of the block.

        Args:
            state: the call.
            tokens: `[rows, width]` the pending token (position 0), or the last drafts.
            place: position of the first of them in the block.
            tree: the token tree; `None` for a chain.
            parents: `[rows, width]` index of each token's parent in the last call; `None` for a
                chain.

        Returns:
            Logits `[rows, width, vocab]`, and the exit's hidden states `[rows, width, hidden]`,
            from which verification resumes; `None` if the exit is at the embeddings, or if the
            layers did not run over these tokens.
        """
        at_exit = self.engine.shallow(
            state, tokens, self.head.exit_layer, place, unembed=self.head.is_plain, tree=tree
        )
        if self.head.is_plain:
            return at_exit.output, at_exit.hidden
        with state.stats.clock("head"):
            return self._logits(at_exit.hidden), at_exit.hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._spread(self.head.logits(self.decoder, hidden))

    def _spread(self, logits: Tensor) -> Tensor:
        return self.head.expand_logits(logits, self.decoder) if self._trimmed else logits

    def calibrator(self, sampled: bool) -> Calibrator:
        """The head's calibrator; an unfitted one if the head has none."""
        name = "sampled" if sampled else "greedy"
        fitted = self.head.calibrators[name] if name in self.head.calibrators else Calibrator()
        assert isinstance(fitted, Calibrator)
        with torch.inference_mode(False):  # the calibrator outlives this call
            return fitted.to(self.decoder.device)

    def confidence(self) -> Confidence:
        """The confidence in the last draft, from its scores by the head's calibrator."""
        if self._confidence is None:
            self._confidence = self.calibrator(sampled=False).confidence()
        return self._confidence

    def verified(self, state: State, drafted: int, verified: Verified) -> None:
        """Called after verification of a chain, before it is committed.

        Args:
            state: the call.
            drafted: number of drafts that the head proposed; 0 if another drafter did.
            verified: results at the pending token and the drafts.
        """

    def select(self, rows: Sequence[int]) -> None:
        """Go on with some rows only."""

    def join(self, other: Any) -> None:
        """Append the rows of another reader of the same head."""


def stacked(one: Tensor, other: Tensor) -> Tensor:
    """Join rows `[rows, n, hidden]` of different n; shorter ones are padded with zeros."""
    width = max(one.shape[1], other.shape[1])
    pad = torch.nn.functional.pad
    return torch.cat([pad(each, (0, 0, 0, width - each.shape[1])) for each in (one, other)])


def newest(starts: Sequence[Sequence[int]], widths: Sequence[int]) -> list[list[int]]:
    """Indices of each row's accepted tokens in concatenated blocks of successive rounds.

    What a block has beyond the start of the next one was rejected. Shorter rows repeat their last
    index.

    Args:
        starts: per block, the position of its first token in each row.
        widths: widths of the blocks.
    """
    found: list[list[int]] = []
    for row in range(len(starts[0])):
        places: list[int] = []
        first = 0
        for block, width in enumerate(widths):
            ends = block + 1 < len(starts)
            accepted = starts[block + 1][row] - starts[block][row] if ends else width
            places.extend(range(first, first + accepted))
            first += width
        found.append(places)
    longest = max(map(len, found))
    return [places + places[-1:] * (longest - len(places)) for places in found]


def tokens_from(state: State, starts: Sequence[int], width: int) -> Tensor:
    """`[rows, width]` each row's tokens from a position on, its last one again beyond its end."""
    text = state.context.text
    tokens = [
        (text[row][start : start + width] + text[row][-1:] * width)[:width]
        for row, start in zip(state.context.rows, starts, strict=True)
    ]
    return torch.tensor(tokens, device=state.pending.device)


def column(values: Sequence[int], like: Tensor) -> Tensor:
    """`[rows, 1]` one number per row, on the device of `like`."""
    return torch.tensor(values, device=like.device)[:, None]


def pick(states: Tensor, places: Tensor) -> Tensor:
    """`[rows, n, hidden]` the states at indices `[rows, n]`, clamped to the last."""
    places = places.to(states.device).clamp(max=states.shape[1] - 1)
    return states.gather(1, places[..., None].expand(-1, -1, states.shape[2]))


def pick_from(states: Tensor, starts: Sequence[int], width: int = 1) -> Tensor:
    """`[rows, width, hidden]` the states from one index per row on, clamped to the last.

    A view if all rows start at the same index.
    """
    first = starts[0]
    if first + width <= states.shape[1] and starts.count(first) == len(starts):
        return states.narrow(1, first, width)
    return pick(states, column(starts, states) + torch.arange(width, device=states.device))


def _put(states: Tensor, others: Tensor, start: Tensor) -> Tensor:
    """States `[rows, n, hidden]`, from `start` `[rows, 1]` on replaced by `others`."""
    places = start + torch.arange(others.shape[1], device=start.device)
    return states.scatter(1, places[..., None].expand_as(others), others.to(states))


_DEFERRED = 512  # the most tokens that a head's own layer may lag behind while others draft


class LayerReader(ExitReader):
    """Draft logits of a head with a decoder layer of its own.

    The layer's KV is stored beside the target's. A round begins by running the layer up to the
    pending token over all tokens that have no KV yet, or whose KV was made from the head's own
    output; each draft then adds one. Slots after the pending token are overwritten later, so rows
    that accepted fewer drafts need no special treatment.
    """

    def __init__(self, engine: Engine, head: ExitHead):
        super().__init__(engine, head)
        assert head.layer is not None  # `make_reader` gives other heads another reader
        self._layer = head.layer
        self.keep = (head.exit_layer, *head.feature_layers)
        self._joins = bool(head.feature_layers)
        self._added = 0  # index of the head's layer among the layers added to the slots
        self._at_once = False  # whether shallow passes also run the layer
        self._ahead = 0  # masks after the pending token
        self._of_drafts = OwnLayer(self._layer)  # the layer in passes that draft
        self._before = torch.empty(0)  # [rows, width, hidden] features for the next draft
        self._hidden = torch.empty(0)  # [rows, m, hidden] exit states from position `_base` on
        # [rows, m + 1, hidden] fused features from `_base` - 1 on: the first, then the others.
        self._known: list[Tensor] = []
        self._base: list[int] = []
        self._right: list[int] = []  # per row, number of positions whose KV is final
        self._last = torch.empty(0)  # [rows, width, hidden] the layer's last output
        self._seen: list[
            tuple[list[int], list[Tensor]]
        ] = []  # verified while others drafted: lengths, states

    def prefilled(self, state: State, block: Pass, offset: int, counts: Sequence[int]) -> None:
        """Run the head's layer over the prompt; keep what the next tokens need."""
        hidden = block.kept[0]
        joined = self._join(block) if self._joins else None
        if offset == 0:
            self._begin(state, joined)
        before = None if joined is None else torch.cat([*self._known, joined], dim=1)
        features = None if before is None else before[:, :-1]
        width = hidden.shape[1]
        if self.head.exit_layer:
            self._run(state, self._enter(state, hidden, features), offset)
        else:
            starts = [length + offset for length in state.slots.lengths]
            tokens = tokens_from(state, starts, width)
            own = self._own(partial(self.head.enter, features=features))
            self.engine.shallow(state, tokens, 0, offset, own=own)
        if before is not None:
            ends = torch.tensor(counts, device=before.device) - offset  # last real token here
            at_end = pick(before, ends.clamp(0, width)[:, None])
            first = torch.where((ends > 0)[:, None, None], at_end, self._known[0])
            self._known = [first, first[:, :0]]
        self._hidden = hidden[:, :0]
        self._base = self._right = [
            length + count for length, count in zip(state.slots.lengths, counts, strict=True)
        ]

    def _begin(self, state: State, joined: Tensor | None) -> None:
        """Prepare for a call, in the first block of its prefill."""
        slots = state.slots
        window = self.decoder.windows[self.head.place]
        self._added = slots.add_layer(window, self.head)
        for _ in range(1, self._of_drafts.depth):
            slots.add_layer(window, self.head)
        if self.head.skips_first:
            slots.added_from = [first + 1 for first in slots.added_from]
        if joined is not None:
            self._known = [torch.zeros_like(joined[:, :1])]
        self._of_drafts = self._own(lambda hidden: self.head.enter(hidden, self._before))

    def verified(self, state: State, drafted: int, verified: Verified) -> None:
        """Keep exit states and features of the pending token and the drafts."""
        hidden = verified.kept[0]
        lengths = state.slots.lengths
        if not drafted:
            # The layer's KV after the pending token came from rejected drafts.
            self._right = [min(right, n) for right, n in zip(self._right, lengths, strict=True)]
            if max(n - right for n, right in zip(lengths, self._right, strict=True)) < _DEFERRED:
                self._seen.append((lengths, verified.kept))
                return
            if self.head.exit_layer:
                self._run_to_pending(state, hidden[:, :1])
            else:
                self._catch_up_at_once(state)
        if self._joins:
            with state.stats.clock("head"):
                joined = self.head.join(verified.kept[1:])
            self._known = [self._known_before(lengths), joined]
        self._hidden, self._base = hidden, lengths
        # The pending token's KV is final. So is that of drafts, unless the head read masks in their
        # place, or its own output in place of the target's features.
        seen = 1 if self._joins or self.head.drafts_at_once else max(1, drafted)
        self._right = [length + seen for length in lengths]

    def _merge_deferred(self) -> None:
        """Append the states that were verified while others drafted to the kept states."""
        if not self._seen:
            return
        blocks = [kept for _, kept in self._seen]
        starts = [self._base, *(lengths for lengths, _ in self._seen)]
        widths = [self._hidden.shape[1], *(kept[0].shape[1] for kept in blocks)]
        at = torch.tensor(newest(starts, widths), device=self._hidden.device)
        self._hidden = pick(torch.cat([self._hidden, *(kept[0] for kept in blocks)], dim=1), at)
        if self._joins:
            streams = [torch.cat(parts, dim=1) for parts in zip(*blocks, strict=True)]
            first, *later = self._known
            later = torch.cat([*later, self.head.join(streams[1:])], dim=1)
            self._known = [first, pick(later, at)]
        self._seen = []

    def _known_before(self, positions: Sequence[int], width: int = 1) -> Tensor:
        """Fused features `[rows, width, hidden]` from the token before each position on."""
        places = self._index_in_kept(positions)
        first, *later = self._known
        if later and min(places) > 0:
            return pick_from(later[0], [place - 1 for place in places], width)
        return pick_from(torch.cat([first, *later], dim=1), places, width)

    def select(self, rows: Sequence[int]) -> None:
        """Keep some rows."""
        kept = list(rows)
        self._hidden = self._hidden[kept]
        self._known = [states[kept] for states in self._known]
        self._base = [self._base[row] for row in kept]
        self._right = [self._right[row] for row in kept]
        self._seen = [
            ([lengths[row] for row in kept], [states[kept] for states in streams])
            for lengths, streams in self._seen
        ]

    def join(self, other: Any) -> None:
        """Append the rows of another reader."""
        self._merge_deferred()
        self._hidden = stacked(self._hidden, other._hidden)
        self._known = list(map(stacked, self._known, other._known))
        self._base, self._right = self._base + other._base, self._right + other._right

    def confidence(self) -> Confidence:
        """As for any head, but of sampled drafts from the confidence output, if there is one."""
        return super().confidence() if self.head.confidence is None else self._predicted

    def _predicted(self, scores: Tensor, probs: Tensor | None, depth: int) -> list[float]:
        if probs is None:
            return super().confidence()(scores, probs, depth)
        assert self.head.confidence is not None
        return chances(self.head.confidence(self.head(self._state(depth)))[:, 0, 0])

    def _state(self, depth: int) -> Tensor:
        """`[rows, 1, hidden]` the layer's output that the last draft was read from."""
        return self._last

    # Drafting

    def read(
        self,
        state: State,
        tokens: Tensor,
        place: int,
        tree: Tree | None = None,
        parents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layers below the exit and the head's own over the next tokens of the block."""
        exit_layer, before = self.head.exit_layer, self._last
        if parents is not None:
            before = pick(before, parents)
        if not place:
            self._at_once = self._in_one_pass(state)
        at_exit = None
        if not place and not exit_layer:
            self._catch_up_at_once(state)
        elif place and self._at_once:
            self._before, own = before, self._of_drafts
            left = self.engine.shallow(state, tokens, exit_layer, place, tree=tree, own=own)
            self._last, at_exit = left.hidden, left.kept[0] if exit_layer else None
        else:
            at_exit = self.engine.shallow(state, tokens, exit_layer, place, tree=tree).hidden
            if place:
                self._last = self._run(state, self._enter(state, at_exit, before), place, tree)
            else:
                self._last = self._catch_up(state, at_exit)
        with state.stats.clock("head"):
            return self._logits(self._last), at_exit if exit_layer else None

    def _own(self, enter: Callable[[Tensor], Tensor]) -> OwnLayer:
        """The layer, in the same pass as those below the exit; `enter` makes its inputs."""
        embed = partial(self.head.embed, self.decoder)
        return OwnLayer(self._layer, enter, self._added, self.head.place, embed)

    def _in_one_pass(self, state: State) -> bool:
        """Whether the pass below the exit may continue through the head's layer.

        This saves the overhead of a second pass. It needs the same attention mask, and the head's
        layer has to take the place of the next layer.
        """
        head = self.head
        return not head.exit_layer or (
            head.place == head.exit_layer
            and not any(state.slots.added_from)
            and not self.decoder.windows_own_layer
        )

    def _catch_up(self, state: State, pending: Tensor) -> Tensor:
        """Run the layer up to the pending token (and masks).

        Returns:
            `[rows, width, hidden]` the layer's output there.
        """
        left, end = self._run_to_pending(state, pending)
        return pick(left, end + torch.arange(pending.shape[1], device=end.device))

    def _catch_up_at_once(self, state: State) -> None:
        """`_catch_up` of a head at the embeddings, which reads tokens instead of exit states."""
        starts, ends = self._missing(state)
        block, features = self._unseen(state, starts, ends), None
        if self._joins:
            features = self._known_before(starts, block.shape[1])
            if self._ahead:
                _, of_mask = self.head.mask_inputs(self.decoder)
                features = self._before_masks(features, of_mask, ends)
        block, embeds = self._with_masks(block, ends)
        offsets = [-end for end in ends]
        own = self._own(partial(self.head.enter, features=features))
        left = self.engine.shallow(state, block, 0, offsets, own=own, embeds=embeds)
        self._last = pick_from(left.hidden, ends, 1 + self._ahead)

    def _with_masks(self, tokens: Tensor, ends: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Put masks after each row's pending token; returns the block and any embeddings."""
        if not self._ahead:
            return tokens, None
        embedding, _ = self.head.mask_inputs(self.decoder)
        embeds = self._before_masks(self.head.embed(self.decoder, tokens), embedding, ends)
        return tokens.new_zeros(embeds.shape[:2]), embeds

    def _before_masks(self, states: Tensor, mask: Tensor, ends: Sequence[int]) -> Tensor:
        """`states` up to each row's pending token at `ends`, followed by the state of the mask."""
        mask = mask.to(states)
        longer = torch.cat([states, mask.expand(len(ends), self._ahead, -1)], dim=1)
        if ends.count(ends[0]) == len(ends):
            return longer
        after = torch.arange(longer.shape[1], device=states.device) > column(ends, states)
        return torch.where(after[..., None], mask, longer)

    def _unseen(self, state: State, starts: Sequence[int], ends: Sequence[int]) -> Tensor:
        """`[rows, width]` each row's tokens from `starts` on, its last one repeated at the end."""
        most = max(ends)
        if state.emitted is not None and min(ends) == most == state.emitted.shape[1] - 1:
            return state.emitted  # as after most rounds
        return tokens_from(state, starts, most + 1)

    def _missing(self, state: State) -> tuple[list[int], list[int]]:
        """For each row, the first token without valid KV of the layer, and its distance to the end.

        Merges the states that were deferred while other drafters drafted.
        """
        with state.stats.clock("head"):
            self._merge_deferred()
        lengths = state.slots.lengths
        starts = [min(right, n) for right, n in zip(self._right, lengths, strict=True)]
        return starts, [n - start for n, start in zip(lengths, starts, strict=True)]

    def _index_in_kept(self, positions: Sequence[int]) -> list[int]:
        """Index of one position per row in the kept states."""
        return [position - base for position, base in zip(positions, self._base, strict=True)]

    def _run_to_pending(self, state: State, pending: Tensor) -> tuple[Tensor, Tensor]:
        """Run the layer from the first token without valid KV to the pending token.

        Args:
            state: the call.
            pending: `[rows, width, hidden]` states at the exit of the pending token and masks.

        Returns:
            `[rows, n, hidden]` output of the layer, and `[rows, 1]` index of the pending token.
        """
        starts, ends = self._missing(state)
        ahead = pending.shape[1] - 1
        if max(ends) == 0 and not self._joins:
            return self._run(state, self._enter(state, pending, None), 0), column(ends, pending)
        places = torch.arange(max(ends) + 1 + ahead, device=pending.device)
        at, end = column(self._index_in_kept(starts), pending) + places, column(ends, pending)
        hidden = _put(pick(torch.cat([self._hidden, pending[:, :1]], dim=1), at), pending, end)
        features = pick(torch.cat(self._known, dim=1), at) if self._joins else None
        if features is not None and ahead:
            _, of_mask = self.head.mask_inputs(self.decoder)
            features = _put(features, of_mask.expand(len(ends), ahead, -1), end + 1)
        offsets = [-end for end in ends]
        return self._run(state, self._enter(state, hidden, features), offsets), end

    def _run(
        self,
        state: State,
        entered: Tensor,
        offset: int | Sequence[int],
        tree: Tree | None = None,
    ) -> Tensor:
        tokens = state.pending.new_zeros(entered.shape[:2])  # the layer starts from `entered`
        span = Span(self.head.place, self.head.place + 1)
        own = OwnLayer(self._layer, added=self._added)
        slots = state.slots
        left = self.decoder.run(tokens, span, slots, entered, offset=offset, own=own, tree=tree)
        state.stats.seconds["head"] += left.head_seconds
        return left.hidden

    def _enter(self, state: State, hidden: Tensor, features: Tensor | None) -> Tensor:
        with state.stats.clock("head"):
            return self.head.enter(hidden, features)

    def _join(self, block: Pass) -> Tensor:
        return self.head.join(block.kept[1:])


class ParallelReader(LayerReader):
    """Draft logits of a head that makes all drafts of a round in one pass over masks.

    The layers run over the pending token and a mask for each further draft. The KV of masks is
    stored after the committed tokens, so it is never attended to and is overwritten later. The
    exit's hidden state is kept only for the pending token.
    """

    def __init__(self, engine: Engine, head: ExitHead):
        super().__init__(engine, head)
        self._drafts: tuple[Tensor, ...] = ()  # [rows, 1, n] each, the logits of the round
        self._gates: tuple[Tensor, ...] = ()  # [rows, 1, rank] each, the states' part of the bias
        mask = head.mask
        self._mask = mask if isinstance(mask, MaskToken) and mask.rank else None
        # [vocab, rank] of tokens
        self._codes = None if self._mask is None else self._mask.codes(self.decoder)
        self._level = 0  # index of the next draft

    def begin(self, most: int) -> None:
        """Use one mask for each draft after the first."""
        self._ahead = most - 1

    def read(
        self,
        state: State,
        tokens: Tensor,
        place: int,
        tree: Tree | None = None,
        parents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of the next draft; only a bias depends on the token before it."""
        if not place:
            self._level, at_exit = 0, self._draft_all(state, tokens)
            return self._spread(self._drafts[0]), at_exit
        self._level += 1
        logits = self._drafts[self._level]
        if self._mask is None or self._codes is None:
            return self._spread(logits.expand(-1, tokens.shape[1], -1)), None
        with state.stats.clock("head"):
            code = embedding(tokens.to(self._codes.device), self._codes)
            return self._spread(logits + self._mask.bias(self._gates[self._level], code)), None

    def _state(self, depth: int) -> Tensor:
        return self._last[:, depth : depth + 1]

    def _draft_all(self, state: State, pending: Tensor) -> Tensor | None:
        """Run the head over the pending token and the masks; returns the exit's hidden state."""
        head, at_exit = self.head, None
        if head.exit_layer:
            block, embeds = self._with_masks(pending, [0] * state.rows)
            shallow = self.engine.shallow(state, block, head.exit_layer, 0, embeds=embeds)
            self._last, at_exit = self._catch_up(state, shallow.hidden), shallow.hidden[:, :1]
        else:
            self._catch_up_at_once(state)
        with state.stats.clock("head"):
            self._drafts = head.logits(self.decoder, self._last).split(1, dim=1)
            if self._mask is not None and self._ahead:
                self._gates = self._mask.of_state(head(self._last)).split(1, dim=1)
        return at_exit


class OnePassReader(ExitReader):
    """Draft logits of a head that makes all drafts from the state before the pending token."""

    def __init__(self, engine: Engine, head: ExitHead):
        super().__init__(engine, head)
        self.keep = head.feature_layers
        self._known = torch.empty(0)  # [rows, m, hidden] states from position `_base` on
        self._base: list[int] = []
        self._drafts = torch.empty(0)  # [rows, heads, vocab] the logits of the round
        self._level = 0  # index of the next draft

    def prefilled(self, state: State, block: Pass, offset: int, counts: Sequence[int]) -> None:
        """Keep the state of each row's last token."""
        joined = self._join(state, block.kept)
        if offset == 0:
            self._known = joined[:, :1]
        ends = torch.tensor(counts, device=joined.device) - offset - 1
        at_end = pick(joined, ends.clamp(min=0)[:, None])
        self._known = torch.where((ends >= 0)[:, None, None], at_end, self._known)
        lengths = state.slots.lengths
        self._base = [length + count - 1 for length, count in zip(lengths, counts, strict=True)]

    def read(
        self,
        state: State,
        tokens: Tensor,
        place: int,
        tree: Tree | None = None,
        parents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of the next draft, the same after every token of a level."""
        if not place:
            lengths = state.slots.lengths
            before = [length - 1 - base for length, base in zip(lengths, self._base, strict=True)]
            with state.stats.clock("head"):
                known = pick_from(self._known, before)
                self._drafts = self._spread(self.head.all_logits(self.decoder, known))
            self._level = 0
        logits = self._drafts[:, self._level : self._level + 1]
        self._level += 1
        return logits.expand(-1, tokens.shape[1], -1), None

    def verified(self, state: State, drafted: int, verified: Verified) -> None:
        """Keep the states of the pending token and the drafts."""
        self._known, self._base = self._join(state, verified.kept), state.slots.lengths

    def select(self, rows: Sequence[int]) -> None:
        """Keep some rows."""
        self._known = self._known[list(rows)]
        self._base = [self._base[row] for row in rows]

    def join(self, other: Any) -> None:
        """Append the rows of another reader."""
        self._known, self._base = stacked(self._known, other._known), self._base + other._base

    def _join(self, state: State, kept: list[Tensor]) -> Tensor:
        with state.stats.clock("head"):
            return self.head.join(kept)


class ContextReader(ExitReader):
    """Draft logits of a head that runs a block of drafts over features of the verified tokens.

    The keys and values that its layers make from features are stored beside the target's, those of
    the newest tokens after every verification. A block's own are stored after them; the features
    of the tokens that were accepted overwrite these.
    """

    def __init__(self, engine: Engine, head: DFlashHead):
        super().__init__(engine, head)
        self._head = head
        self.keep = head.feature_layers
        self._added: dict[int, int] = {}  # the number in the slots of each of its layers
        self._hidden = torch.empty(0)  # [rows, block, hidden] the block's output
        self._drafts: tuple[Tensor, ...] = ()  # [rows, 1, n] each, the logits of the round
        self._memory = torch.empty(0)  # [rows, width, any] of the drafts before the next one
        self._tokens = torch.empty(0)  # [rows, width] the tokens that were read last
        self._level = 0  # index of the next draft
        self._ahead = 1  # drafts of the round

    def prefilled(self, state: State, block: Pass, offset: int, counts: Sequence[int]) -> None:
        """Store keys and values of the prompt."""
        if offset == 0:
            layers = range(self._head.options["num_hidden_layers"])
            self._added = {i: state.slots.add_layer(None, self._head) for i in layers}
        self._remember(state, block.kept, offset)

    def verified(self, state: State, drafted: int, verified: Verified) -> None:
        """Store keys and values of the pending token and the drafts."""
        self._remember(state, verified.kept, 0)

    def _remember(self, state: State, features: list[Tensor], offset: int) -> None:
        slots = state.slots
        with state.stats.clock("head"):
            context = self._head.join(features)
            with slots.writing(context.shape[1], offset, self._added) as window:
                self._head.remember(context, window.positions.to(context.device), slots)

    def begin(self, most: int) -> None:
        """Read out `most` drafts; the block has the size that it was trained with."""
        self._ahead = most

    def read(
        self,
        state: State,
        tokens: Tensor,
        place: int,
        tree: Tree | None = None,
        parents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of the next draft, of which a small part depends on the token before it."""
        with state.stats.clock("head"):
            if not place:
                self._draft_all(state, tokens)
            else:
                self._level += 1
                if parents is not None:
                    self._memory = pick(self._memory, parents)
            self._tokens = tokens
            logits, self._memory = self._head.correct(
                self._drafts[self._level], self._state(), tokens, self._memory
            )
            assert logits is not None
            return self._spread(logits), None

    def _draft_all(self, state: State, pending: Tensor) -> None:
        head, slots = self._head, state.slots
        first = torch.tensor(slots.added_from, device=slots.device)
        with slots.writing(head.block_size, 0, self._added) as window:
            places = window.positions
            self._hidden = head.run_block(self.decoder, pending, places, first, slots)
        drafting = self._hidden[:, head.first_row : head.first_row + self._ahead]
        self._drafts = head.logits(self.decoder, drafting).split(1, dim=1)
        self._level = 0
        self._memory = head.first_memory(self._hidden[:, :1], pending)

    def _state(self) -> Tensor:
        """`[rows, 1, hidden]` the output that the next draft is read from."""
        return self._hidden.narrow(1, self._head.first_row + self._level, 1)

    def confidence(self) -> Confidence:
        """As for any head, but of sampled drafts from the confidence output, if there is one."""
        return super().confidence() if self.head.confidence is None else self._predicted

    def _predicted(self, scores: Tensor, probs: Tensor | None, depth: int) -> list[float]:
        if probs is None:
            return super().confidence()(scores, probs, depth)
        return chances(self.head.acceptance_odds(self._state(), self._tokens)[:, 0])


def chances(odds: Tensor) -> list[float]:
    """Probabilities of log odds `[rows]`; 0 for NaN."""
    return [max(0.0, chance) for chance in odds.float().sigmoid().tolist()]  # in this order


def make_reader(engine: Engine, head: ExitHead) -> ExitReader:
    """The reader that a head needs."""
    if isinstance(head, DFlashHead):
        return ContextReader(engine, head)
    if head.layer is None:
        return (OnePassReader if head.drafts_at_once else ExitReader)(engine, head)
    return (ParallelReader if head.drafts_at_once else LayerReader)(engine, head)
