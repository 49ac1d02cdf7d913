"""The table of `python -m benchmarks.real`: speed over `generate`, by category and together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

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
    tokens: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    seconds: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for run in runs:
        for category in (run["prompts"], TOGETHER) if "times" in run else ():
            place, method = (run["mode"], category), run["method"]
            tokens[place][method] += sum(run["counts"][1:])
            seconds[place][method] += run["times"][-1] - run["times"][0]
    return {
        place: {name: tokens[place][name] / took for name, took in found.items() if took}
        for place, found in seconds.items()
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


def bars(found: Speeds) -> list[str]:
    """What the default with a head has to reach, in the modes that were measured: met or missed."""
    greedy, sampled = (found.get((mode, TOGETHER), {}) for mode in ("greedy", "sampled"))
    slowest = min(
        (
            (ratio, f"{category}, {mode}")
            for (mode, category), by_method in found.items()
            if category != TOGETHER and (ratio := _ratio(by_method, DEFAULT, LOOP)) is not None
        ),
        default=(None, "no category"),
    )
    wanted = [
        ("greedy, over llama.cpp in bfloat16", _ratio(greedy, DEFAULT, LLAMA), 1.0),
        ("greedy, over generate", _ratio(greedy, DEFAULT, PLAIN), 2.8),
        ("greedy, over its own loop without drafts", _ratio(greedy, DEFAULT, LOOP), 1.5),
        ("sampled, over its own loop without drafts", _ratio(sampled, DEFAULT, LOOP), 1.3),
        (f"slowest category ({slowest[1]}) over its own loop", slowest[0], 0.98),
    ]
    return [
        f"{'not measured' if ratio is None else 'met' if ratio >= least else 'MISSED'}: "
        f"{says}: {number(ratio, 2)}, wanted {least:.2f}"
        for says, ratio, least in wanted
    ]
