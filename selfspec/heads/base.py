"""What an exit head is: a small module that turns an exit's hidden states into draft logits."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from selfspec.decoder import Decoder, Pass


class ExitHead(nn.Module):
    """An early exit behind the first `exit_layer` layers.

    A head maps what a shallow pass left to the input of the target's LM head; the target's own tail
    (`Decoder.unembed`) makes logits of it, so LM-head weights are shared and never stored.

    Attributes:
        kind: the head's name in configs and files.
        exit_layer: number of layers below the exit.
        own_norm: whether the head does something between the layers and the LM head; without, a
            shallow pass goes straight through the target's own norm and LM head.
    """

    kind: ClassVar[str]
    own_norm: ClassVar[bool] = True

    def __init__(self, exit_layer: int):
        super().__init__()
        self.exit_layer = exit_layer

    @classmethod
    def build(cls, decoder: Decoder, exit_layer: int, **options: Any) -> ExitHead:
        """A head for `decoder`, as it is before any training."""
        raise NotImplementedError

    @property
    def options(self) -> dict[str, Any]:
        """What `build` needs, besides the exit layer, to make a head of this shape."""
        return {}

    def check(self, decoder: Decoder) -> None:
        """Raise ValueError unless the head fits `decoder`."""
        check_exit_layer(decoder, self.exit_layer)

    def forward(self, at_exit: Pass) -> Tensor:
        """Input of the LM head, `[rows, width, hidden]`, for a pass that ended before it."""
        raise NotImplementedError


def check_exit_layer(decoder: Decoder, exit_layer: int) -> int:
    """Return `exit_layer` if something lies below and above it, else raise ValueError."""
    if not 1 <= exit_layer < decoder.depth:
        raise ValueError(
            f"exit_layer must be in [1, {decoder.depth - 1}], got {exit_layer}; "
            f"the model has {decoder.depth} layers, and an exit needs layers below and above it"
        )
    return exit_layer
