"""One more decoder layer of the model's own class at an exit."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from selfspec.decoder import Decoder
from selfspec.heads.base import ExitHead, check_exit_layer, check_width, own_norm


class BlockHead(ExitHead):
    """A decoder layer on the exit, then a norm and the target's LM head (as in Kangaroo).

    The layer starts as a copy of one of the target's and has KV of its own. It folds into a stock
    checkpoint of `exit_layer + 1` layers.

    Args:
        exit_layer: number of layers below the exit.
        layer: the head's own decoder layer.
        place: the target's layer in whose place it runs.
        norm: the norm in front of the LM head.
        width: width of the residual stream.
    """

    kind = "block"

    def __init__(self, exit_layer: int, layer: nn.Module, place: int, norm: nn.Module, width: int):
        super().__init__(exit_layer)
        self.layer, self.place, self.norm, self.width = layer, place, norm, width

    @classmethod
    def build(cls, decoder: Decoder, exit_layer: int, **options: Any) -> BlockHead:
        """A copy of the layer above the exit; `place` names another to copy."""
        place = options.get("place", check_exit_layer(decoder, exit_layer))
        norm = own_norm(decoder)
        head = cls(exit_layer, decoder.copy_layer(place), place, norm, decoder.config.hidden_size)
        return head.to(decoder.device_at(exit_layer))

    @property
    def options(self) -> dict[str, Any]:
        """The layer that was copied."""
        return {"place": self.place}

    def check(self, decoder: Decoder) -> None:
        """Raise ValueError unless exit layer, place and width fit `decoder`."""
        super().check(decoder)
        check_width(decoder, self.width, self.kind)
        decoder.check_layer(self.place)

    def forward(self, hidden: Tensor) -> Tensor:
        """What the head's layer left, after the head's norm."""
        return self.norm(hidden)
