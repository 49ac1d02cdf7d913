"""Plots of a benchmark: speedup, batch sizes, acceptance, time and memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.apps.display.plots import COLOURS, line_styles
from selfspec.heads.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from selfspec.apps.bench.results import Row

Draw = Callable[["Axes", "list[Row]"], None]

_PARTS = {
    "shallow": "#56b4e9",
    "deep": "#0072b2",
    "head": "#009e73",
    "sampling": "#e69f00",
    "rest": "#999999",
}
_OUTSIDE = {"frameon": False, "loc": "center left", "bbox_to_anchor": (1, 0.5), "fontsize": 8}


def write_plots(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw every mode's rows to PNG files in `folder`.

    With several batch sizes, one plot shows speed against batch size; the others show the first.

    Raises:
        ImportError: matplotlib is missing.
    """
    sizes = list(dict.fromkeys(row.place.batch for row in rows))
    kinds: dict[str, tuple[Draw, Callable[[Row], Any]]] = {
        "speedup": (_speedups, lambda row: row.speedup),
        "acceptance": (_acceptance, lambda row: row.acceptance_by_position),
        "lengths": (_lengths, lambda row: row.accepted_lengths),
        "time": (_time, lambda row: row.time_split),
        "memory": (_memory, lambda row: row.memory),
    }
    written: list[Path] = []
    for mode in dict.fromkeys(row.place.mode for row in rows):
        of_mode = [row for row in rows if row.place.mode == mode]
        first = [row for row in of_mode if row.place.batch == sizes[0]]
        found = {
            kind: (draw, [row for row in first if figure_of(row)])
            for kind, (draw, figure_of) in kinds.items()
        }
        if len(sizes) > 1:
            found["batches"] = (_batches, [row for row in of_mode if row.speedup])
        for kind, (draw, shown) in found.items():
            if shown:
                path = folder / f"{kind}_{_file_name(mode)}.png"
                write_picture(
                    path, mode, lambda ax, draw=draw, rows=shown: draw(ax, rows), len(shown)
                )
                written.append(path)
    return written


def _file_name(mode: str) -> str:
    return re.sub(r"\W+", "_", mode).strip("_").lower()


def write_picture(path: Path, title: str, draw: Callable[[Axes], object], rows: int = 12) -> None:
    """Draw one plot, high enough for `rows` bars.

    Raises:
        ImportError: matplotlib is missing.
    """
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
    return [
        f"{row.place.method} · {row.place.prompts}" if several else row.place.method for row in rows
    ]


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
    lines: dict[str, list[Row]] = {}
    for row, name in zip(rows, _names(rows), strict=True):
        lines.setdefault(name, []).append(row)
    for name, style in line_styles(lines):
        line = lines[name]
        found = [row.speedup for row in line if row.speedup is not None]
        spread = [[f.value - f.low for f in found], [f.high - f.value for f in found]]
        ax.errorbar(
            [row.place.batch for row in line],
            [f.value for f in found],
            yerr=spread,
            **style,
            label=name,
            capsize=3,
        )
    sizes = sorted({row.place.batch for row in rows})
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.axhline(1, color="black", linewidth=0.8)
    ax.set(xlabel="batch size", ylabel="speedup over the model's own batched generate")
    ax.figure.set_figheight(max(4.0, 1 + 0.25 * len(lines)))  # pyright: ignore[reportAttributeAccessIssue]
    ax.legend(**_OUTSIDE)


def _acceptance(ax: Axes, rows: list[Row]) -> None:
    for row, (name, style) in zip(rows, line_styles(_names(rows)), strict=True):
        positions = range(1, len(row.acceptance_by_position) + 1)
        ax.plot(positions, row.acceptance_by_position, **style, label=name)
    ax.set(xlabel="position in the draft", ylabel="share of drafts accepted", ylim=(0, 1.02))
    ax.set_xticks(range(1, 1 + max(len(row.acceptance_by_position) for row in rows)))
    ax.figure.set_figheight(max(4.0, 1 + 0.25 * len(rows)))  # pyright: ignore[reportAttributeAccessIssue]
    ax.legend(**_OUTSIDE)


def _lengths(ax: Axes, rows: list[Row]) -> None:
    """Shares of rounds by accepted drafts: a bar per row, darker for more."""
    most = max(max(row.accepted_lengths) for row in rows)
    totals = [sum(row.accepted_lengths.values()) for row in rows]
    parts = {
        str(kept): [
            row.accepted_lengths.get(kept, 0) / n for row, n in zip(rows, totals, strict=True)
        ]
        for kept in range(most + 1)
    }
    colours = [(0.0, 0.45, 0.7, (kept + 1) / (most + 1)) for kept in range(most + 1)]
    _stacked_bars(ax, rows, parts, colours)
    ax.set(xlabel="share of rounds", xlim=(0, 1))
    ax.legend(title="accepted drafts", **_OUTSIDE)


def _time(ax: Axes, rows: list[Row]) -> None:
    parts = {part: [row.time_split[part] for row in rows] for part in _PARTS}
    _stacked_bars(ax, rows, parts, list(_PARTS.values()))
    ax.set(xlabel="share of decode time", xlim=(0, 1))
    ax.legend(**_OUTSIDE)


def _stacked_bars(
    ax: Axes, rows: list[Row], parts: Mapping[str, Sequence[float]], colours: Sequence[Any]
) -> None:
    left = [0.0] * len(rows)
    for (label, widths), colour in zip(parts.items(), colours, strict=True):
        ax.barh(range(len(rows)), widths, left=left, color=colour, label=label)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    _name_bars(ax, rows)


def _memory(ax: Axes, rows: list[Row]) -> None:
    for label, colour in (("peak", "#bbbbbb"), ("growth", COLOURS[0])):
        bytes_of = [getattr(row.memory, label) for row in rows]
        ax.barh(range(len(rows)), [count / 2**20 for count in bytes_of], color=colour, label=label)
    _name_bars(ax, rows)
    ax.set_xlabel("MiB, peak of the call and its growth")
    ax.legend(**_OUTSIDE)
