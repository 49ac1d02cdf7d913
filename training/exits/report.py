"""Reports of a fit: JSON, and a page with plots."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from selfspec.apps.display.plots import line_styles
from selfspec.apps.display.report import HTMLReport
from selfspec.heads.files import replace_text

from .calibrate import Bin

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# A curve of more points is drawn pale, with its running mean on top.
_READABLE = 60


def draw_plots(
    figures: Mapping[str, Sequence[ExitFigures]],
    history: Sequence[Mapping[str, Any]],
    reliability: Mapping[str, Sequence[Bin]],
) -> Iterator[tuple[str, bytes]]:
    """The plots that have data, as PNG.

    Args:
        figures: figures of each exit, by domain.
        history: entries of `metrics.jsonl`; every value with "loss" in its name is a curve.
        reliability: bins of each exit's calibrator, by the exit's name.

    Yields:
        The title of a plot, and its bytes.

    Raises:
        ImportError: matplotlib is missing.
    """
    for domain, exits in figures.items():
        if len({exit.exit_layer for exit in exits}) > 1:
            yield _drawn(f"Acceptance of the first drafted token: {domain}", _draw_by_exit, exits)
        if exits:
            yield _drawn(f"Acceptance along the draft: {domain}", _draw_by_depth, exits)
    if curves := _loss_curves(history):
        yield _drawn("Loss", _draw_losses, curves)
    if reliability:
        yield _drawn("Reliability of the calibrators", _draw_reliability, reliability)


def _drawn(title: str, draw: Callable[[Figure, Any], None], content: Any) -> tuple[str, bytes]:
    # Not pyplot, which would keep every figure in memory.
    from matplotlib.figure import Figure

    sheet, file = Figure(figsize=(7, 4), dpi=150, layout="constrained"), io.BytesIO()
    sheet.suptitle(title)
    draw(sheet, content)
    sheet.savefig(file, format="png")
    return title, file.getvalue()


def _draw_by_exit(sheet: Figure, figures: Sequence[ExitFigures]) -> None:
    axes = _axes(sheet)
    kinds = dict.fromkeys(exit.kind for exit in figures)
    for kind, style in line_styles(kinds):
        exits = sorted((e for e in figures if e.kind == kind), key=lambda e: e.exit_layer)
        layers = [exit.exit_layer for exit in exits]
        _draw_pair(
            axes, layers, [e.alpha[0] for e in exits], [e.agreement[0] for e in exits], style
        )
    axes.set(xlabel="exit layer (layers below the exit)")
    _finish_acceptance(sheet, axes, kinds, {exit.exit_layer for exit in figures})


def _draw_by_depth(sheet: Figure, figures: Sequence[ExitFigures]) -> None:
    axes = _axes(sheet)
    for exit, (_, style) in zip(figures, line_styles(figures), strict=True):
        _draw_pair(axes, range(1, len(exit.alpha) + 1), exit.alpha, exit.agreement, style)
    axes.set(xlabel="drafted token")
    deepest = max(len(exit.alpha) for exit in figures)
    _finish_acceptance(sheet, axes, [exit.name for exit in figures], range(1, deepest + 1))


def _draw_losses(sheet: Figure, curves: Mapping[str, tuple[list[int], list[float]]]) -> None:
    axes = _axes(sheet)
    for name, style in line_styles(curves):
        steps, values = curves[name]
        colour, window = style["color"], -(-len(values) // _READABLE)
        if window == 1:
            axes.plot(steps, values, **style, label=name)
            continue
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(steps, _running_mean(values, window), color=colour, linewidth=1.8, label=name)
    axes.set(xlabel="step", ylabel="loss (nats per position)")
    axes.margins(x=0.01)
    sheet.legend(loc="outside right upper", frameon=False)


def _draw_reliability(sheet: Figure, reliability: Mapping[str, Sequence[Bin]]) -> None:
    axes = _axes(sheet, (1, 2, 1), "on drafts that they were not fitted to")
    shares = _axes(sheet, (1, 2, 2), "how often each was predicted")
    axes.plot([0, 1], [0, 1], color="0.6", linestyle=":", label="perfect")
    for name, style in line_styles(reliability):
        bins = reliability[name]
        confidence, total = [b.confidence for b in bins], sum(b.drafts for b in bins)
        axes.plot(confidence, [b.observed for b in bins], **style, label=name)
        shares.plot(confidence, [b.drafts / total for b in bins], **style)
    axes.set(xlabel="predicted P(accepted)", ylabel="accepted", xlim=(0, 1), ylim=(0, 1))
    axes.set_aspect("equal")
    shares.set(xlabel="predicted P(accepted)", ylabel="share of drafts", xlim=(0, 1))
    shares.set_ylim(bottom=0)
    sheet.legend(loc="outside lower center", ncols=3, frameon=False)


def _axes(sheet: Figure, place: tuple[int, int, int] = (1, 1, 1), title: str = "") -> Axes:
    axes = sheet.add_subplot(*place)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_title(title, fontsize="medium")
    return axes


def _draw_pair(
    axes: Axes,
    places: Sequence[int],
    alpha: Sequence[float],
    agreement: Sequence[float],
    style: dict[str, Any],
) -> None:
    axes.plot(places, alpha, **style)
    axes.plot(places, agreement, **style, linestyle="--", markerfacecolor="white")


def _finish_acceptance(
    sheet: Figure, axes: Axes, names: Iterable[str], ticks: Iterable[int]
) -> None:
    from matplotlib.lines import Line2D

    axes.set(ylabel="share of drafted tokens", ylim=(0, 1))
    axes.set_xticks(sorted(ticks))
    lines = [Line2D([], [], **style, label=name) for name, style in line_styles(names)]
    grey: dict[str, Any] = {"color": "0.4", "marker": "o", "markersize": 5}
    lines += [
        Line2D([], [], **grey, label="α (sampled)"),
        Line2D([], [], **grey, linestyle="--", markerfacecolor="white", label="top-1 (greedy)"),
    ]
    sheet.legend(handles=lines, loc="outside right upper", frameon=False)


def _loss_curves(
    history: Sequence[Mapping[str, Any]],
) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and values of all metrics named "loss"; of equal curves only the first."""
    names = dict.fromkeys(name for entry in history for name in entry if "loss" in name)
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for name in names:
        points = [(entry["step"], entry[name]) for entry in history if name in entry]
        curve = [step for step, _ in points], [value for _, value in points]
        if curve not in curves.values():  # the loss of a single head is the whole loss
            curves[name] = curve
    return curves


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean over `window` values on either side, fewer at the ends."""
    sums = [0.0, *itertools.accumulate(values)]
    spans = [(max(0, i - window), min(len(values), i + window + 1)) for i in range(len(values))]
    return [(sums[stop] - sums[start]) / (stop - start) for start, stop in spans]


REPORT_NAME, PAGE_NAME = "report.json", "report.html"
_NOTES = (
    "agreement: how often the most likely tokens of head and model are equal; α: the probability "
    "that a draft sampled at temperature 1 is accepted; both at the first → last depth of a draft. "
    "tokens: emitted in a round, including the model's own. speedup: greedy over plain decoding, "
    "predicted from agreement and measured times. ECE: expected calibration error of the "
    "predicted acceptance."
)


@dataclass(frozen=True)
class ExitFigures:
    """Figures of one exit head on held-out text.

    Attributes:
        kind: kind of the head.
        exit_layer: number of layers below the exit.
        agreement: by draft depth, how often the draft's top token is the target's.
        alpha: by draft depth, the mean of Σ min(p, q).
        accepted_length: tokens per round of real decoding, by mode: greedy, sampled.
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
        """The name of the exit."""
        return f"{self.kind}, exit {self.exit_layer}"

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values."""
        return asdict(self)


_CAPTION = "agreement, α: first→last draft depth; tokens: a round"


def figures_table(figures: Sequence[ExitFigures], title: str | None = None) -> Table:
    """One line per exit; acceptance at the first and the last draft depth.

    Args:
        figures: the exits, in the order of the lines.
        title: title of the table.
    """
    columns, rows = _cells(figures)
    table = Table(title=title, caption=_CAPTION if len(columns) > 6 else None)
    table.add_column(columns[0], style="bold")
    for name in columns[1:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _cells(figures: Sequence[ExitFigures]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows; modes of decoding have columns if there are any."""
    modes = list(dict.fromkeys(mode for exit in figures for mode in exit.accepted_length))
    columns = ["head", "exit", "agreement", "α", *(f"tokens\n{m}" for m in modes)]
    rows = [
        [
            exit.kind,
            str(exit.exit_layer),
            _first_to_last(exit.agreement),
            _first_to_last(exit.alpha),
            *(_number(exit.accepted_length.get(mode), ".2f") for mode in modes),
            _number(exit.predicted_speedup, ".2f", "×"),
            _number(exit.ece, ".3f"),
        ]
        for exit in figures
    ]
    return [*columns, "speedup", "ECE"], rows


def _first_to_last(values: Sequence[float]) -> str:
    ends = [*values[:1], *values[1:][-1:]]
    return "→".join(f"{value:.2f}" for value in ends) or "–"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else format(value, form) + unit


def write_report(
    folder: Path,
    figures: Mapping[str, Sequence[ExitFigures]],
    history: Sequence[Mapping[str, Any]] = (),
    reliability: Mapping[str, Sequence[Bin]] | None = None,
    facts: Mapping[str, Any] | None = None,
    say: Callable[[str], object] | None = None,
) -> list[Path]:
    """Write `report.json` and `report.html`, which has plots if matplotlib is installed.

    Args:
        folder: created if it does not exist.
        figures: figures of each exit, by domain.
        history: entries of the run's `metrics.jsonl`, each with its step.
        reliability: bins of each exit's calibrator, by the exit's name.
        facts: facts about the fit for the top of the page.
        say: receives the message that plots need matplotlib; `None` prints it.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bins = reliability or {}
    content = {
        "domains": {name: [exit.to_dict() for exit in some] for name, some in figures.items()},
        "reliability": {name: [b._asdict() for b in some] for name, some in bins.items()},
    }
    report = folder / REPORT_NAME
    replace_text(report, json.dumps(content, indent=2) + "\n")
    page = HTMLReport("Fit of exit heads")
    page.facts(facts or {})
    for domain, exits in figures.items():
        page.heading(f"Held-out text: {domain}")
        page.table(*_cells(exits))
    page.text(_NOTES)
    try:
        for shows, png in draw_plots(figures, history, bins):
            page.picture(png, shows)
    except ImportError:
        message = "plots were left out: they need matplotlib (pip install matplotlib)"
        page.text(message)
        (say or Console().print)(message)
    return [report, page.write(folder / PAGE_NAME)]
