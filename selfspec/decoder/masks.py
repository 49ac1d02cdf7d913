"""Additive attention masks of passes, over KV slots and over packed documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.decoder.cache import SlotCache, Window
from selfspec.decoder.gates import Gates


class Packing(NamedTuple):
    """Which tokens of packed rows belong together.

    Attributes:
        documents: `[rows, width]` which of its row's documents a token belongs to.
        positions: `[rows, width]` position of each token in its document.
        whole: whether every row is one document.
    """

    documents: Tensor
    positions: Tensor
    whole: bool

    @classmethod
    def of(cls, documents: Tensor, whole: bool = False) -> Packing:
        """The packing of rows with these document numbers; `whole` takes a row as one.

        A document ends where the number changes, and does not go on where the number comes again.
        """
        if whole:
            documents = torch.zeros_like(documents)
        places = torch.arange(documents.shape[1], device=documents.device)
        starts = torch.ones_like(documents, dtype=torch.bool)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        positions = places - (places * starts).cummax(-1).values
        return cls(starts.cumsum(-1), positions, whole or not bool(starts[:, 1:].any()))

    def mask(self, window: int | None, dtype: torch.dtype, step: int = 0) -> Tensor:
        """`[rows, 1, width, (step + 1) * width]` additive mask: 0 where a query may look.

        In its first reading (`step` 0) a token sees its document up to itself. In reading s it
        stands s tokens after the last verified one: of the first reading it sees what lies at
        least s tokens back, of each reading j after it only the token s - j back.
        """
        count = torch.arange(self.documents.shape[1], device=self.documents.device)
        back = count[:, None] - count
        readings = [back >= step, *(back == step - j for j in range(1, step + 1))]
        visible = torch.cat(readings, dim=1)
        if window is not None:
            visible = visible & (back < window).repeat(1, step + 1)
        same = self.documents[:, :, None] == self.documents[:, None]
        visible = visible & same.repeat(1, 1, step + 1)
        if step:
            # A draft that deep has no verified token of its own document; it sees itself alone.
            lost = (self.positions < step)[:, :, None]
            itself = torch.cat([torch.zeros_like(back, dtype=torch.bool)] * step + [back == 0], 1)
            visible = torch.where(lost, itself, visible)
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


# Which masks a pass brings, and when the family's own are right.


class Masks:
    """Additive masks of passes, one for each sliding window.

    Args:
        gates: the model's gates, which are in when masks are made.
        windows: per layer, the sliding window in tokens, or `None`.
    """

    def __init__(self, gates: Gates, windows: Sequence[int | None]):
        self._gates = gates
        self._kinds = {None, *windows}

    def of_slots(
        self, slots: SlotCache, window: Window, hidden: Tensor | None, added: bool
    ) -> dict[int | None, Tensor]:
        """Masks of a pass over slots; none where the family's own are right.

        Args:
            slots: the KV cache.
            window: what the pass writes.
            hidden: what it resumes from, if that is not its tokens.
            added: whether a head's own layer runs, which has not seen an earlier turn.
        """
        # A prefill from nothing is causal in every row, and one token of rows of equal length sees
        # all there is: the family's own mask is right then, and may be none at all. Anywhere else
        # masks come from the rows' lengths.
        simple = window.even and window.tight and window.width in (1, window.end)
        if simple and not self._gates.own_masks and not (added and any(slots.added_from)):
            return {}
        dtype = self._dtype(hidden)
        return {kind: slots.mask(kind, dtype, added) for kind in self._kinds}

    def of_packing(
        self, packing: Packing, hidden: Tensor | None, step: int
    ) -> dict[int | None, Tensor]:
        """Masks of a pass over packed text; none where the family's own are right.

        Args:
            packing: which tokens belong together.
            hidden: what the pass resumes from, if that is not its tokens.
            step: earlier readings of the text.
        """
        if packing.whole and step == 0 and not self._gates.own_masks:
            return {}
        dtype = self._dtype(hidden)
        return {window: packing.mask(window, dtype, step) for window in self._kinds}

    def _dtype(self, hidden: Tensor | None) -> torch.dtype:
        return self._gates.dtype if hidden is None else hidden.dtype
