"""Products of a few tokens by FBGEMM, for weights in half precision on a CPU without AMX.

They take less time there than oneDNN's (`benchmarks/products.py`). FBGEMM keeps weights as float16
and multiplies in float32. Weights are multiplied by a power of two and states divided by it, so
that bfloat16 fits into float16 without loss; only numbers that a float32 sum would lose beside the
largest are lost. So products are as exact as oneDNN's, and those of a token do not depend on the
tokens beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MOST_TOKENS = 4  # with more of them oneDNN is as fast

_OPS: Any = torch.ops.quantized


def is_faster() -> bool:
    """Whether FBGEMM is there, and expected to be faster for a few tokens."""
    engines: Any = torch.backends.quantized
    has_kernels = engines.engine in ("x86", "fbgemm") and "fbgemm" in engines.supported_engines
    return has_kernels and not torch.cpu._is_amx_tile_supported()


def product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
    """Maps `[..., in]` to `[..., out]`; `None` where FBGEMM is not faster, or cannot hold a weight.

    Args:
        weight: `[out, in]` in half precision.
        bias: `[out]`, or `None`.
    """
    if not is_faster():
        return None
    largest = float(weight.abs().max())
    if not 2.0**-64 < largest < 2.0**64:  # zero, infinite, NaN, or its scale leaves float32
        return None
    power = 15 - math.frexp(largest)[1]  # the largest is then in [2^14, 2^15)
    packed = _OPS.linear_prepack_fp16(
        weight.float() * 2.0**power, None if bias is None else bias.float()
    )
    linear = _OPS.linear_dynamic_fp16
    share = torch.tensor([2.0**-power])  # in float32, and with a dimension: states become float32

    def few(input: Tensor) -> Tensor:
        if input.dim() == 1:  # FBGEMM wants rows
            return few(input[None])[0]
        return linear(input * share, packed).to(input.dtype)

    return few
