"""What a model's own code goes by: while that stays the same, so does what a survey found."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from operator import is_
from types import CodeType, FunctionType
from typing import Any

from torch import nn

_PLAIN = (bool, int, float, str, type(None))


class Snapshot:
    """What shows of the forwards of some modules, and of what they can ask about.

    Their code, what it names (globals, methods, attributes that are plain values, children), and
    the config. Not what lies deeper: functions that the named ones call.

    Args:
        modules: whose forwards.
    """

    def __init__(self, *modules: nn.Module):
        self._values: list[Any] = []
        self._objects: list[Any] = []
        for module in modules:
            self._take(module)

    def __eq__(self, other: object) -> bool:
        """Whether nothing has changed in between."""
        if not isinstance(other, Snapshot) or self._values != other._values:
            return False
        return len(self._objects) == len(other._objects) and all(
            map(is_, self._objects, other._objects)
        )

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def _take(self, module: nn.Module) -> None:
        kind, own = type(module), module.__dict__
        config = own.get("config")
        self._objects += [module, kind, kind.forward, config, *module._modules.values()]
        attributes = {name: own[name] for name in own if name not in module._modules}  # no gates
        self._values += [list(module._modules), *_plain_values(attributes)]
        if config is not None:
            self._values += _plain_values(vars(config))
        forward = inspect.unwrap(kind.forward)
        if not isinstance(forward, FunctionType):
            return
        self._objects.append(forward)
        for name in _names(forward.__code__):
            found = [part for part in kind.__mro__ if name in part.__dict__]
            self._objects += [part.__dict__[name] for part in found[:1]]
            self._objects += [forward.__globals__.get(name)]


def _plain_values(attributes: dict[str, Any]) -> Iterator[Any]:
    """Names and values, of containers what they show."""
    for name, value in attributes.items():
        if isinstance(value, _PLAIN):
            yield name, value
        elif type(value) in (list, tuple, dict) and not name.startswith("_"):
            yield name, repr(value)


@cache
def _names(code: CodeType) -> frozenset[str]:
    """What the code, and functions inside it, ask for by name."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return frozenset(code.co_names).union(*map(_names, inner))
