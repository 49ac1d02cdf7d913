"""The reader of heads without a layer that make all drafts of a round from one state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from selfspec.decoder import Pass
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.drafters.readers.base import ExitReader
from selfspec.drafters.readers.by_row import append_rows, pick, pick_from
from selfspec.heads import ExitHead
from selfspec.sampling.draft import Tree


class OnePassReader(ExitReader):
    """Draft logits of a head that makes all drafts from the state before the pending token."""

    def __init__(self, engine: Engine, head: ExitHead):
        super().__init__(engine, head)
        self.keep = head.feature_layers
        self._features = torch.empty(0)  # [rows, m, hidden] states from position `_starts` on
        self._starts: list[int] = []
        self._drafts = torch.empty(0)  # [rows, heads, vocab] the logits of the round
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
                self._drafts = self._spread(self.head.all_logits(self.decoder, features))
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

    def join(self, other: Any) -> None:
        """Append the rows of another reader."""
        self._features, self._starts = (
            append_rows(self._features, other._features),
            self._starts + other._starts,
        )

    def _fuse(self, state: State, kept: list[Tensor]) -> Tensor:
        with state.stats.clock("head"):
            return self.head.fuse_features(kept)
