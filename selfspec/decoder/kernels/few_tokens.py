"""Products of a few tokens by FBGEMM, which reads weights in half precision as fast as they come.

On CPUs with AVX-512 but no AMX, oneDNN's product of a few tokens takes up to twice as long as its
weights take to be read. FBGEMM keeps them as float16 and multiplies in float32. So a weight is
taken only if float16 holds all of its values, as it does those of most checkpoints in bfloat16;
the products are then as exact as oneDNN's, and a token's do not depend on the tokens beside it.
"""

from __future__ import annotations

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
    """Maps `[..., in]` to `[..., out]`; `None` if it would not be faster, or not be exact.

    Args:
        weight: `[out, in]` in half precision.
        bias: `[out]`, or `None`.
    """
    if not takes(weight) or not torch.equal(weight.half().to(weight.dtype), weight):
        return None
    packed = _OPS.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())
    linear = _OPS.linear_dynamic_fp16
    return lambda input: linear(input.float(), packed).to(input.dtype)
