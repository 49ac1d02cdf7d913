"""A benchmark's pictures: speedups with intervals, acceptance by position, where time goes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.bench.summary import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers tell apart.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_PARTS = {"shallow": "#56b4e9", "deep": "#0072b2", "head": "#009e73", "rest": "#999999"}
_MARKERS = "osD^vPX*<>"


def write_plots(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw every setting's rows to PNG files in `folder`; those with nothing to show are left out.

    Raises:
        ImportError: matplotlib is missing.
    """
    kinds: dict[str, tuple[Callable[[Axes, list[Row]], None], Callable[[Row], Any]]] = {
        "speedup": (_speedups, lambda row: row.speedup),
        "acceptance": (_acceptance, lambda row: row.acceptance_by_position),
        "time": (_time, lambda row: row.time_split),
    }
    written: list[Path] = []
    for setting in dict.fromkeys(row.place.setting for row in rows):
        for kind, (draw, figure_of) in kinds.items():
            shown = [row for row in rows if row.place.setting == setting and figure_of(row)]
            if shown:
                path = folder / f"{kind}_{_file_name(setting)}.png"
                _write(path, setting, draw, shown)
                written.append(path)
    return written


def _file_name(setting: str) -> str:
    return re.sub(r"\W+", "_", setting).strip("_").lower()


def _write(
    path: Path, title: str, draw: Callable[[Axes, list[Row]], None], rows: list[Row]
) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib; pip install 'selfspec[bench]'") from error
    figure = Figure(figsize=(8, 1.6 + 0.34 * len(rows)), layout="constrained")
    ax = figure.subplots()
    draw(ax, rows)
    ax.set_title(title, loc="left")
    ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _names(rows: Sequence[Row]) -> list[str]:
    """What a row is called beside the others: by its set too where there are several."""
    several = len({row.place.prompts for row in rows}) > 1
    return [
        f"{row.place.method} · {row.place.prompts}" if several else row.place.method for row in rows
    ]


def _speedups(ax: Axes, rows: list[Row]) -> None:
    sets = list(dict.fromkeys(row.place.prompts for row in rows))
    for number, row in enumerate(rows):
        found = row.speedup
        assert found is not None
        spread = [[found.value - found.low], [found.high - found.value]]
        colour = _COLOURS[sets.index(row.place.prompts) % len(_COLOURS)]
        ax.barh(number, found.value, xerr=spread, color=colour, capsize=3)
        ax.annotate(
            f"{found.value:.2f}x ", (found.low, number), color="white", ha="right", va="center"
        )
    ax.axvline(1, color="black", linewidth=0.8)
    ax.set_yticks(range(len(rows)), _names(rows), fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel("speedup over the model's own generate, 95 % interval")


def _acceptance(ax: Axes, rows: list[Row]) -> None:
    for number, (row, name) in enumerate(zip(rows, _names(rows), strict=True)):
        positions = range(1, len(row.acceptance_by_position) + 1)
        marker = _MARKERS[number % len(_MARKERS)]
        colour = _COLOURS[number % len(_COLOURS)]
        ax.plot(positions, row.acceptance_by_position, marker=marker, color=colour, label=name)
    ax.set(xlabel="position in the draft", ylabel="share of drafts kept", ylim=(0, 1.02))
    ax.set_xticks(range(1, 1 + max(len(row.acceptance_by_position) for row in rows)))
    ax.figure.set_figheight(max(4.0, 1 + 0.25 * len(rows)))  # pyright: ignore[reportAttributeAccessIssue]
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)


def _time(ax: Axes, rows: list[Row]) -> None:
    left = [0.0] * len(rows)
    for part, colour in _PARTS.items():
        shares = [row.time_split[part] for row in rows]
        ax.barh(range(len(rows)), shares, left=left, color=colour, label=part)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    ax.set_yticks(range(len(rows)), _names(rows), fontsize=8)
    ax.invert_yaxis()
    ax.set(xlabel="share of decode time", xlim=(0, 1))
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
