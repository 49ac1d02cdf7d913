"""What tuning found: a map of predicted speedups, and what was really run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from selfspec.display.plots import new_axes
from selfspec.schedule.profile import Profile, Validation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# As fast as plain decoding, and what is drawn as far from it as can be seen.
_EVEN, _FARTHEST = (235, 235, 235), 0.6
_FASTER, _SLOWER = (0, 158, 115), (213, 94, 0)  # Okabe and Ito's, for colour-blind readers


def speedup_table(profile: Profile) -> Table:
    """The map on a terminal: a line for each exit, a column for each number of drafts.

    Args:
        profile: what tuning found.
    """
    table = Table(
        title="predicted speedup over plain decoding",
        caption="exit head × drafts a round; plain decoding is 1.00",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    names, lengths, speedups = _grid(profile)
    table.add_column("exit", style="bold")
    for length in lengths:
        table.add_column(f"{length} ", justify="right")
    best = max(max(row) for row in speedups)
    for name, row in zip(names, speedups, strict=True):
        table.add_row(name, *(_cell(speedup, speedup == best) for speedup in row))
    return table


def _cell(speedup: float, best: bool) -> Text:
    red, green, blue = _colour(speedup)
    style = f"black on rgb({red},{green},{blue}){' bold underline' if best else ''}"
    return Text(f" {speedup:.2f} ", style)


def _colour(speedup: float) -> tuple[int, int, int]:
    """From grey, where nothing is gained, to green or orange."""
    share = min(1.0, abs(speedup - 1) / _FARTHEST)
    end = _FASTER if speedup >= 1 else _SLOWER
    red, green, blue = (
        round(even + share * (far - even)) for even, far in zip(_EVEN, end, strict=True)
    )
    return red, green, blue


def validation_table(profile: Profile) -> Table:
    """What was run on held-out prompts, fastest first.

    Args:
        profile: what tuning found.
    """
    table = Table(
        title="on held-out prompts",
        caption="→ is what generate() takes",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("")
    table.add_column("way", style="bold")
    for name in ("tokens/s", "speedup", "predicted", "accepted", "tokens a round", "text"):
        table.add_column(name, justify="right")
    chosen = next((ran for ran in profile.validation if ran.draft == profile.draft), None)
    for ran in profile.validation:
        table.add_row("→" if ran is chosen else "", ran.name, *_figures(ran))
    return table


def _figures(ran: Validation) -> Sequence[str]:
    equal = {True: "equal", False: "NOT EQUAL", None: ""}[ran.equal]
    return (
        f"{ran.tokens_per_second:.1f}",
        f"{ran.speedup:.2f}x",
        "" if ran.predicted is None else f"{ran.predicted:.2f}x",
        f"{ran.acceptance_rate:.3f}",
        f"{ran.mean_accepted_length:.2f}",
        equal,
    )


def speedup_map(profile: Profile, ax: Axes | None = None) -> Axes:
    """Draw the map: an exit head in each row, drafts of a round across.

    Args:
        profile: what tuning found.
        ax: where to draw; `None` opens a figure that fits.

    Raises:
        ImportError: matplotlib is missing.
    """
    names, lengths, speedups = _grid(profile)
    ax = ax or new_axes("speedup_map", 2.5 + 0.6 * len(lengths), 1.2 + 0.35 * len(names))
    cells = [[[part / 255 for part in _colour(speedup)] for speedup in row] for row in speedups]
    ax.imshow(cells, aspect="auto")
    best = max(max(row) for row in speedups)
    for y, row in enumerate(speedups):
        for x, speedup in enumerate(row):
            weight = "bold" if speedup == best else "normal"
            ax.text(x, y, f"{speedup:.2f}", ha="center", va="center", fontsize=8, weight=weight)
    ax.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    ax.set_yticks(range(len(names)), names)
    place = profile.place
    ax.set_title(f"predicted speedup, {place.device}, {place.dtype}", fontsize="medium")
    ax.set(xlabel="drafts a round", ylabel="exit head")
    return ax


def _grid(profile: Profile) -> tuple[list[str], list[int], list[list[float]]]:
    """Rows, columns and values of the map.

    Raises:
        ValueError: nothing was predicted.
    """
    speedups = {(p.name, p.num_draft_tokens): p.speedup for p in profile.predictions}
    if not speedups:
        raise ValueError("the profile holds no predictions to show; tune again")
    names = list(dict.fromkeys(name for name, _ in speedups))
    lengths = sorted({length for _, length in speedups})
    nan = float("nan")
    return names, lengths, [[speedups.get((name, k), nan) for k in lengths] for name in names]
