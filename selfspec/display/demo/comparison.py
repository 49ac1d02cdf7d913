"""What selfspec's loop costs, with drafting switched off and on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from selfspec.config import DraftConfig
from selfspec.display.demo.timing import interleaved, rate, ratio
from selfspec.display.demo.writer import WARM_UP_TOKENS, Run, Writer

_MAX_OVERHEAD = 0.10


class Bar(NamedTuple):
    """A figure and the limit that it has to keep."""

    name: str
    value: float
    limit: float
    at_least: bool

    @property
    def met(self) -> bool:
        """Whether it does."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass(frozen=True)
class Comparison:
    """What the loop costs: runs of the model's own `generate`, of ours without drafts, of ours.

    Attributes:
        runs: runs by way: `generate`, `none` and the drafter's name.
        drafter: the drafter's name.
        equal: whether all wrote the same tokens; `None` for sampled text.
        exact: whether they had to.
    """

    runs: dict[str, list[Run]]
    drafter: str
    equal: bool | None
    exact: bool

    def speed(self, way: str) -> tuple[float, float]:
        """Tokens per second of a way, and its ratio to the model's own `generate`."""
        return rate(self.runs[way]), ratio(self.runs[way], self.runs["generate"])

    @property
    def bars(self) -> list[Bar]:
        """What has to hold: drafting switched off costs nothing, and rounds are spent in layers."""
        splits = [run.stats.time_split for run in self.runs[self.drafter] if run.stats]
        outside = [split["sampling"] + split["rest"] for split in splits]
        return [
            Bar("draft='none' over the model's own generate", self.speed("none")[1], 1.0, True),
            Bar("share of a round outside layers and heads", median(outside), _MAX_OVERHEAD, False),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values."""
        speeds = {way: self.speed(way) for way in self.runs}
        return {
            "ways": {
                way: {"tokens_per_second": speed, "ratio": over_own}
                for way, (speed, over_own) in speeds.items()
            },
            "bars": [{**bar._asdict(), "met": bar.met} for bar in self.bars],
            "equal": self.equal,
            "repeats": len(self.runs["generate"]),
        }


def compare(writer: Writer) -> Comparison:
    """Time the three ways to write the same text, interleaved."""
    draft = writer.options.draft
    ways: dict[str, Callable[..., Run]] = {
        "generate": writer.plain,
        "none": lambda count=None: writer.speculative(DraftConfig(drafter="none"), count),
        draft.drafter: lambda count=None: writer.speculative(draft, count),
    }
    for way in ways.values():
        way(WARM_UP_TOKENS)
    runs = interleaved(ways, writer.options.repeats)
    texts = [run.tokens for way in runs.values() for run in way]
    same = all(text == texts[0] for text in texts)
    return Comparison(
        runs, draft.drafter, None if writer.options.temperature else same, writer.exact
    )
