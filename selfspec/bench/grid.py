"""A table, on a terminal or in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich import box
from rich.table import Table


class Grid(NamedTuple):
    """A table of text.

    Attributes:
        title: of what.
        columns: their names; the first names the rows.
        rows: cells.
        wraps: columns that may be broken into lines on a terminal, beside the first.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    wraps: Sequence[str] = ()

    def table(self) -> Table:
        """For a terminal."""
        table = Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD)
        for place, column in enumerate(self.columns):
            wraps = place == 0 or column in self.wraps
            table.add_column(column, justify="right" if place else "left", no_wrap=not wraps)
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> list[str]:
        """Lines of Markdown, below a heading."""
        rows = [self.columns, ["---"] * len(self.columns), *self.rows]
        return ["", f"## {self.title}", "", *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def number(value: float | None, digits: int) -> str:
    """A figure, or a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def mebibytes(count: int) -> str:
    """Bytes as MiB."""
    return f"{count / 2**20:,.1f}"
