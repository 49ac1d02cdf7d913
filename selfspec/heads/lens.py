"""A norm of its own and a low-rank correction in front of the target's LM head."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.decoder import Decoder, Pass
from selfspec.heads.base import ExitHead


class LensHead(ExitHead):
    """h -> n + B A n with n = norm(h): a tuned lens (Belrose et al. 2023) of low rank.

    It starts as the identity behind a copy of the final norm, so before training it says what
    `SharedHead` says. It folds into a stock checkpoint of `exit_layer` layers.

    Args:
        exit_layer: number of layers below the exit.
        norm: the norm in front of the LM head.
        width: width of the residual stream.
        rank: rank of the correction.
    """

    kind = "lens"

    def __init__(self, exit_layer: int, norm: nn.Module, width: int, rank: int):
        super().__init__(exit_layer)
        self.rank = rank
        self.norm = norm
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.up.weight)

    @classmethod
    def build(cls, decoder: Decoder, exit_layer: int, **options: Any) -> LensHead:
        """A lens that equals the shared head; `rank` defaults to a quarter of the width."""
        width = decoder.config.hidden_size
        rank = options.get("rank", max(1, width // 4))
        norm = copy.deepcopy(decoder.final_norm)
        where = next(norm.parameters(), torch.empty(0, dtype=decoder.dtype, device=decoder.device))
        return cls(exit_layer, norm, width, rank).to(where.device, where.dtype)

    @property
    def options(self) -> dict[str, Any]:
        """The rank."""
        return {"rank": self.rank}

    def check(self, decoder: Decoder) -> None:
        """Raise ValueError unless exit layer and width fit `decoder`."""
        super().check(decoder)
        width = decoder.config.hidden_size
        if self.down.in_features != width:
            raise ValueError(
                f"a lens of width {self.down.in_features} does not fit a target of width {width}; "
                "load the target it was fitted to"
            )

    def forward(self, at_exit: Pass) -> Tensor:
        """The corrected exit."""
        normed = self.norm(at_exit.hidden)
        return normed + self.up(self.down(normed))
