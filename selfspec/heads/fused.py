"""A decoder layer that also reads the target's deep hidden states of the token before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from selfspec.config import JsonObject
from selfspec.decoder import Decoder
from selfspec.heads.base import (
    check_feature_layers,
    copy_final_norm,
    move_to_exit,
    register_head,
)
from selfspec.heads.block import BlockHead

_EPS = 1e-6


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
    def options(self) -> JsonObject:
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
