"""Quantized weights: detecting them, and trainable copies of quantized layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from selfspec.decoder.devices import is_sharded


def is_quantized(weight: Tensor) -> bool:
    """Whether a weight is stored in another form than its values in a floating dtype."""
    # torchao's tensors report their compute dtype; those of bitsandbytes are integers.
    packed = is_traceable_wrapper_subclass(weight) and not is_sharded(weight)
    return packed or not weight.is_floating_point() or weight.dtype.itemsize == 1


@torch.no_grad()
def dequantize(layer: nn.Module, dtype: torch.dtype) -> None:
    """Replace a layer's quantized linear layers by plain ones with the same values.

    Raises:
        ValueError: something else than a linear map is quantized.
    """
    for path, linear in list(layer.named_modules()):
        if isinstance(linear, nn.Linear) and is_quantized(linear.weight):
            layer.set_submodule(path, _plain(linear, dtype))
    for name, weight in layer.named_parameters():
        if is_quantized(weight):
            raise ValueError(
                f"{name} of the layer to copy is quantized ({weight.dtype}) and belongs to no "
                "linear map, so its values cannot be recovered; choose a head without a layer of "
                "its own (shared, lens, lora)"
            )


def _plain(linear: nn.Linear, dtype: torch.dtype) -> nn.Linear:
    bias = linear.bias
    plain = nn.Linear(linear.in_features, linear.out_features, bias is not None, device="meta")
    # Libraries pack weights in many formats. Applied to the identity, a layer returns its values
    # whatever the format is.
    linear.bias = None  # pyright: ignore[reportAttributeAccessIssue]
    units = torch.eye(linear.in_features, dtype=dtype, device=linear.weight.device)
    plain.weight = nn.Parameter(linear(units).T.to(dtype).contiguous())
    if bias is not None:
        plain.bias = nn.Parameter(bias.detach().to(dtype))
    return plain


def trainable(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Make a copied decoder layer trainable; quantized weights become plain, in `dtype`.

    Raises:
        ValueError: the layer's weights are quantized in a way that cannot be undone.
    """
    dequantize(layer, dtype)
    return layer.requires_grad_(True)
