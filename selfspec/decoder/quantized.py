"""Quantized weights: detecting them, and trainable copies of layers, quantized or adapted."""

from __future__ import annotations

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
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


@torch.no_grad()
def merge_adapters(layer: nn.Module) -> None:
    """Merge the active adapters of a copied layer into its weights, and remove the others.

    A head's own layer then has the same tensors whatever adapters the target has, so that a head
    fitted over one loads over the merged target, and one fitted to the base over an adapted one.

    Raises:
        ValueError: an adapter cannot be merged.
    """
    for path, part in reversed(list(layer.named_modules())):  # one may be inside another
        try:
            if isinstance(part, BaseTunerLayer):
                if part.merged and part.disable_adapters:
                    part.unmerge()
                elif not part.merged and not part.disable_adapters:
                    part.merge()
                layer.set_submodule(path, part.get_base_layer())
            elif isinstance(part, AuxiliaryTrainingWrapper):
                own = part.unload_and_optionally_merge_module(True, False, None)
                layer.set_submodule(path, part.original_module if part.disable_adapters else own)
        except NotImplementedError:
            raise ValueError(
                f"the adapter of {path} of the layer to copy ({type(part).__name__}) cannot be "
                "merged; choose a head without a layer of its own (shared, lens, lora)"
            ) from None


def trainable(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Make a copied decoder layer trainable, without adapters; quantized weights become plain.

    Args:
        layer: the copy.
        dtype: that of what was quantized.

    Raises:
        ValueError: an adapter cannot be merged, or the weights are quantized in a way that cannot
            be undone.
    """
    merge_adapters(layer)
    dequantize(layer, dtype)
    return layer.requires_grad_(True)
