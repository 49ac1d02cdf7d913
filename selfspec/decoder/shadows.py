"""Attributes that are replaced for a while, and put back as they were."""

from __future__ import annotations

from typing import Any, TypeVar

from selfspec.config import Options

ValueT = TypeVar("ValueT")

_NOTHING = object()


class Shadows:
    """What was replaced, the latest last."""

    def __init__(self) -> None:
        self._held: list[tuple[dict[str, Any], str, object]] = []

    def put(self, attributes: dict[str, ValueT], name: str, value: ValueT) -> None:
        """Replace an attribute until `undo`."""
        # It may be replaced already: by device hooks, or by an outer call of another wrapper.
        self._held.append((attributes, name, attributes.get(name, _NOTHING)))
        attributes[name] = value

    def put_all(self, attributes: dict[str, object], values: Options) -> int:
        """Replace several attributes; returns their number."""
        for name, value in values.items():
            self.put(attributes, name, value)
        return len(values)

    def undo(self, count: int) -> None:
        """Put back the last `count` attributes."""
        for _ in range(count):
            attributes, name, held = self._held.pop()
            if held is _NOTHING:
                attributes.pop(name, None)  # a module that was put there since has taken it away
            else:
                attributes[name] = held

    def undo_all(self) -> None:
        """Put back all."""
        self.undo(len(self._held))
