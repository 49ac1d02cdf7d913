"""Calls of modules and forwards without their wrappers, with all kernels but `eager`.

`nn.Module.__call__` looks for hooks, and transformers wraps the forwards of models in decorators.
Where there are no hooks, the plain forward is called. In passes over few tokens of small models
this saves several per cent of the time. With `compiled`, modules are called as usual, because the
compiler looks for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, make_dataclass
from functools import cache, partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.utils.generic import ModelOutput

from selfspec.config import Options
from selfspec.decoder.cache import WIDEST

Forward = Callable[..., Any]  # what a module's `forward` takes and returns depends on its class

_TABLE = "ALL_ATTENTION_FUNCTIONS"  # by which attentions find the function that was chosen
_COMPILED = "_orig_mod"  # what the wrapper of `torch.compile` calls its module
_OTHERS = {"softcap", "position_bias", "cache", "output_attentions"}  # left to transformers


class Direct:
    """Calls a module's forward directly while the module has no hooks.

    In everything else it behaves as the module, whose attributes and type layers may read.

    Args:
        module: the module.
        forward: what a call without hooks runs.
    """

    __slots__ = ("_forward", "_hooks", "_module", "_pre_hooks")

    def __init__(self, module: nn.Module, forward: Forward):
        keep = partial(object.__setattr__, self)
        keep("_module", module)
        keep("_forward", forward)
        keep("_hooks", module._forward_hooks)
        keep("_pre_hooks", module._forward_pre_hooks)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call it."""
        if self._hooks or self._pre_hooks:  # registered since
            return self._module(*args, **kwargs)
        return self._forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the module."""
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute of the module."""
        setattr(self._module, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the module, as does torch to make a parametrization of it."""
        delattr(self._module, name)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The module's class, for `isinstance`."""
        return type(self._module)

    def __reduce_ex__(
        self, protocol: object
    ) -> tuple[Callable[[nn.Module], nn.Module], tuple[nn.Module]]:
        """Copies copy the module."""
        return _itself, (self._module,)


class StandIn(Direct):
    """Runs `forward` in place of a module, without the module's hooks."""

    __slots__ = ()

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run `forward`."""
        return self._forward(*args, **kwargs)


def parents_of(root: nn.Module, child: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Modules that call a child, and its name there; it may be wrapped by `torch.compile`."""
    wrapped = [child, *(part for part in root.modules() if part._modules.get(_COMPILED) is child)]
    for parent in root.modules():
        for name, part in parent._modules.items():
            if part in wrapped and name != _COMPILED:
                yield parent, name


def uncompiled(module: nn.Module) -> dict[str, object]:
    """Attributes with which the module runs as it was before the user compiled it.

    Covers `module.compile()` and `module.forward = torch.compile(module.forward)`.
    """
    plain: dict[str, object] = {}
    if module._compiled_call_impl is not None:
        plain["_compiled_call_impl"] = None
    forward = module.__dict__.get("forward")
    original = getattr(forward, "_torchdynamo_orig_callable", None)
    if original is not None:
        plain["forward"] = original
    return plain


def _itself(module: nn.Module) -> nn.Module:
    return module


def is_watched(module: nn.Module) -> bool:
    """Whether calling the module does more than its forward."""
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
    """Whether the user compiled it: the compiler expects modules inside."""
    return module._compiled_call_impl is not None or _COMPILED in module._modules


def hooked_part(layer: nn.Module) -> str | None:
    """Path of the first module in a layer that has hooks or a forward of its own."""
    for path, part in layer.named_modules():
        if part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__:
            return f"{type(layer).__name__}.{path}".rstrip(".")
    return None


def direct(module: nn.Module) -> Forward:
    """The fastest callable that does what calling the module does."""
    if is_watched(module):
        return module
    plain = type(module) is nn.Embedding and "forward" not in module.__dict__
    if plain and type(module.weight) is nn.Parameter and module.max_norm is None:
        return Direct(module, partial(_look_up, module.weight))
    forward = type(module).forward
    if "forward" not in module.__dict__ and _reads_attention_functions(forward):
        own = with_globals(forward, lambda named: {_TABLE: _grouping_table()})
        return Direct(module, partial(own, module))
    return Direct(module, module.forward)


def _reads_attention_functions(forward: Forward) -> bool:
    bare = inspect.unwrap(forward)  # since transformers 5.24 a decorator renames the cache
    if not isinstance(bare, FunctionType):
        return False
    table = bare.__globals__.get(_TABLE)
    return table is ALL_ATTENTION_FUNCTIONS and _TABLE in bare.__code__.co_names


def _grouping_table() -> AttentionInterface:
    """The attention functions of transformers, with `grouped_attention` in place of torch's."""
    table = AttentionInterface()
    table.update(
        {
            name: grouped_attention if function is sdpa_attention_forward else function
            for name, function in ALL_ATTENTION_FUNCTIONS.items()
        }
    )
    return table


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What `sdpa_attention_forward` returns, without copies of keys that several heads share.

    It copies keys and values for each head if there is a mask. On a CPU torch can read them in
    place, with the same bits, except for one token, where transformers joins the heads. In half
    precision the heads of a few tokens are joined here, too: it reads the keys once for all.

    Args:
        module: the attention.
        query: `[rows, heads, width, head_dim]`.
        key: `[rows, key heads, keys, head_dim]`.
        value: the same of the values.
        attention_mask: `[rows, 1, width, keys]` additive mask, or `None`.
        options: what else the function takes.
    """
    copies = getattr(module, "num_key_value_groups", 1) > 1 and attention_mask is not None
    known = query.device.type == "cpu" and not torch.is_grad_enabled()
    if not copies or not known or query.shape[2] == 1 or not _OTHERS.isdisjoint(options):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    rows, heads, width, size = query.shape
    joins = query.dtype.itemsize == 2 and width <= WIDEST and attention_mask.shape[1] == 1  # pyright: ignore
    if joins:
        group = heads // key.shape[1]
        query = query.reshape(rows, key.shape[1], group * width, size)
        attention_mask = attention_mask.repeat(1, 1, group, 1)  # pyright: ignore
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=options.get("dropout", 0.0),
        scale=options.get("scaling"),
        enable_gqa=not joins,
    )
    output = output.reshape(rows, heads, width, -1)
    return output.transpose(1, 2).contiguous(), None


def _look_up(weight: Tensor, input: Tensor) -> Tensor:
    return torch.embedding(weight, input)  # the forward's other arguments are for training


def shortcuts(roots: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Forward]]:
    """For every child below these modules: its parent, its name, and a direct callable."""
    for parent in roots:
        if is_compiled(parent):
            continue
        children = [(n, child) for n, child in parent._modules.items() if child is not None]
        for name, child in children:
            if not is_watched(child) and not _is_container(child):
                yield parent, name, direct(child)
        yield from shortcuts(child for _, child in children)


def _is_container(module: nn.Module) -> bool:
    """Whether the module is indexed or iterated over."""
    return hasattr(type(module), "__getitem__") or hasattr(type(module), "__iter__")


def from_transformers(function: object) -> bool:
    """Whether a function or wrapper is in transformers' code, or is the wrapper of `no_grad`."""
    named = getattr(function, "__globals__", {}).get("__name__", "")
    return named.partition(".")[0] == "transformers" or named == "torch.utils._contextlib"


def undecorated(function: Any) -> Any:
    """A function without the decorators of transformers; those of others stay."""
    while from_transformers(function) and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def lean_forward(forward: Forward) -> Forward:
    """A copy of a `forward` without decorators, which returns plain records.

    Decorators that read config defaults and capture outputs are left out, and `ModelOutput`s, which
    are dictionaries, become dataclasses. Both are noticeable in passes over few tokens. The copy
    has globals of its own, so nothing changes for others. A forward that others have decorated
    stays as it is.
    """
    bare = undecorated(forward)
    if not isinstance(bare, FunctionType) or hasattr(bare, "__wrapped__"):
        return forward
    return with_globals(
        bare,
        lambda named: {name: _record(value) for name, value in named.items() if _is_output(value)},
    )


def with_globals(function: Any, replaced: Callable[[Options], dict[str, Any]]) -> Any:
    """A copy of a function with some globals replaced; its decorators are kept.

    Args:
        function: the function.
        replaced: returns the replacements, given the function's globals.
    """
    inner = getattr(function, "__wrapped__", None)
    named, cells = function.__globals__, function.__closure__ or ()
    if inner is not None and not any(cell.cell_contents is inner for cell in cells):
        return function  # it calls by another way what it wraps
    if inner is None:
        named = {**named, **replaced(named)}
    else:
        copy = CellType(with_globals(inner, replaced))
        cells = tuple(copy if cell.cell_contents is inner else cell for cell in cells)
    made = FunctionType(function.__code__, named, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _is_output(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, ModelOutput) and value is not ModelOutput


@cache
def _record(output: type[ModelOutput]) -> type:
    """A dataclass with the fields of `output` that is indexed as `output` is."""
    names = [(field.name, Any, None) for field in fields(output)]  # pyright: ignore[reportArgumentType]
    return make_dataclass(output.__name__, names, namespace={"__getitem__": _item, "keys": _keys})


def _keys(record: object) -> list[str]:
    """Fields that have a value, so that `**record` works as with a `ModelOutput`."""
    return [name for name, value in vars(record).items() if value is not None]


def _item(record: object, index: str | int | slice) -> object:
    if isinstance(index, str):
        return getattr(record, index)
    return tuple(value for value in vars(record).values() if value is not None)[index]
