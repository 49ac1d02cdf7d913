"""Memory of plain decoding and of self-speculation: the peak at a context, and growth with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from selfspec.bench.grid import Grid, mebibytes
from selfspec.bench.meters import held_memory, peak_memory
from selfspec.bench.plots import COLOURS, MARKERS, write_picture
from selfspec.bench.tiny import tiny_target
from selfspec.bench.traffic import kv_bytes
from selfspec.config import DraftConfig
from selfspec.generation.streaming import RoundStreamer
from selfspec.model import SelfSpecModel
from selfspec.schedule.stats import Round

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CONTEXT = 1024
GROWTH = 10_000
_WRITTEN = 128  # tokens that are written up to the context
_POINTS = 10
_PROMPT = 16
_OWN = "the model's own generate"


@dataclass(frozen=True)
class Peak:
    """What decoding up to a context needs, in bytes.

    Attributes:
        way: to decode.
        context: tokens in the end.
        peak: the most that was held.
        growth: how much of it was not there before.
        kv: keys and values of the context, without room for more.
    """

    way: str
    context: int
    peak: int
    growth: int
    kv: int


@dataclass(frozen=True)
class Growth:
    """How memory grows while a random tiny model writes.

    Attributes:
        way: to decode.
        tokens: written, at each point.
        held: bytes held there.
        kv: keys and values there, without room for more.
    """

    way: str
    tokens: list[int]
    held: list[int]
    kv: list[int]


@dataclass(frozen=True)
class MemoryReport:
    """What decoding needs.

    Attributes:
        peaks: of the target.
        growth: of a random tiny model, whose positions are many.
    """

    peaks: list[Peak]
    growth: list[Growth]

    notes = (
        "Peak: the most that the process held during the call, or that was allocated on the GPU; "
        "grown by: the part of it that was not there before. KV: keys and values of all layers, "
        "the head's own among them, without room for more. Growth: what is held at that many "
        "written tokens, less what was held at the first point."
    )

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return asdict(self)

    @property
    def grids(self) -> list[Grid]:
        """Peaks, and growth."""
        peaks = [
            [peak.way, str(peak.context), *map(mebibytes, (peak.peak, peak.growth, peak.kv))]
            for peak in self.peaks
        ]
        columns = ["way", "tokens", "held MiB", "grown MiB", "KV grown MiB"]
        grown = [
            [way.way, str(tokens), *map(mebibytes, (held, held - way.held[0], kv - way.kv[0]))]
            for way in self.growth
            for tokens, held, kv in zip(way.tokens, way.held, way.kv, strict=True)
        ]
        return [
            Grid("peak", ["way", "context", "peak MiB", "grown by MiB", "KV MiB"], peaks),
            Grid("growth, random tiny model", columns, grown),
        ]

    def plots(self, folder: Path) -> list[Path]:
        """Draw the growth to a PNG.

        Raises:
            ImportError: matplotlib is missing.
        """
        path = folder / "memory_growth.png"
        write_picture(path, "growth, random tiny model", self._draw)
        return [path]

    def _draw(self, ax: Axes) -> None:
        for place, way in enumerate(self.growth):
            look: Any = {"marker": MARKERS[place], "color": COLOURS[place]}
            ax.plot(way.tokens, _from_first(way.held), label=way.way, **look)
            ax.plot(way.tokens, _from_first(way.kv), "--", label=f"{way.way}: KV", **look)
        ax.set(xlabel="tokens written", ylabel="MiB more than at the first point")
        ax.legend(frameon=False)


def _from_first(values: Sequence[int]) -> list[float]:
    return [(value - values[0]) / 2**20 for value in values]


def measure_memory(
    spec: SelfSpecModel,
    context: int = _CONTEXT,
    growth: int | None = None,
    say: Callable[[str], object] = lambda part: None,
) -> MemoryReport:
    """Measure plain decoding and self-speculation, with a fused head where there is one.

    Args:
        spec: the target; one without the positions is measured at as many as it has.
        context: tokens in the end, the prompt among them.
        growth: tokens that the tiny model writes; `None` takes `GROWTH`.
        say: told what is measured.

    Raises:
        OSError: this system does not tell how much memory a process holds.
    """
    device = spec.engine.decoder.device
    if held_memory(device) is None:
        raise OSError("this system does not tell how much memory a process holds")
    growth = growth or GROWTH
    context = min(context, spec.engine.decoder.max_positions or context)
    peaks = [_peak(spec, way, draft, context, say) for way, draft in _ways(spec).items()]
    tiny = tiny_target(64, 4, 2 * growth, head="fused")
    tiny.causal_lm.to(device)  # pyright: ignore[reportArgumentType]
    tiny = SelfSpecModel(tiny.model, [head.to(device) for head in tiny.heads])
    grown = [_growth(tiny, way, draft, growth, say) for way, draft in _ways(tiny).items()]
    return MemoryReport(peaks, grown)


def _ways(spec: SelfSpecModel) -> dict[str, DraftConfig | None]:
    """Ways to decode; `None` is the model's own `generate`."""
    fused = [head for head in spec.heads if head.kind == "fused"]
    draft = DraftConfig(exit_layer=fused[0].exit_layer, head="fused") if fused else DraftConfig()
    head = spec.engine.head(draft)
    return {_OWN: None, f"self-speculation, {head.kind} head at {head.exit_layer}": draft}


def _write(
    spec: SelfSpecModel, draft: DraftConfig | None, prompt: Tensor, count: int, **more: Any
) -> None:
    generate: Any = spec.model.generate
    options = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0, **more}
    if draft is not None:
        generate, options = spec.generate, {**options, "draft": draft}
    generate(prompt, attention_mask=torch.ones_like(prompt), **options)


def _prompt(spec: SelfSpecModel, width: int) -> Tensor:
    decoder = spec.engine.decoder
    source = torch.Generator().manual_seed(0)
    return torch.randint(decoder.vocab_size, (1, width), generator=source).to(decoder.device)


def _kv(spec: SelfSpecModel, draft: DraftConfig | None, tokens: int) -> int:
    """Bytes of the keys and values of so many tokens."""
    each = kv_bytes(spec.engine.decoder)
    own = draft is not None and spec.engine.head(draft).layer is not None
    head = each[spec.engine.head(draft).place] if own and draft is not None else 0
    return tokens * (sum(each) + head)


def _peak(
    spec: SelfSpecModel,
    way: str,
    draft: DraftConfig | None,
    context: int,
    say: Callable[[str], object],
) -> Peak:
    say(f"peak of {way}")
    written = min(_WRITTEN, context // 2)
    prompt = _prompt(spec, context - written)
    _write(spec, draft, prompt[:, :_PROMPT], 2)  # what is allocated once
    found = peak_memory(
        lambda: _write(spec, draft, prompt, written, min_new_tokens=written),
        spec.engine.decoder.device,
    )
    assert found is not None
    return Peak(way, context, found.peak, found.growth, _kv(spec, draft, context))


class _Watcher(RoundStreamer):
    """Notes how much memory is held as tokens arrive.

    Args:
        device: whose memory.
        every: tokens from one point to the next.
    """

    def __init__(self, device: torch.device, every: int):
        self.device, self.every = device, every
        self.count = -_PROMPT
        self.points: list[tuple[int, int]] = []

    def put(self, value: Tensor) -> None:
        """Take the prompt, and tokens of the model's own `generate`."""
        self._note(value.numel())

    def put_round(self, steps: Sequence[Round]) -> None:
        """Take a round."""
        self._note(sum(len(step.tokens) for step in steps))

    def end(self) -> None:
        """Nothing follows."""

    def _note(self, count: int) -> None:
        self.count += count
        if self.count >= self.every * (len(self.points) + 1):
            self.points.append((self.count, held_memory(self.device) or 0))


def _growth(
    spec: SelfSpecModel,
    way: str,
    draft: DraftConfig | None,
    count: int,
    say: Callable[[str], object],
) -> Growth:
    say(f"growth of {way}")
    decoder = spec.engine.decoder
    watcher = _Watcher(decoder.device, count // _POINTS)
    streamer: BaseStreamer = watcher
    _write(spec, draft, _prompt(spec, _PROMPT), count, streamer=streamer)
    tokens, held = (list(values) for values in zip(*watcher.points, strict=True))
    return Growth(way, tokens, held, [_kv(spec, draft, _PROMPT + n) for n in tokens])
