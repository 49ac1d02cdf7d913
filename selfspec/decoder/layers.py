"""Layers of a head's own, made of the target's."""

from __future__ import annotations

import torch
from torch import nn

from selfspec.decoder.quantized import dequantize


def trainable(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The copy of a decoder layer, with gradients; quantized weights become plain, in `dtype`.

    Raises:
        ValueError: the layer's weights are quantized in a way that cannot be undone.
    """
    dequantize(layer, dtype)
    return layer.requires_grad_(True)
