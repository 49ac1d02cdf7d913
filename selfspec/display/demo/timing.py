"""Interleaved runs and their medians."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import TypeVar

from selfspec.display.demo.writer import Run

NameT = TypeVar("NameT")


def interleaved(ways: Mapping[str, Callable[[], Run]], repeats: int) -> dict[str, list[Run]]:
    """Run each way `repeats` times in turn, every second turn in reverse order."""
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for turn in range(repeats):
        for name in in_turn(ways, turn):
            runs[name].append(ways[name]())
    return runs


def in_turn(names: Iterable[NameT], turn: int) -> list[NameT]:
    """The order of a turn: every second one is reversed, so drift falls on all alike."""
    return list(names)[:: -1 if turn % 2 else 1]


def rate(runs: Sequence[Run]) -> float:
    """Median tokens per second."""
    return median(run.rate for run in runs)


def ratio(runs: Sequence[Run], base: Sequence[Run]) -> float:
    """How many times faster `runs` were than `base`, median by median."""
    return rate(runs) / rate(base)
