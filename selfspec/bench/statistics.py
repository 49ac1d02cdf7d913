"""Figures of repeated measurements: paired ratios, their interval, and texts that go in circles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_DRAWS = 4000
_TAIL = 32  # tokens at a text's end that have to repeat themselves
_LONGEST_PERIOD = 16


class Interval(NamedTuple):
    """A figure and where it lies with 95 % confidence.

    Attributes:
        value: the figure.
        low: lower end.
        high: upper end.
        taken_over: number of values.
    """

    value: float
    low: float
    high: float
    taken_over: int


def median_interval(values: Sequence[float], seed: int = 0) -> Interval | None:
    """The median of `values` and its percentile bootstrap interval (Efron 1979).

    `None` where there are no values. The interval of one value is that value.
    """
    if not values:
        return None
    found = np.asarray(values, dtype=float)
    picks = np.random.default_rng(seed).integers(len(found), size=(_DRAWS, len(found)))
    low, high = np.percentile(np.median(found[picks], axis=1), (2.5, 97.5))
    return Interval(float(np.median(found)), float(low), float(high), len(found))


def percentile(values: Sequence[float], weights: Sequence[int], share: float) -> float:
    """The smallest value that at least `share` of all weight is not above."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(np.asarray(weights)[order])
    place = int(np.searchsorted(reached, share * reached[-1] * (1 - 1e-12)))
    return float(np.asarray(values)[order][place])


def loops(tokens: Sequence[int]) -> bool:
    """Whether a text ends in circles: its last 32 tokens have a period of at most 16."""
    tail = list(tokens[-_TAIL:])
    if len(tail) < _TAIL:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, _LONGEST_PERIOD + 1))
