"""Products of a few tokens in float32 on a CPU.

torch hands a linear map's product to MKL as states times weights. MKL computes that of 2 to 5 tokens
several times more slowly than that of one: up to 3.4 times, on a CPU with AVX2, for an LM head over
49,152 tokens. As weights times states the same product takes hardly longer than that of one token
(`benchmarks/products.py`). Both are sums of the same products, rounded in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

_MOST = 5  # tokens for which it is faster
_SMALLEST = 2**16  # elements of a weight; a smaller product is over before it is turned around


def turned_products(*roots: nn.Module) -> Iterator[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """The linear layers in these modules whose products are turned around, with their forwards."""
    if not torch.backends.mkl.is_available():
        return
    for root in roots:
        for module in root.modules():
            if type(module) is nn.Linear and "forward" not in module.__dict__ and _takes(module):
                yield module, _turned(module)


def _takes(module: nn.Linear) -> bool:
    weight = module.weight
    return (
        type(weight) is nn.Parameter
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and weight.numel() >= _SMALLEST
    )


def _turned(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    plain, width, most = module.forward, module.in_features, _MOST * module.in_features

    def forward(input: Tensor) -> Tensor:
        if not width < input.numel() <= most:
            return plain(input)
        output = torch.mm(module.weight, input.reshape(-1, width).t()).t().contiguous()
        if module.bias is not None:
            output += module.bias
        return output.view(*input.shape[:-1], -1)

    return forward
