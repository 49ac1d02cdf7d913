"""A decoder layer that also reads what the target made of the token before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from selfspec.decoder import Decoder
from selfspec.heads.base import check_exit_layer, own_norm, placed
from selfspec.heads.block import BlockHead

_EPS = 1e-6


class FusedHead(BlockHead):
    """A block on the exit joined with deep features of the verified prefix.

    The token at position t enters the layer as h_E(t) + J g(t-1). g joins low, middle and high
    residual streams of the target's last full pass, as in EAGLE-3 (Li et al. 2025); at a drafted
    position, which no full pass has seen, it is what the head's own layer left. J starts at zero,
    so before training the head is a block. With `exit_layer=0` the exit is the embedding, and the
    head drafts as EAGLE does.

    Args:
        exit_layer: number of layers below the exit.
        layer: the head's own decoder layer.
        place: the target's layer in whose place it runs.
        norm: the norm in front of the LM head.
        width: width of the residual stream.
        feature_layers: the residual streams that are joined, by the number of layers below.
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
        """A block that does not yet listen to the features.

        Raises:
            ValueError: `feature_layers` names residual streams that a verifying pass does not see.
        """
        depth, width = decoder.depth, decoder.config.hidden_size
        place = options.get("place", check_exit_layer(decoder, exit_layer, cls.lowest_exit))
        low = exit_layer or max(1, depth // 4)
        layers = tuple(options.get("feature_layers", (low, max(low, depth // 2), depth)))
        check_feature_layers(decoder, layers, exit_layer)
        norm = own_norm(decoder)
        head = cls(exit_layer, decoder.copy_layer(place), place, norm, width, layers)
        for part in (head.feature_norms, head.fuse, head.entry_norm, head.entry):
            placed(part, decoder, exit_layer)
        return head.to(decoder.device_at(exit_layer))

    @property
    def joining(self) -> list[nn.Module]:
        """The norms of the streams, and their linear map."""
        return [self.feature_norms, self.fuse]

    def check(self, decoder: Decoder) -> None:
        """Raise ValueError unless exit layer, place, width and feature layers fit `decoder`."""
        super().check(decoder)
        check_feature_layers(decoder, self.feature_layers, self.exit_layer)

    @property
    def options(self) -> dict[str, Any]:
        """The layer that was copied, and the residual streams that are read."""
        return {**super().options, "feature_layers": list(self.feature_layers)}

    def join(self, features: list[Tensor]) -> Tensor:
        """Each stream normed, then one linear map of all."""
        # The norms differ in their weights alone: one operation for all of them takes as long as
        # one of theirs.
        weights = torch.stack([_weight(norm) for norm in self.feature_norms])
        streams = torch.stack([states.to(weights) for states in features], dim=-2)
        normed = rms_norm(streams, streams.shape[-1:], eps=_EPS) * weights
        return self.fuse(normed.flatten(-2))

    def enter(self, hidden: Tensor, features: Tensor | None) -> Tensor:
        """The exit plus what the features say; before a text's first token they say nothing."""
        assert features is not None
        return hidden + self.entry(_normed(self.entry_norm, features))


def check_feature_layers(decoder: Decoder, layers: Sequence[int], exit_layer: int) -> None:
    """Raise ValueError unless a verifying pass from the exit sees these residual streams."""
    if not layers or not all(exit_layer <= layer <= decoder.depth for layer in layers):
        raise ValueError(
            f"feature_layers must be in [{exit_layer}, {decoder.depth}], got {list(layers)}; "
            "verification resumes at the exit, and sees nothing below it"
        )


def _normed(norm: nn.Module, states: Tensor) -> Tensor:
    # Under autocast the streams come narrower than the norm's weight, and each from the device of
    # its own layer.
    return norm(states.to(_weight(norm)))


def _weight(norm: nn.Module) -> Tensor:
    assert isinstance(norm.weight, Tensor)
    return norm.weight
