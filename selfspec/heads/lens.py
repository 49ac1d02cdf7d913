"""A norm of its own and a low-rank correction in front of the target's LM head."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from selfspec.config import JsonObject
from selfspec.decoder import Decoder
from selfspec.heads.base import ExitHead, copy_final_norm, move_to_exit, register_head


@register_head
class LensHead(ExitHead):
    """h -> n + B A n with n = norm(h): a tuned lens (Belrose et al. 2023) of low rank.

    Its norm starts as a copy of the final norm and its correction as zero, so before training it
    predicts what `SharedHead` predicts. It folds into a stock checkpoint of `exit_layer` layers.

    Args:
        exit_layer: number of layers below the exit.
        norm: the norm in front of the LM head.
        width: width of the residual stream.
        rank: rank of the correction.
    """

    kind = "lens"

    def __init__(self, exit_layer: int, norm: nn.Module, width: int, rank: int):
        super().__init__(exit_layer)
        self.norm, self.width, self.rank = norm, width, rank
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.up.weight)

    @classmethod
    def build(cls, decoder: Decoder, exit_layer: int, **options: Any) -> LensHead:
        """A lens that equals the shared head; `rank` defaults to a quarter of the width."""
        width = decoder.config.hidden_size
        rank = options.get("rank", max(1, width // 4))
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}")
        head = cls(exit_layer, copy_final_norm(decoder), width, rank)
        return move_to_exit(head, decoder, exit_layer)

    @property
    def options(self) -> JsonObject:
        """The rank."""
        return {"rank": self.rank}

    def forward(self, hidden: Tensor) -> Tensor:
        """The corrected residual stream."""
        normed = self.norm(hidden)
        return normed + self.up(self.down(normed))
