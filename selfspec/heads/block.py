"""A decoder layer of the target's own class at an exit."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from selfspec.config import JsonObject
from selfspec.decoder import Decoder
from selfspec.heads.base import ExitHead, copy_final_norm, move_to_exit, register_head
from selfspec.heads.mask import MaskToken


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
        """A copy of the next layer with attention; the option `place` names another to copy.

        With `parallel` the head makes all drafts of a round in one pass over the newest token and
        masks (`MaskToken`); `markov` is the rank of the bias by the token before. With `confidence`
        it also predicts whether each of its sampled drafts is accepted.
        """
        at = cls.check_exit(decoder, exit_layer)
        place = options["place"] if "place" in options else decoder.layer_for(at)
        norm = copy_final_norm(decoder)
        head = cls(exit_layer, decoder.copy_layer(place), place, norm, decoder.config.hidden_size)
        head.add_parts(decoder, **options)
        return head.to(decoder.device_at(exit_layer))

    def add_parts(
        self,
        decoder: Decoder,
        parallel: bool = False,
        markov: int = 0,
        confidence: bool = False,
        **_: object,
    ) -> None:
        """Draft in one pass, if `parallel`; predict acceptance, if `confidence`.

        Raises:
            ValueError: `markov` is negative, or the head is not `parallel`; there is a recurrent
                layer below the exit.
        """
        if markov < 0 or (markov and not parallel):
            raise ValueError(
                f"markov is the rank of a {self.kind} head's bias, at least 0, and needs "
                f"parallel=True; got {markov=}, {parallel=}"
            )
        if parallel and any(index < self.exit_layer for index in decoder.recurrent_layers):
            raise ValueError(
                f"layer {decoder.recurrent_layers[0]} below exit_layer {self.exit_layer} is "
                "recurrent, so it cannot run over a mask after every token, which fitting a "
                "parallel head needs; leave parallel out, or take a fused head at exit_layer 0"
            )
        if parallel:
            self.mask = move_to_exit(MaskToken(decoder, markov), decoder, self.exit_layer)
            self.drafts_at_once = True
        if confidence:
            assert self.width is not None
            self.confidence = move_to_exit(nn.Linear(self.width, 1), decoder, self.exit_layer)

    @property
    def options(self) -> JsonObject:
        """The index of the copied layer, and the options of what `add_parts` added."""
        of_mask = {} if self.mask is None else self.mask.options
        of_confidence = {} if self.confidence is None else {"confidence": True}
        return {"place": self.place, **of_mask, **of_confidence}

    def trim(self, decoder: Decoder, vocab_ids: Tensor) -> None:
        """Draft only the tokens in `vocab_ids`."""
        super().trim(decoder, vocab_ids)
        if isinstance(self.mask, MaskToken):
            self.mask.trim(vocab_ids)

    def check(self, decoder: Decoder) -> None:
        """Raise ValueError unless exit layer, width and the copied layer fit `decoder`."""
        super().check(decoder)
        decoder.check_layer(self.place)

    def forward(self, hidden: Tensor) -> Tensor:
        """The layer's output after the head's norm."""
        return self.norm(hidden)
