"""Plots of a benchmark: speedup, batch sizes, acceptance, time."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from selfspec.apps.display.plots import COLOURS, line_styles
from selfspec.heads.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from selfspec.apps.bench.results import Row

_PARTS = {
    "shallow": "#56b4e9",
    "deep": "#0072b2",
    "head": "#009e73",
    "sampling": "#e69f00",
    "rest": "#999999",
}
_OUTSIDE = {"frameon": False, "loc": "center left", "bbox_to_anchor": (1, 0.5), "fontsize": 8}


def write_plots(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw every mode's rows to PNG files in `folder`; ImportError if matplotlib is missing.

    With several batch sizes, one plot shows speed against batch size; the others show the first.
    """
    sizes = list(dict.fromkeys(row.place.batch for row in rows))
    written: list[Path] = []
    for mode in dict.fromkeys(row.place.mode for row in rows):
        of_mode = [row for row in rows if row.place.mode == mode]
        first = [row for row in of_mode if row.place.batch == sizes[0]]
        plots: dict[str, tuple[Callable[[Axes, list[Row]], None], list[Row]]] = {
            "speedup": (_speedups, [row for row in first if row.speedup]),
            "acceptance": (_acceptance, [row for row in first if row.acceptance_by_position]),
            "time": (_time, [row for row in first if row.time_split]),
        }
        if len(sizes) > 1:
            plots["batches"] = _batches, [row for row in of_mode if row.speedup]
        name = re.sub(r"\W+", "_", mode).strip("_").lower()
        for kind, (draw, shown) in plots.items():
            if shown:
                path = folder / f"{kind}_{name}.png"
                write_picture(
                    path, mode, lambda ax, draw=draw, rows=shown: draw(ax, rows), len(shown)
                )
                written.append(path)
    return written


def write_picture(path: Path, title: str, draw: Callable[[Axes], object], rows: int = 12) -> None:
    """Draw one plot, high enough for `rows` bars; ImportError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib; pip install 'selfspec[bench]'") from error
    figure = Figure(figsize=(7, 1.6 + 0.34 * rows), layout="constrained")
    ax = figure.subplots()
    draw(ax)
    ax.set_title(title, loc="left")
    ax.spines[["top", "right"]].set_visible(False)
    with replacing(path) as scratch:
        figure.savefig(scratch, dpi=150, format="png")


def _names(rows: Sequence[Row]) -> list[str]:
    """Names of the rows, with the prompt set if there are several."""
    several = len({row.place.prompts for row in rows}) > 1
    places = [row.place for row in rows]
    return [f"{at.method} · {at.prompts}" if several else at.method for at in places]


def _name_bars(ax: Axes, rows: list[Row]) -> None:
    ax.set_yticks(range(len(rows)), _names(rows), fontsize=9)
    ax.set_ylim(len(rows) - 0.4, -0.6)  # downwards


def _speedups(ax: Axes, rows: list[Row]) -> None:
    sets = list(dict.fromkeys(row.place.prompts for row in rows))
    for place, row in enumerate(rows):
        found = row.speedup
        assert found is not None
        spread = [[found.value - found.low], [found.high - found.value]]
        colour = COLOURS[sets.index(row.place.prompts) % len(COLOURS)]
        ax.barh(place, found.value, xerr=spread, color=colour, capsize=3)
        ax.annotate(
            f"{found.value:.2f}x ", (found.low, place), color="white", ha="right", va="center"
        )
        if row.looping:
            text = f" {row.looping:.0%} loop"
            ax.annotate(text, (found.high, place), ha="left", va="center", fontsize=7)
    straight = [(row.speedup_without_loops, place) for place, row in enumerate(rows)]
    points = [(found.value, place) for found, place in straight if found is not None]
    if points and any(row.looping for row in rows):
        ax.plot(*zip(*points, strict=True), "D", color="black", markersize=4, fillstyle="none")
        ax.plot([], [], "D", color="black", markersize=4, fillstyle="none", label="without loops")
        ax.legend(**_OUTSIDE)
    ax.axvline(1, color="black", linewidth=0.8)
    _name_bars(ax, rows)
    ax.set_xlabel("speedup over the model's own generate, 95% interval")


def _batches(ax: Axes, rows: list[Row]) -> None:
    lines: dict[str, list[tuple[int, Any]]] = {}
    for row, name in zip(rows, _names(rows), strict=True):
        lines.setdefault(name, []).append((row.place.batch, row.speedup))
    for name, style in line_styles(lines):
        sizes, found = zip(*lines[name], strict=True)
        spread = [[f.value - f.low for f in found], [f.high - f.value for f in found]]
        values = [f.value for f in found]
        ax.errorbar(sizes, values, yerr=spread, **style, label=name, capsize=3)
    sizes = sorted({row.place.batch for row in rows})
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.axhline(1, color="black", linewidth=0.8)
    ax.set(xlabel="batch size", ylabel="speedup over the model's own batched generate")
    _beside(ax, len(lines))


def _acceptance(ax: Axes, rows: list[Row]) -> None:
    for row, (name, style) in zip(rows, line_styles(_names(rows)), strict=True):
        positions = range(1, len(row.acceptance_by_position) + 1)
        ax.plot(positions, row.acceptance_by_position, **style, label=name)
    ax.set(xlabel="position in the draft", ylabel="share of drafts accepted", ylim=(0, 1.02))
    ax.set_xticks(range(1, 1 + max(len(row.acceptance_by_position) for row in rows)))
    _beside(ax, len(rows))


def _beside(ax: Axes, lines: int) -> None:
    """Put the names of lines beside the plot, which is high enough for them."""
    ax.figure.set_figheight(max(4.0, 1 + 0.25 * lines))  # pyright: ignore[reportAttributeAccessIssue]
    ax.legend(**_OUTSIDE)


def _time(ax: Axes, rows: list[Row]) -> None:
    left = np.zeros(len(rows))
    for part, colour in _PARTS.items():
        widths = np.array([row.time_split[part] for row in rows])
        ax.barh(range(len(rows)), widths, left=left, color=colour, label=part)
        left += widths
    _name_bars(ax, rows)
    ax.set(xlabel="share of decode time", xlim=(0, 1))
    ax.legend(**_OUTSIDE)
