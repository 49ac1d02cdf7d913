"""Modules called by their forward alone.

`nn.Module.__call__` looks after hooks. Where there are none it still takes time, between products
of matrices, with cold caches, as long as the arithmetic of a small operation; and so does finding a
child among the modules of its parent. A layer has a dozen of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook


class Direct(partial):
    """A module's forward, which in everything else is the module.

    Args:
        forward: what a call comes down to.
        module: the module.
    """

    module: nn.Module

    def __new__(cls, forward: Callable[..., Any], module: nn.Module) -> Direct:
        """Keep the module beside its forward."""
        self = super().__new__(cls, forward)
        self.module = module
        return self

    def __getattr__(self, name: str) -> Any:
        """What the module has: layers ask linear maps for their weight, or for its dtype."""
        return getattr(self.__dict__["module"], name)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What `isinstance` goes by."""
        return type(self.__dict__["module"])


def is_watched(module: nn.Module) -> bool:
    """Whether a call of the module is more than its forward."""
    hooks = module._forward_hooks or module._forward_pre_hooks or _has_any_global_hook()
    return bool(hooks) or module._compiled_call_impl is not None


def direct(module: nn.Module) -> Callable[..., Any]:
    """What a call of the module comes down to."""
    if is_watched(module):
        return module
    plain = type(module) is nn.Embedding and "forward" not in module.__dict__
    if plain and type(module.weight) is nn.Parameter and module.max_norm is None:
        return partial(_look_up, module.weight)
    return module.forward


def _look_up(weight: Tensor, input: Tensor) -> Tensor:
    return torch.embedding(weight, input)  # the forward's other arguments are for training


def shortcuts(roots: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str, Direct]]:
    """Below these modules each parent, the name of a child, and what may be called instead."""
    for root in roots:
        for parent in root.modules():
            for name, child in parent._modules.items():
                if child is not None and not is_watched(child) and _has_forward(child):
                    yield parent, name, Direct(child.forward, child)


def _has_forward(module: nn.Module) -> bool:
    """Whether it is more than a container, whose modules are looked up in it."""
    return type(module).forward is not nn.Module.forward
