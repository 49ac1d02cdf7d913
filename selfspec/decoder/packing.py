"""Packed text: several documents in a row that do not see one another."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
        stands s tokens behind the last verified one: of the first reading it sees what lies at
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
