"""Linear maps with weights in the layout that oneDNN computes in, for half precision on a CPU.

A linear map in half precision brings its weights into blocks before it multiplies, in every call.
In a pass over few tokens that takes as long as the product. Done once and kept, it costs the
weights' memory a second time. oneDNN multiplies the same blocks in the same order either way, so
outputs are the same to the bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

_OPS: Any = torch.ops.mkldnn

Forward = Callable[[Tensor], Tensor]

_LOOKED_AT = 16  # numbers of a weight that tell whether it was changed behind torch's back


class _Packed(NamedTuple):
    """A packed weight, and what the weight was then.

    Attributes:
        weight: in oneDNN's layout.
        address: of the weight's memory.
        version: torch's count of its changes; those made through `.data` are not in it.
        sample: numbers from all over it.
    """

    weight: Tensor
    address: int
    version: int
    sample: Tensor


# Wrappers of one model share what was packed.
_PACKED: WeakKeyDictionary[nn.Module, _Packed] = WeakKeyDictionary()


class PrepackedLinears:
    """Packed weights of linear maps, kept while the weights stay what they are.

    Args:
        name: the model's, for the warning.
    """

    def __init__(self, name: str):
        self._name = name
        self._warned = False

    def forwards(self, *roots: nn.Module) -> Iterator[tuple[nn.Module, Forward]]:
        """The linear maps in these modules that can be packed, each with what to call instead."""
        found = False
        for root in roots:
            for module in root.modules():
                weight = _packable(module)
                if weight is not None:
                    found = True
                    yield module, _forward(module, weight, _pack(module, weight))
        if not found and not self._warned:
            self._warned = True
            warnings.warn(
                f"nothing of {self._name} can be prepacked: it takes linear maps in a half "
                "precision that this CPU computes in (bfloat16, and on some float16); the model "
                "runs as it is, with the same output: leave kernels out to get no warning",
                stacklevel=2,
            )


def _pack(module: nn.Module, weight: Tensor) -> Tensor:
    address, version = weight.data_ptr(), 0 if weight.is_inference() else weight._version
    sample = _sample(weight)
    held = _PACKED.get(module)
    known = held is not None and (held.address, held.version) == (address, version)
    if held is None or not known or not torch.equal(held.sample, sample):
        packed = _OPS._reorder_linear_weight(weight, 1)
        held = _PACKED[module] = _Packed(packed, address, version, sample.clone())
    return held.weight


def _sample(weight: Tensor) -> Tensor:
    rows = weight if weight.is_contiguous() else weight.t()
    flat = rows.reshape(-1)
    return flat[:: max(1, flat.shape[0] // _LOOKED_AT)]


def _packable(module: nn.Module) -> Tensor | None:
    """The weight `[out, in]` of a linear map that can be packed, or `None`."""
    if type(module) not in (nn.Linear, Conv1D) or "forward" in module.__dict__:
        return None  # with a `forward` of its own, device hooks bring the weights
    weight = module.weight
    if type(weight) is not nn.Parameter or weight.device.type != "cpu" or not _computes(weight):
        return None
    return weight.detach() if type(module) is nn.Linear else weight.detach().t()


def _computes(weight: Tensor) -> bool:
    """Whether oneDNN has kernels for such weights here."""
    if not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return _OPS._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float16 and _OPS._is_mkldnn_fp16_supported()


def _forward(module: Any, weight: Tensor, packed: Tensor) -> Forward:
    plain, bias, dtype, linear = module.forward, module.bias, weight.dtype, _OPS._linear_pointwise

    def forward(x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.dtype != dtype:
            return plain(x)
        return linear(x, packed, bias, "none", [], "")

    return forward
