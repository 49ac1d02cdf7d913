"""Products of a few tokens by FBGEMM, which reads weights in half precision as fast as they come.

On CPUs with AVX-512 but no AMX, oneDNN's product of a few tokens takes up to twice as long as its
weights take to be read. FBGEMM keeps weights as float16 and multiplies in float32. Scaled by a
power of two, which the states are divided by, a weight in bfloat16 fits into float16 without loss,
but for numbers so small beside the largest that float32 sums lose them, too. So the products are
as exact as oneDNN's, and a token's do not depend on the tokens beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MOST_TOKENS = 4  # with more of them oneDNN is as fast
_LARGE = 1 << 18  # numbers of a weight; smaller ones stay in the caches between two passes

_OPS: Any = torch.ops.quantized


def takes(weight: Tensor) -> bool:
    """Whether FBGEMM is expected to be faster for a few tokens here; values are not looked at."""
    engines: Any = torch.backends.quantized
    has_kernels = engines.engine in ("x86", "fbgemm") and "fbgemm" in engines.supported_engines
    return has_kernels and not torch.cpu._is_amx_tile_supported() and weight.numel() >= _LARGE


def product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
    """Maps `[..., in]` to `[..., out]`; `None` if it would not be faster, or a weight is no number.

    Args:
        weight: `[out, in]` in half precision.
        bias: `[out]`, or `None`.
    """
    if not takes(weight):
        return None
    largest = float(weight.abs().max())
    if not math.isfinite(largest):
        return None
    power = 15 - math.frexp(largest)[1]  # the largest is then in [2^14, 2^15)
    packed = _OPS.linear_prepack_fp16(
        weight.float() * 2.0**power, None if bias is None else bias.float()
    )
    share, linear = torch.tensor([2.0**-power]), _OPS.linear_dynamic_fp16  # float32 times half
    return lambda input: linear(input * share, packed).to(input.dtype)
