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
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.decoder.direct import Forward

_OPS: Any = torch.ops.quantized


def is_faster() -> bool:
    """Whether FBGEMM is there, and expected to be faster than oneDNN for a few tokens."""
    engines: Any = torch.backends.quantized
    has_kernels = engines.engine in ("x86", "fbgemm") and "fbgemm" in engines.supported_engines
    return has_kernels and not torch.cpu._is_amx_tile_supported()


class Product(nn.Module):
    """Maps states `[..., in]` in any dtype to `[..., out]` in float32.

    Attributes:
        packed: FBGEMM's weight, with the bias.
        inverse: `[1]`, by what states are multiplied for it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        power = 15 - math.frexp(float(weight.abs().max()))[1]  # the largest is in [2^14, 2^15)
        self.packed = _OPS.linear_prepack_fp16(
            weight.float() * 2.0**power, None if bias is None else bias.float()
        )
        # In float32, and with a dimension: states become float32.
        self.inverse = torch.tensor([2.0**-power])

    def forward(self, states: Tensor) -> Tensor:
        """The product."""
        return torch.ops.quantized.linear_dynamic_fp16(states * self.inverse, self.packed)


class Rounded:
    """A product whose outputs are rounded to the dtype of the input.

    Args:
        product: computes it in float32.
    """

    def __init__(self, product: Product):
        self.product = product
        self._run = scripted(product)

    def __call__(self, input: Tensor) -> Tensor:
        """Outputs `[..., out]`, in the dtype of the input `[..., in]`."""
        if input.dim() == 1:  # FBGEMM wants rows
            return self(input[None])[0]
        return self._run(input).to(input.dtype)


def product(weight: Tensor, bias: Tensor | None) -> Rounded | None:
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
    return Rounded(Product(weight, bias))


def has_scripts() -> bool:
    """Whether torch supports TorchScript with this version of Python."""
    return sys.version_info < (3, 14)


def scripted(module: nn.Module) -> Forward:
    """A module's forward, compiled by TorchScript where this Python has it.

    A script calls FBGEMM's product in 4 us, Python in 12.
    """
    if not has_scripts():
        return module.forward
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(module).forward
