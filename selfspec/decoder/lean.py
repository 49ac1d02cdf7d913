"""A model's forward without what transformers wraps around it and around its result."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, make_dataclass
from functools import cache
from types import FunctionType
from typing import Any

from transformers.utils.generic import ModelOutput


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
