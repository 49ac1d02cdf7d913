"""The reader of heads that make all drafts of a round in one pass over masks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding

from selfspec.drafters.engine import Engine, State
from selfspec.drafters.readers.by_row import column
from selfspec.drafters.readers.layer import LayerReader
from selfspec.heads import ExitHead
from selfspec.heads.mask import MaskToken
from selfspec.sampling.draft import Tree


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
