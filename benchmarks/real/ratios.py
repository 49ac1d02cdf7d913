"""The table of `python -m benchmarks.real`: speed over `generate`, by category and together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from selfspec.apps.bench.config import PLAIN
from selfspec.apps.bench.results import Grid, number

TOGETHER = "together"
DEFAULT, LOOP, LLAMA = "auto", "none", "llama.cpp bf16"

Speeds = Mapping[tuple[str, str], Mapping[str, float]]
"""Tokens per second by mode and category, and by method."""


def speeds(runs: Iterable[Mapping[str, Any]]) -> Speeds:
    """Tokens over seconds of all calls of a method, after the first tokens of each.

    Args:
        runs: records of `runs.jsonl`; those of memory and of errors are left out.
    """
    sums: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(dict)
    for run in runs:
        if "times" in run:
            tokens, seconds = sum(run["counts"][1:]), run["times"][-1] - run["times"][0]
            for category in (run["prompts"], TOGETHER):
                total = sums[run["mode"], category].setdefault(run["method"], [0.0, 0.0])
                total[0] += tokens
                total[1] += seconds
    return {
        place: {method: tokens / seconds for method, (tokens, seconds) in found.items() if seconds}
        for place, found in sums.items()
    }


def grids(found: Speeds, methods: Sequence[str]) -> Iterator[Grid]:
    """A table of each mode: a row for each method, a column for each category."""
    for mode in dict.fromkeys(mode for mode, _ in found):
        columns = [category for one, category in found if one == mode and category != TOGETHER]
        columns.append(TOGETHER)
        rows = [
            [method, *(number(_ratio(found[mode, c], method, PLAIN), 2) for c in columns)]
            for method in methods
            if method in found[mode, TOGETHER]
        ]
        yield Grid(f"{mode}: speed over generate", ["method", *columns], rows)


def _ratio(found: Mapping[str, float], method: str, base: str) -> float | None:
    return found[method] / found[base] if method in found and base in found else None


class Bar(NamedTuple):
    """A ratio that the default has to reach.

    Attributes:
        says: what is compared.
        ratio: what was measured; `None` if a row is missing.
        least: what is wanted.
    """

    says: str
    ratio: float | None
    least: float

    def __str__(self) -> str:
        """The ratio, and whether it is met."""
        verdict = "not measured" if self.ratio is None else "MISSED"
        if self.ratio is not None and self.ratio >= self.least:
            verdict = "met"
        return f"{verdict}: {self.says}: {number(self.ratio, 2)}, wanted {self.least:.2f}"


def bars(found: Speeds) -> list[Bar]:
    """What the default with a head has to reach, in the modes that were measured."""
    greedy, sampled = (found.get((mode, TOGETHER), {}) for mode in ("greedy", "sampled"))
    slowest = min(
        (
            (ratio, f"{category}, {mode}")
            for (mode, category), by_method in found.items()
            if category != TOGETHER and (ratio := _ratio(by_method, DEFAULT, LOOP)) is not None
        ),
        default=(None, "no category"),
    )
    return [
        Bar("greedy, over llama.cpp in bfloat16", _ratio(greedy, DEFAULT, LLAMA), 1.0),
        Bar("greedy, over generate", _ratio(greedy, DEFAULT, PLAIN), 2.8),
        Bar("greedy, over its own loop without drafts", _ratio(greedy, DEFAULT, LOOP), 1.5),
        Bar("sampled, over its own loop without drafts", _ratio(sampled, DEFAULT, LOOP), 1.3),
        Bar(f"slowest category ({slowest[1]}) over its own loop", slowest[0], 0.98),
    ]
