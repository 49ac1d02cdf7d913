"""What a fit reports: figures per exit, the speedup they predict, a table, a file and plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from selfspec.heads.store import replacing
from training.calibrate import Bin
from training.plots import write_plots

REPORT_NAME = "report.json"


@dataclass(frozen=True)
class ExitFigures:
    """What was measured of one exit head on held-out text.

    Attributes:
        kind: kind of the head.
        exit_layer: number of layers below the exit.
        agreement: by draft depth, how often the draft's top token is the target's.
        alpha: by draft depth, the mean of Σ min(p, q).
        accepted_length: tokens a round of real decoding, by mode: greedy, sampled.
        predicted_speedup: over plain greedy decoding, from `agreement` and measured times.
        ece: expected calibration error of the head's calibrator.

    Raises:
        ValueError: `agreement` and `alpha` are not of the same depths, at least one.
    """

    kind: str
    exit_layer: int
    agreement: list[float]
    alpha: list[float]
    accepted_length: dict[str, float] = field(default_factory=dict)
    predicted_speedup: float | None = None
    ece: float | None = None

    def __post_init__(self):
        """Check the depths."""
        if not self.alpha or len(self.alpha) != len(self.agreement):
            raise ValueError(
                f"{self.name}: agreement and alpha must have one value for each draft depth, "
                f"got {len(self.agreement)} and {len(self.alpha)}"
            )

    @property
    def name(self) -> str:
        """What displays call the exit."""
        return f"{self.kind}, exit {self.exit_layer}"

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values."""
        return asdict(self)


# The terminal


def figures_table(figures: Sequence[ExitFigures], title: str | None = None) -> Table:
    """One line per exit; acceptance at the first and the last draft depth.

    Args:
        figures: the exits, in the order of the lines.
        title: above the table.
    """
    modes = list(dict.fromkeys(mode for exit in figures for mode in exit.accepted_length))
    caption = "agreement, α: first→last draft depth; tokens: a round" if modes else None
    table = Table(title=title, caption=caption)
    table.add_column("head", style="bold")
    names = ["exit", "agreement", "α", *(f"tokens\n{m}" for m in modes), "speedup", "ECE"]
    for name in names:
        table.add_column(name, justify="right")
    for exit in figures:
        table.add_row(
            exit.kind,
            str(exit.exit_layer),
            _first_to_last(exit.agreement),
            _first_to_last(exit.alpha),
            *(_number(exit.accepted_length.get(mode), ".2f") for mode in modes),
            _number(exit.predicted_speedup, ".2f", "×"),
            _number(exit.ece, ".3f"),
        )
    return table


def _first_to_last(values: Sequence[float]) -> str:
    ends = [*values[:1], *values[1:][-1:]]
    return "→".join(f"{value:.2f}" for value in ends) or "–"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else format(value, form) + unit


# Files


def write_report(
    folder: Path,
    figures: Sequence[ExitFigures],
    history: Sequence[Mapping[str, Any]] = (),
    reliability: Mapping[str, Sequence[Bin]] | None = None,
    say: Callable[[str], object] | None = None,
) -> list[Path]:
    """Write `report.json` and, where matplotlib is installed, plots of what there is to see.

    Args:
        folder: made if it is not there.
        figures: what was measured of each exit.
        history: entries of the run's `metrics.jsonl`, each with its step.
        reliability: bins of each exit's calibrator, by the exit's name.
        say: takes the line that tells what to install when plots are left out; `None` prints it.

    Returns:
        The files, `report.json` first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bins = reliability or {}
    content = {
        "exits": [exit.to_dict() for exit in figures],
        "reliability": {name: [b._asdict() for b in some] for name, some in bins.items()},
    }
    report = folder / REPORT_NAME
    with replacing(report) as scratch:
        scratch.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    try:
        return [report, *write_plots(folder, figures, history, bins)]
    except ImportError:
        (say or Console().print)(
            "plots were left out: they need matplotlib (pip install matplotlib)"
        )
        return [report]
