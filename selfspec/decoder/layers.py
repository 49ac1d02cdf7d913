"""Layers of a head's own, made of the target's."""

from __future__ import annotations

from torch import nn


def trainable(layer: nn.Module) -> nn.Module:
    """The copy of a decoder layer, with gradients.

    Raises:
        ValueError: the layer's weights are quantized, which gradients cannot train.
    """
    for name, parameter in layer.named_parameters():
        if not parameter.is_floating_point():
            raise ValueError(
                f"{name} of the layer to copy is {parameter.dtype}, which cannot be trained; "
                "fit heads with a layer of their own on the target before it is quantized"
            )
        parameter.requires_grad_(True)
    return layer
