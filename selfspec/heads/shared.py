"""The model's own final norm and LM head at an exit: nothing to train, nothing to store."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from selfspec.decoder import Decoder, Pass
from selfspec.heads.base import ExitHead


class SharedHead(ExitHead):
    """Reads an exit as if it were the last layer (LayerSkip, Elhoushi et al. 2024)."""

    kind = "shared"
    own_norm = False

    @classmethod
    def build(cls, decoder: Decoder, exit_layer: int, **options: Any) -> SharedHead:
        """A head without parameters."""
        return cls(exit_layer)

    def forward(self, at_exit: Pass) -> Tensor:
        """The exit's hidden states after the model's own final norm."""
        return at_exit.output
