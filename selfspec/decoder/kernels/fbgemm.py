"""Products by FBGEMM, for weights in half precision on a CPU without AMX.

A CPU with AVX-512 computes products of a few tokens in less time by FBGEMM than by oneDNN
(`benchmarks/products.py`). Without AVX-512, oneDNN has no products in half precision, and torch's
own take as many times longer as there are tokens; there FBGEMM computes all. It keeps weights as
float16 and multiplies in float32. Weights are multiplied by a power of two and states divided by
it, so that bfloat16 fits into float16 without loss; only numbers that a float32 sum would lose
beside the largest are lost. So products are as exact as oneDNN's, and those of a token do not
depend on the tokens beside it.
"""

from __future__ import annotations

import math
import sys
import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from selfspec.decoder.direct import Forward

_OPS: Any = torch.ops.quantized
_ENGINES: Any = torch.backends.quantized

if TYPE_CHECKING or "fbgemm" not in _ENGINES.supported_engines:
    Packed = object
else:  # the type of its weights, as scripts know it
    Packed = torch.classes.quantized.LinearPackedParamsBase


def is_faster() -> bool:
    """Whether FBGEMM is there, and expected to be faster than oneDNN for a few tokens."""
    has_kernels = _ENGINES.engine in ("x86", "fbgemm") and "fbgemm" in _ENGINES.supported_engines
    return has_kernels and not torch.cpu._is_amx_tile_supported()


class Product:
    """Maps states `[..., in]` to `[..., out]`, rounded once, to the dtype of the states.

    Attributes:
        held: FBGEMM's weight with the bias, and `[1]` by what states are multiplied for it, as
            `multiply` takes them.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        power = 15 - math.frexp(float(weight.abs().max()))[1]  # the largest is in [2^14, 2^15)
        packed = _OPS.linear_prepack_fp16(
            weight.float() * 2.0**power, None if bias is None else bias.float()
        )
        # In float32, and with a dimension: states become float32.
        self.held = packed, torch.tensor([2.0**-power], device="cpu")
        self._run = scripted(multiply)

    def __call__(self, input: Tensor) -> Tensor:
        """Outputs `[..., out]`, in the dtype of the input `[..., in]`."""
        if input.dim() == 1:  # FBGEMM wants rows
            return self(input[None])[0]
        return self._run(input, *self.held).to(input.dtype)


def multiply(states: Tensor, packed: Packed, inverse: Tensor) -> Tensor:
    """The product in float32, of states in any dtype."""
    return torch.ops.quantized.linear_dynamic_fp16(states * inverse, packed)


def product(weight: Tensor, bias: Tensor | None) -> Product | None:
    """The product for a weight; `None` where FBGEMM is not faster, or cannot hold it.

    Args:
        weight: `[out, in]` in half precision.
        bias: `[out]`, or `None`.
    """
    if not is_faster():
        return None
    largest = float(weight.abs().max())
    if not 2.0**-64 < largest < 2.0**64:  # zero, infinite, NaN, or its scale leaves float32
        return None
    return Product(weight, bias)


def has_scripts() -> bool:
    """Whether torch supports TorchScript with this version of Python."""
    return sys.version_info < (3, 14)


@cache
def scripted(function: Forward) -> Forward:
    """A function, compiled by TorchScript where this Python has it: once in a process.

    A script calls FBGEMM's product in 4 us, Python in 12.
    """
    if not has_scripts():
        return function
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        return torch.jit.script(function)
