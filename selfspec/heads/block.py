"""A decoder layer of the target's own class at an exit, alone or fused with deep features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from selfspec.decoder import Decoder
from selfspec.heads.base import (
    ExitHead,
    check_feature_layers,
    copy_final_norm,
    move_to_exit,
    register_head,
)
from selfspec.heads.mask import MaskToken

_EPS = 1e-6


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
        **_: Any,
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
    def options(self) -> dict[str, Any]:
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


@register_head
class FusedHead(BlockHead):
    """A block whose input is fused with deep features of the token before.

    The token at position t enters the layer as h_E(t) + J g(t-1). At a verified position g fuses
    low, middle and high residual streams of the target, as in EAGLE-3 (Li et al. 2025). At a
    drafted position, where the target's deep layers have not run, g is the output of the head's
    own layer. J starts at zero, so before training the head equals a block. With `exit_layer=0`
    the exit is the embedding, and the head drafts as EAGLE does.

    Args:
        exit_layer: number of layers below the exit.
        layer: the head's own decoder layer.
        place: index of the target's layer that it is a copy of.
        norm: the norm in front of the LM head.
        width: width of the residual stream.
        feature_layers: the residual streams to fuse, by the number of layers below each.
    """

    kind = "fused"
    lowest_exit = 0

    def __init__(
        self,
        exit_layer: int,
        layer: nn.Module,
        place: int,
        norm: nn.Module,
        width: int,
        feature_layers: tuple[int, ...],
    ):
        super().__init__(exit_layer, layer, place, norm, width)
        self.feature_layers = feature_layers
        self.feature_norms = nn.ModuleList(nn.RMSNorm(width, eps=_EPS) for _ in feature_layers)
        self.fuse = nn.Linear(width * len(feature_layers), width, bias=False)
        self.entry_norm = nn.RMSNorm(width, eps=_EPS)
        self.entry = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.entry.weight)

    @classmethod
    def build(cls, decoder: Decoder, exit_layer: int, **options: Any) -> FusedHead:
        """A block whose features still have weight zero.

        Raises:
            ValueError: `feature_layers` names residual streams that verification does not compute.
        """
        depth, width = decoder.depth, decoder.config.hidden_size
        at = cls.check_exit(decoder, exit_layer)
        place = options["place"] if "place" in options else decoder.layer_for(at)
        low = exit_layer or max(1, depth // 4)
        layers = tuple(options.get("feature_layers", (low, max(low, depth // 2), depth)))
        check_feature_layers(decoder, layers, exit_layer)
        norm = copy_final_norm(decoder)
        head = cls(exit_layer, decoder.copy_layer(place), place, norm, width, layers)
        head.add_parts(decoder, **options)
        for part in (head.feature_norms, head.fuse, head.entry_norm, head.entry):
            move_to_exit(part, decoder, exit_layer)
        return head.to(decoder.device_at(exit_layer))

    def check(self, decoder: Decoder) -> None:
        """Raise ValueError unless the head, its feature layers included, fits `decoder`."""
        super().check(decoder)
        check_feature_layers(decoder, self.feature_layers, self.exit_layer)

    @property
    def options(self) -> dict[str, Any]:
        """The index of the layer that was copied, and the residual streams to fuse."""
        return {**super().options, "feature_layers": list(self.feature_layers)}

    def fuse_features(self, features: list[Tensor]) -> Tensor:
        """Normalise each stream, then map all of them to one state."""
        # The norms differ only in their weights, so one operation does the work of all of them.
        weights = torch.stack([_weight(norm) for norm in self.feature_norms])
        streams = torch.stack([states.to(weights) for states in features], dim=-2)
        normed = rms_norm(streams, streams.shape[-1:], eps=_EPS) * weights
        return self.fuse(normed.flatten(-2))

    def enter(self, hidden: Tensor, features: Tensor | None) -> Tensor:
        """The residual stream at the exit plus the mapped features."""
        assert features is not None
        return hidden + self.entry(_normed(self.entry_norm, features))


def _normed(norm: nn.Module, states: Tensor) -> Tensor:
    # Under autocast the states have a narrower dtype than the norm's weight; with several devices
    # they may be on another one.
    return norm(states.to(_weight(norm)))


def _weight(norm: nn.Module) -> Tensor:
    assert isinstance(norm.weight, Tensor)
    return norm.weight
