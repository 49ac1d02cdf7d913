"""Products of a few tokens in float32 on a CPU.

torch has MKL multiply states by weights. For 2 to 5 tokens MKL then takes 2 to 3 times as long
as for one. Weights by states, the same product takes as long as that of one token
(`benchmarks/products.py`). Both are sums of the same terms, rounded in another order.
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
    """Whether MKL multiplies, so that products of a few tokens are turned around."""
    return torch.backends.mkl.is_available()


def turned_forwards(*roots: nn.Module) -> Iterator[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """The linear layers in these modules whose products are turned around, with their forwards."""
    for root in roots if is_faster() else ():
        for module in root.modules():
            if type(module) is nn.Linear and "forward" not in module.__dict__ and _fits(module):
                yield module, _turned(module)


def turned_product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Outputs `[..., out]` of an input `[..., in]`, as weights by states."""
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


def _turned(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    width, most = module.in_features, _MOST * module.in_features

    def forward(input: Tensor) -> Tensor:
        if width < input.numel() <= most and may_stand_in(torch.float32):
            return turned_product(input, module.weight, module.bias)
        return linear(input, module.weight, module.bias)

    return forward
