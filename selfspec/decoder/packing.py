"""Packed documents: which tokens belong together, and the attention masks that keep them apart."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Packing(NamedTuple):
    """The documents in packed rows.

    Attributes:
        documents: `[rows, width]` the number of the document that a token belongs to.
        positions: `[rows, width]` position of each token in its document.
        whole: whether every row is one document.
    """

    documents: Tensor
    positions: Tensor
    whole: bool

    @classmethod
    def of(cls, documents: Tensor, whole: bool = False) -> Packing:
        """The packing for these document numbers; with `whole` each row is one document.

        A document ends where the number changes; the same number later is another document.
        """
        if whole:
            documents = torch.zeros_like(documents)
        counted = torch.arange(documents.shape[1], device=documents.device)
        starts = torch.ones_like(documents, dtype=torch.bool)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        positions = counted - (counted * starts).cummax(-1).values
        return cls(starts.cumsum(-1), positions, whole or not bool(starts[:, 1:].any()))

    @property
    def lengths(self) -> list[int] | None:
        """Tokens of each document, row after row; `None` if every row is one document."""
        if self.whole:
            return None
        starts = (self.positions == 0).flatten().nonzero()[:, 0].tolist()
        return [end - start for start, end in pairwise([*starts, self.positions.numel()])]

    def mask(
        self, window: int | None, dtype: torch.dtype, step: int = 0, skips_first: bool = False
    ) -> Tensor:
        """`[rows, 1, width, (step + 1) * width]` additive mask: 0 where a query may look.

        In step 0 a token sees its document up to itself. In step s it is a draft s tokens after the
        last verified one: of step 0 it sees the tokens at least s back, of each later step j only
        the token s - j back. With `skips_first` nothing but itself sees the first token of a
        document.
        """
        count = torch.arange(self.documents.shape[1], device=self.documents.device)
        back = count[:, None] - count
        readings = [back >= step, *(back == step - j for j in range(1, step + 1))]
        visible = torch.cat(readings, dim=1)
        if window is not None:
            visible = visible & (back < window).repeat(1, step + 1)
        same = self.documents[:, :, None] == self.documents[:, None]
        visible = visible & same.repeat(1, 1, step + 1)
        if skips_first:
            visible = visible & (self.positions > 0)[:, None].repeat(1, 1, step + 1)
        if step or skips_first:
            # So early in a document there is no verified token; the draft sees only itself.
            lost = (self.positions < step + skips_first)[:, :, None]
            itself = torch.cat([torch.zeros_like(back, dtype=torch.bool)] * step + [back == 0], 1)
            visible = torch.where(lost, itself, visible)
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
