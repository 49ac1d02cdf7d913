"""A benchmark's report: tables on a terminal, JSON, Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from selfspec.bench.statistics import Interval
from selfspec.bench.summary import Equality, Row

_COLUMNS = (
    "method",
    "tokens/s",
    "speedup (95 %)",
    "without loops",
    "loops",
    "accepted",
    "length",
    "ms/token (p95)",
    "prefill ms",
    "texts equal",
)
# What a terminal has room for.
_SHOWN = ("method", "tokens/s", "speedup (95 %)", "accepted", "length", "texts equal")
NOTES = (
    "tokens/s: decoding alone, median over prompts; prefill ms: from the call to the first "
    "tokens, of transformers' own speculation its whole first round. "
    "speedup: over the model's own generate, median of the prompts' paired ratios, 95 % by "
    "bootstrap over prompts; without loops: of the prompts on which neither text ends in circles "
    "(last 32 tokens with a period of at most 16); loops: share of texts that do. "
    "accepted: drafts kept; length: tokens a round. ms/token: a round's time shared among its "
    "tokens."
)


@dataclass(frozen=True)
class Report:
    """What a benchmark found.

    Attributes:
        head: what ran where: command, model, device, lengths, versions.
        rows: the figures.
    """

    head: dict[str, Any]
    rows: Sequence[Row]

    @property
    def failed(self) -> bool:
        """Whether texts differ that had to be equal."""
        return any(row.equality is not None and row.equality.failed for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {**self.head, "failed": self.failed, "rows": [row.to_dict() for row in self.rows]}

    def tables(self) -> list[Table]:
        """A table for every setting and prompt set, with the most important columns."""
        return [_table(title, rows) for title, rows in _parts(self.rows)]

    @property
    def failures(self) -> list[str]:
        """Why methods have no figures, each reason once."""
        failed = [row for row in self.rows if row.failure is not None]
        return list(dict.fromkeys(f"{row.place.method} failed: {row.failure}" for row in failed))

    def markdown(self) -> str:
        """The same tables in Markdown, below what ran where."""
        lines = ["# Benchmark", ""]
        lines += [f"- {name}: {_plain(value)}" for name, value in self.head.items() if value]
        for title, rows in _parts(self.rows):
            lines += ["", f"## {title}", "", _line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
            lines += [_line(_cells(row)) for row in rows]
        return "\n".join([*lines, "", NOTES, ""])

    def write(self, folder: Path) -> None:
        """Write results.json and results.md."""
        found = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        (folder / "results.json").write_text(found + "\n", encoding="utf-8")
        (folder / "results.md").write_text(self.markdown(), encoding="utf-8")


def _parts(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    keyed = groupby(rows, key=lambda row: (row.place.setting, row.place.prompts))
    return [(f"{setting} · {prompts}", list(part)) for (setting, prompts), part in keyed]


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in _SHOWN:
        first, last = column == _SHOWN[0], column == _SHOWN[-1]
        table.add_column(column, justify="left" if first else "right", no_wrap=not (first or last))
    for row in rows:
        cells = dict(zip(_COLUMNS, _cells(row), strict=True))
        failed = {"tokens/s": "failed"} if row.failure is not None else {}
        table.add_row(*[failed.get(column, cells[column]) for column in _SHOWN])
    return table


def _cells(row: Row) -> list[str]:
    if row.failure is not None:
        return [row.place.method, f"failed: {row.failure}", *[""] * (len(_COLUMNS) - 2)]
    token = f"{_number(row.ms_per_token, 2)} ({_number(row.ms_per_token_p95, 2)})"
    return [
        row.place.method,
        _number(row.tokens_per_second, 1),
        _interval(row.speedup),
        _interval(row.speedup_without_loops),
        _number(row.looping, 2),
        _number(row.acceptance_rate, 3),
        _number(row.mean_accepted_length, 2),
        token,
        _number(row.prefill_ms, 1),
        _equal(row.equality),
    ]


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _interval(found: Interval | None) -> str:
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


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(inner)}" for name, inner in value.items())
    return ", ".join(map(_plain, value)) if isinstance(value, list) else str(value)
