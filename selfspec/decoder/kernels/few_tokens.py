"""Products of a few tokens in float32 on a CPU.

torch computes x Wᵀ, for which MKL takes 2 to 3 times as long with 2 to 5 tokens as with one. The
transposed product, W xᵀ, takes as long with a few tokens as with one (`benchmarks/products.py`).
Both are sums of the same terms, in another order, so that they round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from selfspec.decoder.kernels.prepacked import may_stand_in

_MOST = 5  # tokens up to which it is faster
_SMALLEST = 2**16  # elements of a weight, below which calls take longer than products


def is_faster() -> bool:
    """Whether MKL multiplies, and faster in transposed products of a few tokens."""
    return torch.backends.mkl.is_available()


def transposed_forwards(
    *roots: nn.Module,
) -> Iterator[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """The linear layers in these modules that compute transposed products, with their forwards."""
    for root in roots if is_faster() else ():
        for module in root.modules():
            if type(module) is nn.Linear and "forward" not in module.__dict__ and _fits(module):
                yield module, _transposed(module)


def transposed_product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Outputs `[..., out]` of an input `[..., in]`, computed as W xᵀ."""
    states = input.reshape(-1, input.shape[-1])
    output = torch.mm(weight, states.t()).t().contiguous()
    if bias is not None:
        output += bias
    return output.view(*input.shape[:-1], -1)


def _fits(module: nn.Linear) -> bool:
    weight = module.weight
    if type(weight) is not nn.Parameter or weight.device.type != "cpu":
        return False
    return weight.dtype == torch.float32 and weight.numel() >= _SMALLEST and weight.is_contiguous()


def _transposed(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    width, most = module.in_features, _MOST * module.in_features

    def forward(input: Tensor) -> Tensor:
        if width < input.numel() <= most and may_stand_in(torch.float32):
            return transposed_product(input, module.weight, module.bias)
        return linear(input, module.weight, module.bias)

    return forward
