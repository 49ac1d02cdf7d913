"""Results of a benchmark: statistics over runs, one row per method, tables, JSON and Markdown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import NamedTuple

import numpy as np
from rich import box
from rich.table import Table

from selfspec.apps.bench.config import PLAIN, MethodConfig, ModeConfig
from selfspec.apps.bench.plots import write_plots
from selfspec.apps.bench.run import Bench, Memory, Place, Run, RunFile
from selfspec.apps.bench.shapes import bytes_a_round
from selfspec.apps.display.divergence import Divergence, first_divergence
from selfspec.apps.display.report import HTMLReport
from selfspec.config import JsonObject
from selfspec.heads.files import replace_text
from selfspec.schedule.stats import PARTS, Stats

_TAIL = 32  # tokens at the end of an output that repeat themselves if it loops


class Interval(NamedTuple):
    """A figure, the ends of its 95% confidence interval, and the number of values behind it."""

    value: float
    low: float
    high: float
    taken_over: int


def median_interval(values: Sequence[float], seed: int = 0) -> Interval | None:
    """The median of `values` and its percentile bootstrap interval (Efron 1979).

    `None` without values. The interval of one value is that value.
    """
    if not values:
        return None
    found = np.asarray(values, dtype=float)
    picks = np.random.default_rng(seed).integers(len(found), size=(4000, len(found)))
    low, high = np.percentile(np.median(found[picks], axis=1), (2.5, 97.5))
    return Interval(float(np.median(found)), float(low), float(high), len(found))


def percentile(values: Sequence[float], weights: Sequence[int], share: float) -> float:
    """Weighted percentile: the smallest value that `share` of the weight does not exceed."""
    return float(np.quantile(np.repeat(values, weights), share, method="inverted_cdf"))


def loops(tokens: Sequence[int]) -> bool:
    """Whether an output ends in a loop: its last 32 tokens have a period of at most 16."""
    tail = list(tokens[-_TAIL:])
    if len(tail) < _TAIL:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, _TAIL // 2 + 1))


@dataclass(frozen=True)
class Equality:
    """Whether a method's greedy outputs equal those of the model's own `generate`."""

    texts: int  # prompts compared
    differing: list[int]  # numbers of the prompts whose outputs differ
    # the first divergence that rounding does not explain, or else the first one
    first: Divergence | None
    failed: bool  # whether the weights are float32 or wider, and rounding does not explain all

    def __str__(self) -> str:
        """How many outputs are equal, and the margin of the first difference."""
        equal = f"{self.texts - len(self.differing)}/{self.texts}"
        if self.first is None:
            return equal
        margin = self.first.margin
        apart = "one stops" if margin is None else f"margin {margin:.2g}"
        return f"{'NOT EQUAL: ' if self.failed else ''}{equal}, {apart}"


@dataclass(frozen=True)
class Row:
    """One method in one mode on one prompt set, with one batch size; see `NOTES`, too."""

    place: Place
    failure: str | None = None  # why there are no figures
    texts: int = 0  # number of outputs, repeats included
    tokens_per_second: float | None = None  # median over batches, decoding alone, all rows together
    prefill_ms: float | None = None  # median time to the first arrival of tokens
    ms_per_token: float | None = None  # median; the time of a round is shared among its tokens
    ms_per_token_p95: float | None = None  # the 95th percentile of that
    speedup: Interval | None = None  # over the model's own `generate` on the same batches
    # over selfspec's own loop without drafts (a method with `drafter: none`), in the same way; what
    # drafting brings beyond the kernels. `None` without such a method
    drafting: Interval | None = None
    # over batches in which no output of either method loops
    speedup_without_loops: Interval | None = None
    looping: float | None = None  # share of outputs that loop
    # accepted over drafted; `None` for peers, which do not report it
    acceptance_rate: float | None = None
    mean_accepted_length: float | None = None  # tokens of a row's round
    # share of drafts accepted at each position
    acceptance_by_position: list[float] = field(default_factory=list)
    # rounds by the number of accepted drafts
    accepted_lengths: dict[int, int] = field(default_factory=dict)
    time_split: dict[str, float] = field(default_factory=dict)  # shares of decode time
    # what the passes of a round read, where the bandwidth was measured
    bytes_a_round: int | None = None
    limit: float | None = None  # tokens/s if a round took only the time to read these
    # processors, draws and acceptance in one round; median over outputs
    sampling_ms: float | None = None
    memory: Memory | None = None  # of the warm-up call
    equality: Equality | None = None  # of greedy outputs

    @property
    def share_of_limit(self) -> float | None:
        """Tokens/s over the limit."""
        return self.tokens_per_second and self.limit and self.tokens_per_second / self.limit

    def to_dict(self) -> JsonObject:
        """Everything, as plain values."""
        found: JsonObject = asdict(self)
        if self.equality is not None and self.equality.first is not None:
            found["equality"]["first"] = self.equality.first._asdict()
        del found["place"]
        for name, value in found.items():
            if isinstance(value, Interval | Memory):
                found[name] = value._asdict()
        return {**self.place._asdict(), **found}


def summarise(bench: Bench, file: RunFile) -> list[Row]:
    """A row for every method, batch size, prompt set and mode."""
    by_place: dict[Place, list[Run]] = {}
    for run in file.runs.values():
        by_place.setdefault(run.key.place, []).append(run)
    drafts = ((method.name, method.draft) for method in bench.config.methods)
    loop = next((name for name, draft in drafts if draft and draft.drafter == "none"), "")
    rows: list[Row] = []
    for mode in bench.config.modes:
        for key in bench.batches:
            own, undrafted = (
                by_place.get(Place(mode.name, *key, name), []) for name in (PLAIN, loop)
            )
            for method in bench.config.methods:
                place = Place(mode.name, *key, method.name)
                if place in file.failures or place not in by_place:
                    rows.append(Row(place, failure=file.failures.get(place, "was not run")))
                    continue
                runs = by_place[place]
                figures = {
                    "memory": file.memory.get(place),
                    "equality": _equality(bench, mode, own, runs),
                    **_speeds(bench, runs, own, undrafted),
                    **(drafting := _drafting(runs)),
                    **_limit(bench, method, place, drafting["mean_accepted_length"]),
                }
                rows.append(Row(place, texts=sum(len(run.texts) for run in runs), **figures))
    return rows


def _speeds(
    bench: Bench, runs: Sequence[Run], own: Sequence[Run], undrafted: Sequence[Run]
) -> JsonObject:
    """Speed and its ratios to the model's own `generate` and to the loop without drafts."""
    rates, seed = usual_rates(runs), bench.config.seed
    gains = ratios(rates, usual_rates(own))
    circling = {run.key.number for run in (*own, *runs) if any(map(loops, run.texts))}
    straight = [gain for number, gain in gains.items() if number not in circling]
    texts = [text for run in runs for text in run.texts]
    values: list[float] = []
    weights: list[int] = []
    for run in runs:
        for count, (start, stop) in zip(run.counts[1:], pairwise(run.times), strict=True):
            values.append(1000 * (stop - start) / count)
            weights.append(count)
    return {
        "tokens_per_second": median(rates.values()) if rates else None,
        "prefill_ms": 1000 * median(run.prefill_seconds for run in runs),
        "ms_per_token": percentile(values, weights, 0.5) if values else None,
        "ms_per_token_p95": percentile(values, weights, 0.95) if values else None,
        "speedup": median_interval(list(gains.values()), seed),
        "drafting": median_interval(list(ratios(rates, usual_rates(undrafted)).values()), seed),
        "speedup_without_loops": median_interval(straight, seed),
        "looping": sum(map(loops, texts)) / len(texts),
    }


def usual_rates(runs: Sequence[Run], whole: bool = False) -> dict[int, float]:
    """Tokens per second of each batch: the median of its repeats.

    They are those of whole calls, or of decoding alone, without the prefill.
    """
    found: dict[int, list[float]] = {}
    for run in runs:
        rate = run.whole_rate if whole else run.rate
        if rate is not None:
            found.setdefault(run.key.number, []).append(rate)
    return {number: median(rates) for number, rates in found.items()}


def ratios(rates: Mapping[int, float], base: Mapping[int, float]) -> dict[int, float]:
    """Speedups over another method on the same batches."""
    return {number: rate / base[number] for number, rate in rates.items() if number in base}


_ONE_A_ROUND = (PLAIN, "static_cache", "continuous_batching")  # peers that emit one token a round


def _limit(bench: Bench, method: MethodConfig, place: Place, length: float | None) -> JsonObject:
    """Bytes that the first round reads, and the tokens/s that the bandwidth allows.

    `length` is the tokens of a row's round.
    """
    known = method.draft is not None or method.peer in _ONE_A_ROUND
    if bench.bandwidth is None or length is None or not known:
        return {}
    batches = bench.batches[place.prompts, place.batch]
    tokens = sum(int(batch.mask.sum()) for batch in batches) // len(batches)
    count = bytes_a_round(bench.spec.engine, method.draft, tokens)
    if count is None:
        return {}
    return {"bytes_a_round": count, "limit": place.batch * length * bench.bandwidth / count}


def _drafting(runs: Sequence[Run]) -> JsonObject:
    """Acceptance, and the split of decode time."""
    rounds = Counter(kept for run in runs for kept in run.accepted)
    count = rounds.total()
    found: JsonObject = {
        "mean_accepted_length": sum(run.decoded for run in runs) / count if count else None,
        "accepted_lengths": dict(sorted(rounds.items())),
    }
    stats = [Stats(**run.stats) for run in runs if run.stats is not None]
    if not stats:
        return found
    total = sum(stats, Stats())
    per_round = [1000 * each.seconds["sampling"] / each.rounds for each in stats if each.rounds]
    return {
        **found,
        "acceptance_rate": total.acceptance_rate if total.drafted else None,
        "acceptance_by_position": total.acceptance_by_position,
        "sampling_ms": median(per_round) if per_round else None,
        "time_split": total.time_split,
    }


def _equality(
    bench: Bench, mode: ModeConfig, base: Sequence[Run], runs: Sequence[Run]
) -> Equality | None:
    """Compare every output with the first one of the model's own `generate`."""
    if not mode.greedy or not base:
        return None
    own = {run.key.number: run.texts for run in reversed(base)}
    options, wide = bench.options(mode), bench.spec.decoder.dtype.itemsize >= 4
    differing: dict[int, Divergence] = {}
    for run in runs:
        batch = bench.batches[run.key.place.prompts, run.key.place.batch][run.key.number]
        for row, plain in enumerate(own.get(run.key.number, [])):
            number = run.key.number * batch.rows + row
            if number not in differing:
                other = run.texts[row]
                found = first_divergence(bench.spec, *batch.row(row), options, plain, other)
                if found is not None:
                    differing[number] = found
    unexplained = [found for found in differing.values() if not found.rounding]
    first = next(iter(unexplained or differing.values()), None)
    texts = sum(map(len, own.values()))
    return Equality(texts, sorted(differing), first, wide and bool(unexplained))


def _longest(texts: Sequence[str]) -> int:
    return max(map(len, texts), default=0)


class Grid(NamedTuple):
    """A table of strings."""

    title: str
    columns: Sequence[str]  # the first names the rows
    rows: Sequence[Sequence[str]]
    wraps: Sequence[str] = ()  # columns that may wrap on a terminal, beside the first
    spare: Sequence[str] = ()  # columns that a narrow terminal leaves out, the first one first

    def table(self, width: int) -> Table:
        """For a terminal of `width` characters."""
        table = Table(title=f"\n{self.title}", box=box.SIMPLE_HEAD)
        table.title_justify = table.caption_justify = "left"
        table.show_edge, table.pad_edge, table.collapse_padding = False, False, True
        name, *others = self.columns
        names = [name, *(row[0] for row in self.rows)]
        longest_word = _longest(" ".join(names).split())

        def room() -> int:
            return width - sum(2 + self._width(column) for column in others)  # 2 between columns

        spare = list(self.spare)
        while room() < longest_word and spare:
            others.remove(spare.pop(0))
        left_out = [column for column in self.columns[1:] if column not in others]
        if left_out:
            table.caption = f"left out, as the terminal is narrow: {', '.join(left_out)}"
        table.add_column(name, width=max(longest_word, min(_longest(names), room())))
        for column in others:
            header = column if column in self.wraps else fill(column, self._width(column))
            table.add_column(header, justify="right", no_wrap=column not in self.wraps)
        places = [0, *map(self.columns.index, others)]
        for row in self.rows:
            table.add_row(*(row[place] for place in places))
        return table

    def _width(self, column: str) -> int:
        """Characters that a column needs."""
        cells = [row[self.columns.index(column)] for row in self.rows]
        words = " ".join(cells).split() if column in self.wraps else cells
        return _longest([*column.split(), *words])

    def markdown(self) -> list[str]:
        """Lines of Markdown, below a heading."""
        rows = [self.columns, ["---"] * len(self.columns), *self.rows]
        lines = [[cell.replace("|", r"\|") for cell in row] for row in rows]
        return ["", f"## {self.title}", "", *(f"| {' | '.join(line)} |" for line in lines)]


def number(value: float | None, digits: int) -> str:
    """A formatted figure, or a dash for `None`."""
    return "–" if value is None else f"{value:.{digits}f}"


def memory_cell(memory: Memory | None) -> str:
    """Peak and growth in MiB, or a dash for `None`."""
    if memory is None:
        return "–"
    return f"{memory.peak / 2**20:,.1f} ({memory.growth / 2**20:,.1f})"


class Column(NamedTuple):
    """A column of a table of rows."""

    title: str
    cell: Callable[[Row], str]
    wraps: bool = False
    spare: int = 0  # columns with a number are left out on a narrow terminal, the lowest first


def _interval(found: Interval | None) -> str:
    return "–" if found is None else f"{found.value:.2f}x ({found.low:.2f}–{found.high:.2f})"


def _numbers(values: Iterable[float]) -> str:
    return " ".join(number(value, 2) for value in values) or "–"


def _by_length(row: Row) -> str:
    """Shares of rounds by the number of accepted drafts, from 0 on."""
    found, most = row.accepted_lengths, max(row.accepted_lengths, default=-1)
    return _numbers(found.get(kept, 0) / sum(found.values()) for kept in range(most + 1))


def _fixed(name: str, digits: int) -> Callable[[Row], str]:
    return lambda row: number(getattr(row, name), digits)


def _megabytes(row: Row) -> str:
    return "–" if row.bytes_a_round is None else f"{row.bytes_a_round / 1e6:,.1f}"


def _part(part: str) -> Callable[[Row], str]:
    return lambda row: number(row.time_split.get(part), 3)


LIMIT = "limit by bytes read"
SHEETS = {
    "speed": [
        Column("tokens/s", _fixed("tokens_per_second", 1)),
        Column("speedup (95%)", lambda row: _interval(row.speedup)),
        Column("over own loop", lambda row: number(row.drafting and row.drafting[0], 2), spare=1),
        Column("accepted", _fixed("acceptance_rate", 3), spare=3),
        Column("length", _fixed("mean_accepted_length", 2), spare=2),
        Column("outputs equal", lambda row: str(row.equality or "–"), wraps=True, spare=4),
    ],
    "drafts": [
        Column("accepted, by position", lambda row: _numbers(row.acceptance_by_position), True),
        Column("rounds, by accepted drafts (0, 1, …)", _by_length, wraps=True),
    ],
    "share of decode time": [
        *(Column(part, _part(part)) for part in (*PARTS, "rest")),
        Column("sampling, ms/round", _fixed("sampling_ms", 3)),
    ],
    LIMIT: [
        Column("tokens/s", _fixed("tokens_per_second", 1)),
        Column("MB a round", _megabytes),
        Column("limit tokens/s", _fixed("limit", 1)),
        Column("share of it", _fixed("share_of_limit", 2)),
    ],
    "loops": [
        Column("loops", _fixed("looping", 2)),
        Column("speedup without loops", lambda row: _interval(row.speedup_without_loops)),
    ],
    "waiting and memory": [
        Column("prefill ms", _fixed("prefill_ms", 1)),
        Column("ms/token", _fixed("ms_per_token", 2)),
        Column("ms/token, p95", _fixed("ms_per_token_p95", 2)),
        Column("peak MiB (grown by)", lambda row: memory_cell(row.memory)),
    ],
}
"""The columns of the tables in the terminal, in Markdown and in the page."""


def grid(title: str, sheet: Sequence[Column], rows: Sequence[Sequence[str]]) -> Grid:
    """The table of a sheet; the first cell of a row is its method."""
    spare = sorted((column for column in sheet if column.spare), key=lambda column: column.spare)
    return Grid(
        title,
        ["method", *(column.title for column in sheet)],
        rows,
        wraps=[column.title for column in sheet if column.wraps],
        spare=[column.title for column in spare],
    )


def grids(rows: Sequence[Row]) -> Iterator[Grid]:
    """Every sheet of rows that are compared with one another; the first shows failures."""
    several = len({row.place.batch for row in rows}) > 1
    for place, part in groupby(rows, key=lambda row: row.place._replace(method="")):
        title = f"{place.mode} · {place.prompts}" + several * f" · batch {place.batch}"
        compared = list(part)
        for name, sheet in SHEETS.items():
            if name == LIMIT and not any(row.limit for row in compared):
                continue  # the bandwidth was not measured
            cells = [
                [row.place.method, *(column.cell(row) for column in sheet)]
                if row.failure is None
                else [row.place.method, "failed", *[""] * (len(sheet) - 1)]
                for row in compared
                if row.failure is None or name == "speed"
            ]
            yield grid(f"{title} · {name}", sheet, cells)


NOTES = (
    "tokens/s: decoding alone, all rows of a batch together, median over batches; prefill ms: from "
    "the call to the first tokens, of transformers' own speculation its whole first round. "
    "speedup: over the model's own generate on the same batches, median of their paired ratios, "
    "95% by bootstrap over batches; without loops: over batches in which no output of either "
    "loops (last 32 tokens with a period of at most 16); loops: share of outputs that do. "
    "accepted: share of drafts; length: tokens a round. ms/token: a round's time shared among its "
    "tokens. Peak memory is that of the warm-up, on the longest prompts. Limit by bytes read: "
    "weights and KV that the passes of a round read, and tokens/s if a round took only the time to "
    "read them at the measured memory bandwidth."
)


@dataclass(frozen=True)
class Report:
    """The report of a benchmark: command, model, device, lengths, versions; and the figures."""

    head: JsonObject
    rows: Sequence[Row]

    @property
    def failed(self) -> bool:
        """Whether outputs differ that must be equal."""
        return any(row.equality is not None and row.equality.failed for row in self.rows)

    def to_dict(self) -> JsonObject:
        """Everything, as plain values."""
        rows = [row.to_dict() for row in self.rows]
        return {**self.head, "failed": self.failed, "rows": rows}

    def write(self, folder: Path) -> list[str]:
        """Write results.json, results.md, plots, and report.html with them.

        Returns the names of the files, and the reason if there are no plots.
        """
        values = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        replace_text(folder / "results.json", values + "\n")
        replace_text(folder / "results.md", self._markdown())
        try:
            pictures, none = write_plots(self.rows, folder), []
        except ImportError as error:
            pictures, none = [], [f"no plots ({error})"]
        page = HTMLReport("Benchmark")
        page.facts({name: _plain(value) for name, value in self.head.items() if value})
        for picture in pictures:
            page.picture(picture.read_bytes(), picture.stem.replace("_", " "))
        for grid in self.grids:
            page.heading(grid.title)
            page.table(grid.columns, grid.rows)
        for text in (*self.failures, NOTES):
            page.text(text)
        drawn = [picture.name for picture in pictures]
        page.write(folder / "report.html")
        return ["results.json", "results.md", "report.html", *drawn, *none]

    def _markdown(self) -> str:
        lines = ["# Benchmark", ""]
        lines += [f"- {name}: {_plain(value)}" for name, value in self.head.items() if value]
        lines += [text for grid in self.grids for text in grid.markdown()]
        lines += ["", *(f"- {failure}" for failure in self.failures)] if self.failures else []
        return "\n".join([*lines, "", NOTES, ""])

    @property
    def grids(self) -> list[Grid]:
        """Tables for every mode, prompt set and batch size."""
        return list(grids(self.rows))

    @property
    def failures(self) -> list[str]:
        """Why methods have no figures, each reason once."""
        failed = [row for row in self.rows if row.failure is not None]
        return list(dict.fromkeys(f"{row.place.method} failed: {row.failure}" for row in failed))


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(inner)}" for name, inner in value.items())
    return ", ".join(map(_plain, value)) if isinstance(value, list) else str(value)
