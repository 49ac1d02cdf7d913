"""How the cost of a round grows with batch, context and depth, on random tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from selfspec.bench.grid import Grid, number
from selfspec.bench.plots import COLOURS, write_picture
from selfspec.bench.tiny import tiny_target
from selfspec.bench.tune.clock import Probe, Seconds, begin, medians
from selfspec.bench.tune.config import TuneConfig
from selfspec.bench.tune.work import WorkFile
from selfspec.config import DraftConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 64
_DRAFTS = 4
_TURNS = 15
_ROOM = 256  # positions that are written while the clock runs
_CHUNK = 1024  # tokens of a row that are prefilled at once
_ROUNDS = {"plain": DraftConfig(drafter="none")}
_ROUNDS["speculative"] = DraftConfig(head="shared", num_draft_tokens=_DRAFTS)


class Shape(NamedTuple):
    """What a round is timed at.

    Attributes:
        batch: rows.
        context: tokens in the cache.
        depth: layers.
    """

    batch: int = 1
    context: int = 128
    depth: int = 8


SWEEPS: dict[str, tuple[int, ...]] = {
    "batch": (1, 2, 4, 8, 16, 32),
    "context": (128, 256, 512, 1024, 2048, 4096, 8192),
    "depth": (4, 8, 16, 32, 64),
}


@dataclass(frozen=True)
class Point:
    """Median seconds of a round at one shape.

    Attributes:
        along: what is varied.
        shape: where it was timed.
        seconds: by kind of round: in all, and in layers and heads.
    """

    along: str
    shape: Shape
    seconds: dict[str, Seconds]

    @property
    def value(self) -> int:
        """Of what is varied."""
        return getattr(self.shape, self.along)


@dataclass(frozen=True)
class Scaling:
    """How a round's cost grows.

    Attributes:
        points: sweep by sweep.
    """

    points: list[Point]

    notes = (
        f"Milliseconds of a round, medians of {_TURNS} interleaved ones, on random Llamas of width "
        f"{_WIDTH}; where nothing else is said: batch {Shape().batch}, context {Shape().context}, "
        f"{Shape().depth} layers. A speculative round drafts {_DRAFTS} tokens behind a quarter of "
        "the layers with the shared head. outside: what is neither layer nor head."
    )

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values."""
        plain = [
            {
                **asdict(point),
                "shape": point.shape._asdict(),
                "seconds": {name: found._asdict() for name, found in point.seconds.items()},
            }
            for point in self.points
        ]
        return {"points": plain}

    @property
    def grids(self) -> list[Grid]:
        """A table for each sweep."""
        columns = [f"{name}{part}" for name in _ROUNDS for part in (" ms", ", outside")]
        return [
            Grid(f"cost of a round by {along}", [along, *columns], [_cells(p) for p in points])
            for along, points in self._sweeps()
        ]

    def _sweeps(self) -> Iterator[tuple[str, list[Point]]]:
        for along in dict.fromkeys(point.along for point in self.points):
            yield along, [point for point in self.points if point.along == along]

    def plots(self, folder: Path) -> list[Path]:
        """Draw each sweep to a PNG.

        Raises:
            ImportError: matplotlib is missing.
        """
        written: list[Path] = []
        for along, points in self._sweeps():
            path = folder / f"scaling_{along}.png"
            title = f"cost of a round by {along}"
            write_picture(path, title, lambda ax, points=points: _draw(ax, points))
            written.append(path)
        return written


def _cells(point: Point) -> list[str]:
    found = [str(point.value)]
    for seconds in point.seconds.values():
        outside = 1 - seconds.inside / seconds.wall
        found += [number(1000 * seconds.wall, 2), number(outside, 3)]
    return found


def _draw(ax: Axes, points: list[Point]) -> None:
    values = [point.value for point in points]
    for colour, name in zip(COLOURS, _ROUNDS, strict=False):
        wall = [1000 * point.seconds[name].wall for point in points]
        inside = [1000 * point.seconds[name].inside for point in points]
        ax.plot(values, wall, "o-", color=colour, label=f"{name} round")
        ax.plot(values, inside, "o--", color=colour, label="in layers and heads", fillstyle="none")
    ax.set_xscale("log", base=2)
    ax.set_xticks(values, [str(value) for value in values])
    ax.set(xlabel=points[0].along, ylabel="milliseconds")
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False)


def measure_scaling(
    work: WorkFile,
    device: torch.device,
    sweeps: dict[str, tuple[int, ...]] | None = None,
    say: Callable[[str, int, int], object] = lambda part, done, of: None,
) -> Scaling:
    """Time rounds at every shape of the sweeps, one thing varied at a time.

    Args:
        work: keeps what was measured.
        device: where to run.
        sweeps: values by what is varied; `None` takes `SWEEPS`.
        say: told what is measured, how much is done, and of how much.
    """
    sweeps = sweeps or SWEEPS
    places = [(along, Shape()._replace(**{along: v})) for along in sweeps for v in sweeps[along]]
    points: list[Point] = []
    for done, (along, shape) in enumerate(places):
        say(", ".join(f"{n} {v}" for n, v in shape._asdict().items()), done, len(places))
        found = work.part("round", shape._asdict(), lambda shape=shape: _measure(shape, device))
        seconds = {name: Seconds(*values) for name, values in found.items()}
        points.append(Point(along, shape, seconds))
    return Scaling(points)


@torch.inference_mode()
def _measure(shape: Shape, device: torch.device) -> dict[str, list[float]]:
    """Seconds of rounds behind a random text."""
    spec = tiny_target(_WIDTH, shape.depth, shape.context + _ROOM)
    spec.causal_lm.to(device)  # pyright: ignore[reportArgumentType]
    engine = spec.engine
    text = _text(engine.decoder.vocab_size, shape, device)
    probes: dict[Any, Probe] = {}
    with engine.decoder:
        for name, draft in _ROUNDS.items():
            session = begin(engine, draft, text, TuneConfig())
            session.config.prefill_chunk_size = _CHUNK  # pyright: ignore[reportAttributeAccessIssue]
            state = session.start()
            step = lambda session=session, state=state: session.step(state)  # noqa: E731
            probes[name] = Probe(step, state.stats)
        found = medians(probes, _TURNS, device)
    return {name: list(found[name]) for name in _ROUNDS}


def _text(vocab: int, shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab, (shape.batch, shape.context), generator=source).to(device)
    return tokens, torch.ones_like(tokens)
