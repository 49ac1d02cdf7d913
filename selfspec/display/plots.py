"""Figures, drawn with matplotlib where it is installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from selfspec.config import unknown_name
from selfspec.display.exits import MODEL, ExitReadings
from selfspec.schedule.stats import Stats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Measure = Literal["agreement", "overlap", "entropy"]

# Okabe and Ito's colours, which colour-blind readers tell apart.
_COLOURS = ("#009e73", "#d55e00", "#0072b2", "#cc79a7", "#e69f00", "#56b4e9")
_MARKERS = "osD^vP"
_LABELS: dict[Measure, str] = {
    "agreement": "says what the model says",
    "overlap": "overlap with the model, Σ min(p, q)",
    "entropy": "entropy (bits)",
}
_LONGEST = 9  # characters that a cell of the heat map holds
_CELL: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "parse_math": False}
_MARKS = str.maketrans({" ": "·", "\n": "↵", "\t": "⇥"})


def acceptance_plot(by_exit: Mapping[int, Stats], ax: Axes | None = None) -> Axes:
    """Draw acceptance rate and tokens per round over the exit layer.

    Args:
        by_exit: counters of a call, or of several, per exit layer.
        ax: where to draw; `None` opens a figure.

    Raises:
        ImportError: matplotlib is missing.
    """
    ax = ax or new_axes("acceptance_plot", 6, 3.5)
    layers = sorted(by_exit)
    rates = [by_exit[layer].acceptance_rate for layer in layers]
    lengths = [by_exit[layer].mean_accepted_length for layer in layers]
    (left,) = ax.plot(layers, rates, "o-", color="#009e73", label="acceptance rate (left)")
    ax.set(xlabel="exit layer", ylabel="accepted / drafted", ylim=(0, 1))
    ax.set_xticks(layers)
    other = ax.twinx()
    (right,) = other.plot(layers, lengths, "s--", color="#0072b2", label="tokens per round (right)")
    other.set(ylabel="mean accepted length", ylim=(1, None))
    ax.legend(handles=[left, right], loc="upper left", frameon=False)
    return ax


def exits_plot(
    readings: ExitReadings, measure: Measure = "agreement", ax: Axes | None = None
) -> Axes:
    """Draw a mean over the text against the exit layer, a line for each kind of head.

    Args:
        readings: what the exits said.
        measure: `"agreement"`, how often an exit says what the model says; `"overlap"`, how likely
            its drafts are to be accepted when sampling; `"entropy"`, how unsure it is.
        ax: where to draw; `None` opens a figure.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: there is no such measure.
    """
    ax = ax or new_axes("exits_plot", 5, 3.5)
    means = _values(readings, measure).double().mean(1).tolist()
    rows = list(zip(readings.kinds, readings.layers, means, strict=True))
    kinds = [kind for kind in dict.fromkeys(readings.kinds) if kind != MODEL]
    for number, kind in enumerate(kinds):
        layers, values = zip(*[row[1:] for row in rows if row[0] == kind], strict=True)
        colour, marker = _COLOURS[number % 6], _MARKERS[number % 6]
        ax.plot(layers, values, color=colour, marker=marker, markersize=5, label=kind)
    if measure == "entropy":
        ax.axhline(means[-1], color="0.5", linestyle=":", label="the model")
    ax.set(xlabel="exit layer", ylabel=_LABELS[measure])
    ax.margins(y=0.15)
    ax.set_ylim(0, None if measure == "entropy" else 1)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    ax.legend(frameon=False)
    return ax


def exits_heatmap(readings: ExitReadings, ax: Axes | None = None) -> Axes:
    """Draw what every exit would say after each token: a row for each exit, the model on top.

    A cell holds the exit's likeliest token, `·` for a space: green where the model says the same,
    orange where it does not, the darker the surer. Above the black line all rows agree.

    Args:
        readings: what the exits said; a slice of some twenty tokens is easy to read.
        ax: where to draw; `None` opens a figure that fits.

    Raises:
        ImportError: matplotlib is missing.
    """
    rows, tokens = readings.ids.shape
    ax = ax or new_axes("exits_heatmap", 2.2 + 0.66 * tokens, 1.1 + 0.28 * rows)
    _colour_cells(ax, readings)
    for row, pieces in enumerate(readings.said):
        for token, piece in enumerate(pieces):
            colour = "white" if readings.probabilities[row, token] > 0.6 else "black"
            ax.text(token, row, _short(piece), color=colour, **_CELL)
    edges = [token - 0.5 for token in range(tokens + 1)]
    ax.stairs(readings.settled.numpy() - 0.5, edges, baseline=None, color="black", linewidth=1.8)
    ax.set_yticks(range(rows), readings.names)
    words = [_short(piece) for piece in readings.text]
    ax.set_xticks(range(tokens), words, parse_math=False)
    ax.tick_params(length=0, labelsize=8)
    ax.spines[:].set_visible(False)
    ax.set(xlabel="the text; above each token, what comes next, the darker the more probable")
    return ax


def new_axes(what: str, width: float, height: float) -> Axes:
    """Axes of a new figure of that size in inches; ImportError says what needs matplotlib."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(f"{what} needs matplotlib; pip install 'selfspec[plots]'") from error
    return pyplot.subplots(figsize=(width, height), layout="constrained")[1]


def _values(readings: ExitReadings, measure: Measure) -> Tensor:
    if measure not in _LABELS:
        raise ValueError(unknown_name("measure", measure, list(_LABELS)))
    values = {"agreement": readings.agrees, "overlap": readings.overlaps}
    return values.get(measure, readings.entropies)


def _colour_cells(ax: Axes, readings: ExitReadings) -> None:
    """Two hues, and beside them what their shades mean."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable

    agreeing, differing = colormaps["Greens"], colormaps["Oranges"]
    probabilities, agrees = readings.probabilities.numpy(), readings.agrees.numpy()[..., None]
    cells = np.where(agrees, agreeing(probabilities), differing(probabilities))
    ax.imshow(cells, origin="lower", aspect="auto")
    meanings = {"differs": differing, "agrees": agreeing}
    for label, colours in meanings.items():
        ax.figure.colorbar(
            ScalarMappable(cmap=colours), ax=ax, label=label, pad=0.01, fraction=0.02
        )


def _short(piece: str) -> str:
    """A piece that fits in a cell, with all that is invisible made visible."""
    marked = piece.translate(_MARKS)
    seen = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in marked)
    return seen if len(seen) <= _LONGEST else f"{seen[: _LONGEST - 1]}…"
