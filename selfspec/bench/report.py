"""A benchmark's report: tables on a terminal, JSON, Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from selfspec.bench.grid import Grid
from selfspec.bench.limit import Limits
from selfspec.bench.summary import Row
from selfspec.bench.tables import grids
from selfspec.heads.store import replacing

NOTES = (
    "tokens/s: decoding alone, all rows of a batch together, median over batches; prefill ms: from "
    "the call to the first tokens, of transformers' own speculation its whole first round. "
    "speedup: over the model's own generate on the same batches, median of their paired ratios, "
    "95 % by bootstrap over batches; without loops: of the batches in which no text of either ends "
    "in circles (last 32 tokens with a period of at most 16); loops: share of texts that do. "
    "accepted: drafts kept; length: tokens a round. ms/token: a round's time shared among its "
    "tokens. Peak memory is that of the warm-up, on the longest prompts."
)


@dataclass(frozen=True)
class Report:
    """What a benchmark found.

    Attributes:
        head: what ran where: command, model, device, lengths, versions.
        rows: the figures.
        limits: what the device allows, where that was asked for.
    """

    head: dict[str, Any]
    rows: Sequence[Row]
    limits: Limits | None = None

    @property
    def failed(self) -> bool:
        """Whether texts differ that had to be equal."""
        return any(row.equality is not None and row.equality.failed for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values."""
        limits = {} if self.limits is None else {"limits": self.limits.to_dict()}
        rows = [row.to_dict() for row in self.rows]
        return {**self.head, "failed": self.failed, "rows": rows, **limits}

    def write(self, folder: Path) -> list[str]:
        """Write results.json and results.md; returns the names of the files."""
        return write_findings(folder, "results", "Benchmark", self.head, self, self.failures)

    @property
    def grids(self) -> list[Grid]:
        """Tables for every mode, prompt set and batch size."""
        limits = [] if self.limits is None else self.limits.grids
        return [*grids(self.rows), *limits]

    @property
    def failures(self) -> list[str]:
        """Why methods have no figures, each reason once."""
        failed = [row for row in self.rows if row.failure is not None]
        return list(dict.fromkeys(f"{row.place.method} failed: {row.failure}" for row in failed))

    @property
    def notes(self) -> str:
        """What the columns mean."""
        return NOTES if self.limits is None else f"{NOTES}\n\n{self.limits.notes}"


class Findings(Protocol):
    """What was found: tables, what their columns mean, and plain values."""

    @property
    def grids(self) -> list[Grid]:
        """Tables."""
        ...

    @property
    def notes(self) -> str:
        """What the columns mean."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values."""
        ...


def _markdown(title: str, head: dict[str, Any], found: Findings, failures: Sequence[str]) -> str:
    """The tables in Markdown, below what ran where."""
    lines = [f"# {title}", ""]
    lines += [f"- {name}: {_plain(value)}" for name, value in head.items() if value]
    lines += [text for grid in found.grids for text in grid.markdown()]
    if failures:
        lines += ["", *(f"- {failure}" for failure in failures)]
    return "\n".join([*lines, "", found.notes, ""])


def write_findings(
    folder: Path,
    name: str,
    title: str,
    head: dict[str, Any],
    found: Findings,
    failures: Sequence[str] = (),
) -> list[str]:
    """Write what was found as JSON and Markdown; returns the names of the files."""
    values = json.dumps({**head, **found.to_dict()}, indent=2, allow_nan=False)
    texts = {f"{name}.json": values + "\n", f"{name}.md": _markdown(title, head, found, failures)}
    for file, text in texts.items():
        with replacing(folder / file) as scratch:
            scratch.write_text(text, encoding="utf-8")
    return list(texts)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(inner)}" for name, inner in value.items())
    return ", ".join(map(_plain, value)) if isinstance(value, list) else str(value)
