"""The target's own final norm and LM head at an exit: nothing to train, nothing to store."""

from __future__ import annotations

from torch import Tensor, nn

from selfspec.decoder import Decoder
from selfspec.heads.base import ExitHead, register_head


@register_head
class SharedHead(ExitHead):
    """Reads an exit as if it were the last layer (LayerSkip, Elhoushi et al. 2024).

    Args:
        exit_layer: number of layers below the exit.
        norm: the target's final norm, which stays a part of the target.
    """

    kind = "shared"

    def __init__(self, exit_layer: int, norm: nn.Module):
        super().__init__(exit_layer)
        self._norm = (norm,)

    @classmethod
    def build(cls, decoder: Decoder, exit_layer: int, **options: object) -> SharedHead:
        """A head without parameters."""
        return cls(exit_layer, decoder.final_norm or nn.Identity())

    @property
    def is_plain(self) -> bool:
        """True unless the vocabulary is trimmed."""
        return self.vocab_ids is None

    def forward(self, hidden: Tensor) -> Tensor:
        """The residual stream after the target's final norm."""
        return self._norm[0](hidden)
