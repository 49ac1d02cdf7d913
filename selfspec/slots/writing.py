"""The time in which passes write a window of a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from selfspec.slots.layer import Window

if TYPE_CHECKING:
    from selfspec.slots.cache import SlotCache


class Writing:
    """While entered, passes write a window.

    Args:
        slots: the KV cache.
        window: what they write of it.
        added: which added layer states go to that a layer of some number writes.
    """

    def __init__(self, slots: SlotCache, window: Window, added: Mapping[int, int]):
        self._slots, self._window, self._added = slots, window, added

    def __enter__(self) -> Window:
        """Begin."""
        self._outer = self._slots.turn(self._window, self._added)
        return self._window

    def __exit__(self, *error: object) -> None:
        """Go on with what was written before."""
        self._slots.turn(*self._outer)
