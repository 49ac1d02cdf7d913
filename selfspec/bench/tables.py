"""What a benchmark's rows look like: the same sheets on a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from selfspec.bench.grid import Grid, mebibytes, number
from selfspec.bench.statistics import Interval
from selfspec.bench.summary import Equality, Row
from selfspec.schedule.stats import PARTS

Cell = Callable[[Row], str]


class Sheet(NamedTuple):
    """A table of some figures of every row.

    Attributes:
        title: of what.
        columns: what a cell says, by the name of its column.
        wraps: columns that may be broken into lines.
    """

    title: str
    columns: dict[str, Cell]
    wraps: Sequence[str] = ()


def _interval(found: Interval | None) -> str:
    """A ratio and its interval."""
    return "–" if found is None else f"{found.value:.2f}x ({found.low:.2f}–{found.high:.2f})"


def _equal(equality: Equality | None) -> str:
    """How many texts are equal; where they part, by how much."""
    if equality is None:
        return "–"
    equal = equality.texts - len(equality.differing)
    if equality.first is None:
        return f"{equal}/{equality.texts}"
    margin = equality.first.margin
    apart = "one text ends" if margin is None else f"margin {margin:.2g}"
    return f"{'NOT EQUAL: ' if equality.failed else ''}{equal}/{equality.texts}, {apart}"


def _by_position(row: Row) -> str:
    return " ".join(number(rate, 2) for rate in row.acceptance_by_position) or "–"


def _by_length(row: Row) -> str:
    """Shares of rounds, by the number of kept drafts from 0 on."""
    rounds = sum(row.accepted_lengths.values())
    most = max(row.accepted_lengths, default=-1)
    shares = (row.accepted_lengths.get(kept, 0) / rounds for kept in range(most + 1))
    return " ".join(number(share, 2) for share in shares) or "–"


def _part(part: str) -> Cell:
    return lambda row: number(row.time_split.get(part), 3)


SHEETS = (
    Sheet(
        "speed",
        {
            "tokens/s": lambda row: number(row.tokens_per_second, 1),
            "speedup (95 %)": lambda row: _interval(row.speedup),
            "accepted": lambda row: number(row.acceptance_rate, 3),
            "length": lambda row: number(row.mean_accepted_length, 2),
            "texts equal": lambda row: _equal(row.equality),
        },
        wraps=["texts equal"],
    ),
    Sheet(
        "drafts",
        {
            "kept, by position": _by_position,
            "rounds, by drafts kept (0, 1, …)": _by_length,
        },
        wraps=["kept, by position", "rounds, by drafts kept (0, 1, …)"],
    ),
    Sheet("share of decode time", {part: _part(part) for part in (*PARTS, "rest")}),
    Sheet(
        "texts in circles",
        {
            "loops": lambda row: number(row.looping, 2),
            "speedup without loops": lambda row: _interval(row.speedup_without_loops),
        },
    ),
    Sheet(
        "waiting and memory",
        {
            "prefill ms": lambda row: number(row.prefill_ms, 1),
            "ms/token (p95)": lambda row: (
                f"{number(row.ms_per_token, 2)} ({number(row.ms_per_token_p95, 2)})"
            ),
            "peak MiB (grown by)": lambda row: (
                "–"
                if row.memory is None
                else f"{mebibytes(row.memory.peak)} ({mebibytes(row.memory.growth)})"
            ),
        },
    ),
)


def grids(rows: Sequence[Row]) -> Iterator[Grid]:
    """Every sheet of rows that are compared with one another; failures stand in the first."""
    several = len({row.place.batch for row in rows}) > 1
    for place, part in groupby(rows, key=lambda row: row.place._replace(method="")):
        title = f"{place.mode} · {place.prompts}" + several * f" · batch {place.batch}"
        compared = list(part)
        for sheet in SHEETS:
            shown = [row for row in compared if row.failure is None or sheet is SHEETS[0]]
            cells = [_cells(sheet, row) for row in shown]
            yield Grid(f"{title} · {sheet.title}", ["method", *sheet.columns], cells, sheet.wraps)


def _cells(sheet: Sheet, row: Row) -> list[str]:
    if row.failure is not None:
        return [row.place.method, "failed", *[""] * (len(sheet.columns) - 1)]
    return [row.place.method, *(cell(row) for cell in sheet.columns.values())]
