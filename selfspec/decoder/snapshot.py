"""What a model's own code goes by: while that stays the same, so does what a survey found."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from operator import is_
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

_PLAIN = (bool, int, float, str, type(None))
# What any module has to itself, and what gates put there.
_INNER = vars(nn.Module()).keys() - {"training"} | {"forward"}


class Snapshot:
    """What shows of the forwards of some modules, and of what they can ask about.

    Their code and what it names (globals and methods), all attributes, children, parameters and
    buffers of the modules, the config. Plain values, and those inside lists and dictionaries, are
    compared as such, everything else by identity. Not what lies deeper: functions that the named
    ones call, attributes of other objects.

    Args:
        modules: whose forwards.
        parts: other modules that have to be the same.
    """

    def __init__(self, modules: Sequence[nn.Module], parts: Sequence[nn.Module | None] = ()):
        self._values: list[Any] = []
        self._objects: list[Any] = [*parts]
        self._inside: set[int] = set()
        for module in modules:
            self._take_module(module)

    def __eq__(self, other: object) -> bool:
        """Whether nothing has changed in between."""
        if not isinstance(other, Snapshot) or self._values != other._values:
            return False
        return len(self._objects) == len(other._objects) and all(
            map(is_, self._objects, other._objects)
        )

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def _take_module(self, module: nn.Module) -> None:
        kind, children = type(module), module._modules
        for held in (children, module._parameters, module._buffers):
            self._values += held
            self._objects += held.values()
        hidden = _INNER | children.keys()  # gates stand before children
        self._take({name: value for name, value in vars(module).items() if name not in hidden})
        forward = inspect.unwrap(kind.forward)
        self._objects += [module, kind, kind.forward, forward]
        if not isinstance(forward, FunctionType):
            return
        self._objects.append(forward.__code__)
        for name in _names(forward.__code__):
            found = [part for part in kind.__mro__ if name in part.__dict__]
            self._objects += [part.__dict__[name] for part in found[:1]]
            self._objects.append(forward.__globals__.get(name))

    def _take(self, value: Any) -> None:
        if isinstance(value, _PLAIN):
            self._values.append(value)
            return
        config = isinstance(value, PreTrainedConfig)
        if config or not isinstance(value, list | tuple | dict):
            self._objects.append(value)
        if id(value) in self._inside:  # it holds itself
            return
        self._inside.add(id(value))
        if config or isinstance(value, dict):
            held = vars(value) if config else value
            self._take(list(map(str, held)))
            self._take(list(held.values()))
        elif isinstance(value, list | tuple):
            self._values.append(len(value))
            for part in value:
                self._take(part)
        self._inside.discard(id(value))


@cache
def _names(code: CodeType) -> frozenset[str]:
    """What the code, and functions inside it, ask for by name."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return frozenset(code.co_names).union(*map(_names, inner))
