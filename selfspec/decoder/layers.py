"""A layer of one's own, made of one of the target's."""

from __future__ import annotations

import copy

from torch import nn

# What attention modules call their number, by which they address the cache.
_NUMBERS = ("layer_idx", "layer_id")


def own_layer(layer: nn.Module, number: int) -> nn.Module:
    """A trainable copy of a decoder layer whose KV goes to layer `number` of the cache.

    Raises:
        ValueError: the layer's weights are quantized, which gradients cannot train.
    """
    own = copy.deepcopy(layer)
    for name, parameter in own.named_parameters():
        if not parameter.is_floating_point():
            raise ValueError(
                f"{name} of the layer to copy is {parameter.dtype}, which cannot be trained; "
                "fit heads with a layer of their own on the target before it is quantized"
            )
        parameter.requires_grad_(True)
    for module in own.modules():
        for attribute in _NUMBERS:
            if isinstance(getattr(module, attribute, None), int):
                setattr(module, attribute, number)
    return own
