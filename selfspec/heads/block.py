"""A decoder layer of the target's own class at an exit."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from selfspec.decoder import Decoder
from selfspec.heads.base import ExitHead, copy_final_norm, register_head


@register_head
class BlockHead(ExitHead):
    """A decoder layer, then a norm and the target's LM head (as in Kangaroo, Liu et al. 2024).

    The layer starts as a copy of one of the target's layers and has its own KV. The head folds
    into a stock checkpoint of `exit_layer + 1` layers.

    Args:
        exit_layer: number of layers below the exit.
        layer: the head's own decoder layer.
        place: index of the target's layer that it is a copy of.
        norm: the norm in front of the LM head.
        width: width of the residual stream.
    """

    kind = "block"

    def __init__(self, exit_layer: int, layer: nn.Module, place: int, norm: nn.Module, width: int):
        super().__init__(exit_layer)
        self.layer, self.place, self.norm, self.width = layer, place, norm, width

    @classmethod
    def build(cls, decoder: Decoder, exit_layer: int, **options: Any) -> BlockHead:
        """A copy of the next layer with attention; the option `place` names another to copy."""
        at = cls.check_exit(decoder, exit_layer)
        place = options["place"] if "place" in options else decoder.layer_for(at)
        norm = copy_final_norm(decoder)
        head = cls(exit_layer, decoder.copy_layer(place), place, norm, decoder.config.hidden_size)
        return head.to(decoder.device_at(exit_layer))

    @property
    def options(self) -> dict[str, Any]:
        """The index of the layer that was copied."""
        return {"place": self.place}

    def check(self, decoder: Decoder) -> None:
        """Raise ValueError unless exit layer, width and the copied layer fit `decoder`."""
        super().check(decoder)
        decoder.check_layer(self.place)

    def forward(self, hidden: Tensor) -> Tensor:
        """The layer's output after the head's norm."""
        return self.norm(hidden)
