"""Calls of modules and forwards without what surrounds them.

`nn.Module.__call__` looks for hooks, and transformers wraps the forwards of models in decorators.
Where there are no hooks, the plain forward is called. In passes over few tokens of small models
this saves several per cent of the time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, make_dataclass
from functools import cache, partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers.utils.generic import ModelOutput


class Direct:
    """A module that is called by its forward, as long as no hook wants to know of it.

    In everything else it is the module: layers ask a linear map for its weight, or what it is.

    Args:
        module: the module.
        forward: what a call without hooks comes down to.
    """

    __slots__ = ("_forward", "_hooks", "_module", "_pre_hooks")

    def __init__(self, module: nn.Module, forward: Callable[..., Any]):
        keep = partial(object.__setattr__, self)
        keep("_module", module)
        keep("_forward", forward)
        keep("_hooks", module._forward_hooks)
        keep("_pre_hooks", module._forward_pre_hooks)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        if self._hooks or self._pre_hooks:  # they may have come since
            return self._module(*args, **kwargs)
        return self._forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What the module has."""
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Give it to the module."""
        setattr(self._module, name, value)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What `isinstance` goes by."""
        return type(self._module)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is one of the module."""
        return _itself, (self._module,)


def _itself(module: nn.Module) -> nn.Module:
    return module


def is_watched(module: nn.Module) -> bool:
    """Whether a call of the module is more than its forward."""
    hooks = (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch_module._has_any_global_hook()
    )
    own = type(module).__call__ is not nn.Module.__call__
    return bool(hooks) or own or is_compiled(module)


def is_compiled(module: nn.Module) -> bool:
    """Whether its user has it compiled: the compiler looks for modules in it."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def hooked_part(layer: nn.Module) -> str | None:
    """The first module in a layer that is more than its class's forward, by its path."""
    for path, part in layer.named_modules():
        if part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__:
            return f"{type(layer).__name__}.{path}".rstrip(".")
    return None


def direct(module: nn.Module) -> Callable[..., Any]:
    """What calls the module in the shortest way."""
    if is_watched(module):
        return module
    plain = type(module) is nn.Embedding and "forward" not in module.__dict__
    if plain and type(module.weight) is nn.Parameter and module.max_norm is None:
        return Direct(module, partial(_look_up, module.weight))
    return Direct(module, module.forward)


class Callee(NamedTuple):
    """A module and its forward: what is called where a call of `Direct` would be one too many.

    Attributes:
        hooks: what hangs on the module; while there is any, `module` is to be called.
        pre_hooks: the same.
        module: the module.
        forward: what a call without hooks comes down to.
    """

    hooks: Mapping[int, Any]
    pre_hooks: Mapping[int, Any]
    module: Callable[..., Any]
    forward: Callable[..., Any]


def callee_of(module: nn.Module) -> Callee:
    """How the module is called in the shortest way."""
    found = direct(module)
    forward = found._forward if isinstance(found, Direct) else module
    return Callee(module._forward_hooks, module._forward_pre_hooks, module, forward)


def _look_up(weight: Tensor, input: Tensor) -> Tensor:
    return torch.embedding(weight, input)  # the forward's other arguments are for training


def shortcuts(roots: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Any]]:
    """Below these modules each parent, the name of a child, and what may be called instead."""
    for parent in roots:
        if is_compiled(parent):
            continue
        children = [(n, child) for n, child in parent._modules.items() if child is not None]
        for name, child in children:
            if not is_watched(child) and not _is_container(child):
                yield parent, name, direct(child)
        yield from shortcuts(child for _, child in children)


def _is_container(module: nn.Module) -> bool:
    """Whether modules are looked up in it."""
    return hasattr(type(module), "__getitem__") or hasattr(type(module), "__iter__")


# A model's forward without what transformers wraps around it and around its result.


def lean_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a `forward` that does nothing but the model's own work.

    Decorators that read defaults from the config and capture outputs are left out, and results are
    plain records in place of `ModelOutput`s, which are dictionaries too. In a pass over few tokens
    both cost as much as masks do. The copy has globals of its own: nothing that others see changes.
    """
    bare = inspect.unwrap(forward)
    if not isinstance(bare, FunctionType):
        return bare
    named = bare.__globals__
    outputs = {name: value for name, value in named.items() if _is_output(value)}
    own = {**named, **{name: _record(value) for name, value in outputs.items()}}
    copy = FunctionType(bare.__code__, own, bare.__name__, bare.__defaults__, bare.__closure__)
    copy.__kwdefaults__ = bare.__kwdefaults__
    return copy


def _is_output(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, ModelOutput) and value is not ModelOutput


@cache
def _record(output: type[ModelOutput]) -> type:
    """A class with the fields of `output`, and its way to index those that are not `None`."""
    names = [(field.name, Any, None) for field in fields(output)]  # pyright: ignore[reportArgumentType]
    return make_dataclass(output.__name__, names, namespace={"__getitem__": _item})


def _item(record: Any, index: Any) -> Any:
    if isinstance(index, str):
        return getattr(record, index)
    return tuple(value for value in vars(record).values() if value is not None)[index]
