"""Readers of heads that make all drafts of a round in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding
from typing_extensions import Self

from selfspec.decoder import Pass
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.drafters.readers.token_by_token import ExitReader, LayerReader, chances
from selfspec.drafters.readers.verified import append_rows, column, pick, pick_from
from selfspec.heads import DFlashHead, ExitHead
from selfspec.heads.dflash import DFlashRunner
from selfspec.heads.mask import MaskToken
from selfspec.sampling.draft import Tree


class OnePassReader(ExitReader):
    """Draft logits of a head that makes all drafts from the state before the pending token."""

    def __init__(self, engine: Engine, head: ExitHead):
        super().__init__(engine, head)
        self.keep = head.feature_layers
        self._features = torch.empty(0)  # [rows, m, hidden] states from position `_starts` on
        self._starts: list[int] = []
        self._drafts = torch.empty(0)  # [rows, heads, n] the logits of the round
        self._level = 0  # index of the next draft

    def prefilled(self, state: State, block: Pass, offset: int, counts: Sequence[int]) -> None:
        """Keep the state of each row's last token."""
        fused = self._fuse(state, block.kept)
        if offset == 0:
            self._features = fused[:, :1]
        ends = torch.tensor(counts, device=fused.device) - offset - 1
        at_end = pick(fused, ends.clamp(min=0)[:, None])
        self._features = torch.where((ends >= 0)[:, None, None], at_end, self._features)
        lengths = state.slots.lengths
        self._starts = [length + count - 1 for length, count in zip(lengths, counts, strict=True)]

    def read(
        self,
        state: State,
        tokens: Tensor,
        offset: int,
        tree: Tree | None = None,
        parents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of the next draft, the same after every token of a level."""
        if not offset:
            lengths = state.slots.lengths
            before = [
                length - 1 - start for length, start in zip(lengths, self._starts, strict=True)
            ]
            with state.stats.clock("head"):
                features = pick_from(self._features, before)
                self._drafts = self._checked(self.head.all_logits(self.decoder, features))
            self._level = 0
        logits = self._drafts[:, self._level : self._level + 1]
        self._level += 1
        return logits.expand(-1, tokens.shape[1], -1), None

    def verified(self, state: State, drafted: int, verified: Verified) -> None:
        """Keep the states of the pending token and the drafts."""
        self._features = self._fuse(state, verified.hidden_states)
        self._starts = state.slots.lengths

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self._features = self._features[list(rows)]
        self._starts = [self._starts[row] for row in rows]

    def join(self, other: Self) -> None:
        """Append the rows of another reader."""
        self._features, self._starts = (
            append_rows(self._features, other._features),
            self._starts + other._starts,
        )

    def _fuse(self, state: State, kept: list[Tensor]) -> Tensor:
        with state.stats.clock("head"):
            return self.head.fuse_features(kept)


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
        offset: int,
        tree: Tree | None = None,
        parents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of the next draft; only a bias depends on the token before it."""
        if not offset:
            self._level, at_exit = 0, self._draft_all(state, tokens)
            return self._checked(self._drafts[0]), at_exit
        self._level += 1
        logits = self._drafts[self._level]
        if self._mask is None or self._codes is None:
            return self._checked(logits.expand(-1, tokens.shape[1], -1)), None
        with state.stats.clock("head"):
            code = embedding(tokens.to(self._codes.device), self._codes)
            return self._checked(logits + self._mask.bias(self._gates[self._level], code)), None

    def _state(self, depth: int) -> Tensor:
        return self._last[:, depth : depth + 1]

    def _draft_all(self, state: State, pending: Tensor) -> Tensor | None:
        """Run the head over the pending token and the masks; returns the exit's hidden state."""
        at_exit, head = self._catch_up(state, pending), self.head
        with state.stats.clock("head"):
            self._drafts = head.logits(self.decoder, self._last).split(1, dim=1)
            if self._mask is not None and self._ahead:
                self._gates = self._mask.of_state(head(self._last)).split(1, dim=1)
        return at_exit

    # Masks

    def _features(self, starts: Sequence[int], ends: Sequence[int]) -> Tensor | None:
        features = super()._features(starts, ends)
        if features is None or not self._ahead:
            return features
        _, of_mask = self.head.mask_inputs(self.decoder)
        return self._add_masks(features, of_mask, ends)

    def _inputs(self, tokens: Tensor, ends: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        if not self._ahead:
            return tokens, None
        of_mask, _ = self.head.mask_inputs(self.decoder)
        embeds = self._add_masks(self.head.embed(self.decoder, tokens), of_mask, ends)
        return tokens.new_zeros(embeds.shape[:2]), embeds

    def _add_masks(self, states: Tensor, mask: Tensor, ends: Sequence[int]) -> Tensor:
        """`states` up to each row's pending token at `ends`, followed by the state of the mask."""
        mask = mask.to(states)
        longer = torch.cat([states, mask.expand(len(ends), self._ahead, -1)], dim=1)
        if ends.count(ends[0]) == len(ends):
            return longer
        after = torch.arange(longer.shape[1], device=states.device) > column(ends, states)
        return torch.where(after[..., None], mask, longer)


class ContextReader(ExitReader):
    """Draft logits of a head that runs a block of drafts over features of the verified tokens.

    The keys and values that its layers make from features are stored beside the target's, those of
    the newest tokens after every verification. A block's own are stored after them; the features
    of the tokens that were accepted overwrite these.
    """

    def __init__(self, engine: Engine, head: DFlashHead):
        super().__init__(engine, head)
        self._head, self._runner = head, DFlashRunner(self.decoder, head)
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
        self._remember(state, verified.hidden_states, 0)

    def _remember(self, state: State, features: list[Tensor], offset: int) -> None:
        slots = state.slots
        with state.stats.clock("head"):
            context = self._head.fuse_features(features)
            with slots.writing(context.shape[1], offset, self._added) as window:
                self._runner.remember(context, window.positions.to(context.device), slots)

    def begin(self, most: int) -> None:
        """Read out `most` drafts; the block has the size that it was trained with."""
        self._ahead = most

    def read(
        self,
        state: State,
        tokens: Tensor,
        offset: int,
        tree: Tree | None = None,
        parents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of the next draft, of which a small part depends on the token before it."""
        with state.stats.clock("head"):
            if not offset:
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
            return self._checked(logits), None

    def _draft_all(self, state: State, pending: Tensor) -> None:
        head, slots = self._head, state.slots
        first = torch.tensor(slots.added_from, device=slots.device)
        with slots.writing(head.block_size, 0, self._added) as window:
            positions = window.positions
            self._hidden = self._runner.run(pending, positions, first, slots)
        drafting = self._hidden[:, head.first_row : head.first_row + self._ahead]
        self._drafts = head.logits(self.decoder, drafting).split(1, dim=1)
        self._level = 0
        self._memory = head.first_memory(self._hidden[:, :1], pending)

    def _state(self) -> Tensor:
        """`[rows, 1, hidden]` the output that the next draft is read from."""
        return self._hidden.narrow(1, self._head.first_row + self._level, 1)

    def confidence(self, scores: Tensor, probs: Tensor | None, depth: int) -> list[float]:
        """As for any head, but of sampled drafts from the confidence output, if there is one."""
        if probs is None or self.head.confidence is None:
            return super().confidence(scores, probs, depth)
        return chances(self.head.acceptance_odds(self._state(), self._tokens)[:, 0])
