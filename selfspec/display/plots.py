"""Figures, drawn with matplotlib where it is installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from selfspec.stats import Stats

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def acceptance_plot(by_exit: Mapping[int, Stats], ax: Axes | None = None) -> Axes:
    """Draw acceptance rate and tokens per round over the exit layer.

    Args:
        by_exit: counters of a call, or of several, per exit layer.
        ax: where to draw; `None` opens a figure.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "acceptance_plot needs matplotlib; pip install 'selfspec[plots]'"
        ) from error
    if ax is None:
        _, ax = pyplot.subplots(figsize=(6, 3.5))
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
