"""Results of a benchmark: statistics over runs, one row per method, tables, JSON and Markdown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.table import Table

from selfspec.apps.bench.config import PLAIN, ModeConfig
from selfspec.apps.bench.exactness import Divergence, first_divergence
from selfspec.apps.bench.plots import write_plots
from selfspec.apps.bench.run import Bench, Memory, Place, Run, RunFile
from selfspec.apps.bench.shapes import bytes_a_round
from selfspec.apps.display.report import HTMLReport
from selfspec.heads.files import replace_text
from selfspec.schedule.stats import PARTS, Stats

_DRAWS = 4000
_TAIL = 32  # tokens at the end of an output that repeat themselves if it loops
_LONGEST_PERIOD = 16


class Interval(NamedTuple):
    """A figure with its 95% confidence interval.

    Attributes:
        value: the figure.
        low: lower end.
        high: upper end.
        taken_over: number of values.
    """

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
    picks = np.random.default_rng(seed).integers(len(found), size=(_DRAWS, len(found)))
    low, high = np.percentile(np.median(found[picks], axis=1), (2.5, 97.5))
    return Interval(float(np.median(found)), float(low), float(high), len(found))


def percentile(values: Sequence[float], weights: Sequence[int], share: float) -> float:
    """Weighted percentile: the smallest value that `share` of the weight does not exceed."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(np.asarray(weights)[order])
    place = int(np.searchsorted(reached, share * reached[-1] * (1 - 1e-12)))
    return float(np.asarray(values)[order][place])


def loops(tokens: Sequence[int]) -> bool:
    """Whether an output ends in a loop: its last 32 tokens have a period of at most 16."""
    tail = list(tokens[-_TAIL:])
    if len(tail) < _TAIL:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, _LONGEST_PERIOD + 1))


@dataclass(frozen=True)
class Equality:
    """Whether a method's greedy outputs equal those of the model's own `generate`.

    Attributes:
        texts: prompts compared.
        differing: numbers of the prompts whose outputs differ.
        first: the first divergence that rounding does not explain, or else the first one.
        failed: whether the weights are float32 or wider, and rounding does not explain all.
    """

    texts: int
    differing: list[int]
    first: Divergence | None
    failed: bool


@dataclass(frozen=True)
class Row:
    """One method in one mode on one prompt set, with one batch size.

    Attributes:
        place: identifies the row.
        failure: why there are no figures.
        texts: number of outputs, repeats included.
        tokens_per_second: median over batches, decoding alone, all rows together.
        prefill_ms: median time to the first arrival of tokens.
        ms_per_token: median; the time of a round is shared among its tokens.
        ms_per_token_p95: the 95th percentile of that.
        speedup: over the model's own `generate` on the same batches: median of the paired ratios
            of tokens/s.
        drafting: over selfspec's own loop without drafts (a method with `drafter: none`), in the
            same way; what drafting brings beyond the kernels. `None` without such a method.
        speedup_without_loops: over batches in which no output of either method loops.
        looping: share of outputs that loop.
        ended: share of outputs that stopped before `max_new_tokens`.
        acceptance_rate: accepted over drafted; `None` for peers, which do not report it.
        mean_accepted_length: tokens of a row's round.
        acceptance_by_position: share of drafts accepted at each position.
        accepted_lengths: rounds by the number of accepted drafts.
        time_split: shares of decode time.
        bytes_a_round: bytes of weights and KV that the passes of a round read, where the bandwidth
            was measured.
        limit: tokens/s if a round took only the time to read these.
        sampling_ms: processors, draws and acceptance in one round; median over outputs.
        memory: memory of the warm-up call.
        equality: equality of greedy outputs.
    """

    place: Place
    failure: str | None = None
    texts: int = 0
    tokens_per_second: float | None = None
    prefill_ms: float | None = None
    ms_per_token: float | None = None
    ms_per_token_p95: float | None = None
    speedup: Interval | None = None
    drafting: Interval | None = None
    speedup_without_loops: Interval | None = None
    looping: float | None = None
    ended: float | None = None
    acceptance_rate: float | None = None
    mean_accepted_length: float | None = None
    acceptance_by_position: list[float] = field(default_factory=list)
    accepted_lengths: dict[int, int] = field(default_factory=dict)
    time_split: dict[str, float] = field(default_factory=dict)
    bytes_a_round: int | None = None
    limit: float | None = None
    sampling_ms: float | None = None
    memory: Memory | None = None
    equality: Equality | None = None

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values."""
        found: dict[str, Any] = {**self.place._asdict(), **asdict(self)}
        del found["place"]
        for name, value in vars(self).items():
            if isinstance(value, Interval | Memory):
                found[name] = value._asdict()
        if self.equality is not None and self.equality.first is not None:
            found["equality"]["first"] = self.equality.first._asdict()
        return found


def summarise(bench: Bench, file: RunFile) -> list[Row]:
    """A row for every method, batch size, prompt set and mode."""
    by_place: dict[Place, list[Run]] = {}
    for run in file.runs.values():
        by_place.setdefault(run.key.place, []).append(run)
    rows: list[Row] = []
    for mode in bench.config.modes:
        for prompts, batch in bench.batches:
            base = by_place.get(Place(mode.name, prompts, batch, PLAIN), [])
            loop = by_place.get(Place(mode.name, prompts, batch, _own_loop(bench)), [])
            for method in bench.config.methods:
                place = Place(mode.name, prompts, batch, method.name)
                if place in file.failures or place not in by_place:
                    rows.append(Row(place, failure=file.failures.get(place, "was not run")))
                    continue
                runs = by_place[place]
                equality = _equality(bench, mode, base, runs)
                rows.append(_row(bench, base, loop, runs, equality, file.memory.get(place)))
    return rows


def _own_loop(bench: Bench) -> str:
    """The method that is selfspec's loop without drafts; empty if there is none."""
    drafts = ((method.name, method.draft) for method in bench.config.methods)
    return next((name for name, draft in drafts if draft and draft.drafter == "none"), "")


def _row(
    bench: Bench,
    base: Sequence[Run],
    loop: Sequence[Run],
    runs: Sequence[Run],
    equality: Equality | None,
    memory: Memory | None,
) -> Row:
    rates, own, seed = usual_rates(runs), usual_rates(base), bench.config.seed
    gains = ratios(rates, own)
    circling = {run.key.number for run in (*base, *runs) if any(map(loops, run.texts))}
    straight = [ratio for number, ratio in gains.items() if number not in circling]
    texts = [text for run in runs for text in run.texts]
    drafts = _drafts(runs)
    return Row(
        place=runs[0].key.place,
        texts=len(texts),
        speedup=median_interval(list(gains.values()), seed),
        drafting=median_interval(list(ratios(rates, usual_rates(loop)).values()), seed),
        speedup_without_loops=median_interval(straight, seed),
        looping=sum(map(loops, texts)) / len(texts),
        ended=sum(len(text) < bench.config.max_new_tokens for text in texts) / len(texts),
        memory=memory,
        equality=equality,
        **_times(runs, rates),
        **drafts,
        **_limit(bench, runs, drafts["mean_accepted_length"]),
    )


def usual_rates(runs: Sequence[Run], whole: bool = False) -> dict[int, float]:
    """Tokens per second of each batch: the median of its repeats.

    Args:
        runs: of one method.
        whole: over whole calls; otherwise over decoding alone, without the prefill.
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


def _times(runs: Sequence[Run], rates: Mapping[int, float]) -> dict[str, Any]:
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
    }


_ONE_A_ROUND = (PLAIN, "static_cache", "continuous_batching")  # peers that emit one token a round


def _limit(bench: Bench, runs: Sequence[Run], length: float | None) -> dict[str, Any]:
    """Bytes that the first round reads, and the tokens/s that the bandwidth allows.

    Args:
        bench: the benchmark.
        runs: of one row of the report.
        length: tokens of a row's round.
    """
    place = runs[0].key.place
    method = next(method for method in bench.config.methods if method.name == place.method)
    known = method.draft is not None or method.peer in _ONE_A_ROUND
    if bench.bandwidth is None or length is None or not known:
        return {}
    batches = bench.batches[place.prompts, place.batch]
    tokens = sum(int(batch.mask.sum()) for batch in batches) // len(batches)
    count = bytes_a_round(bench.spec.engine, method.draft, tokens)
    if count is None:
        return {}
    return {"bytes_a_round": count, "limit": place.batch * length * bench.bandwidth / count}


def _drafts(runs: Sequence[Run]) -> dict[str, Any]:
    """Acceptance, and the split of decode time."""
    rounds = Counter(kept for run in runs for kept in run.accepted)
    count = rounds.total()
    found: dict[str, Any] = {
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
    options = bench.options(mode)
    differing: dict[int, Divergence] = {}
    for run in runs:
        batch = bench.batches[run.key.place.prompts, run.key.place.batch][run.key.number]
        for row, plain in enumerate(own.get(run.key.number, [])):
            number = run.key.number * batch.rows + row
            if number not in differing:
                other = run.texts[row]
                found = first_divergence(bench.spec, batch.row(row), options, plain, other)
                if found is not None:
                    differing[number] = found
    plain = list(differing.values())
    unexplained = [found for found in plain if not found.rounding]
    wide = bench.spec.decoder.dtype.itemsize >= 4
    first = next(iter(unexplained or plain), None)
    return Equality(
        sum(map(len, own.values())), sorted(differing), first, wide and bool(unexplained)
    )


_GAP = 2  # characters between columns


def _longest(texts: Sequence[str]) -> int:
    return max(map(len, texts), default=0)


class Grid(NamedTuple):
    """A table of strings.

    Attributes:
        title: its title.
        columns: names of the columns; the first names the rows.
        rows: cells.
        wraps: columns that may wrap on a terminal, beside the first.
        spare: columns that a narrow terminal leaves out, the first one first.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    wraps: Sequence[str] = ()
    spare: Sequence[str] = ()

    def table(self, width: int) -> Table:
        """For a terminal of `width` characters."""
        table = Table(title=f"\n{self.title}", box=box.SIMPLE_HEAD)
        table.title_justify = table.caption_justify = "left"
        table.show_edge, table.pad_edge, table.collapse_padding = False, False, True
        name, *others = self.columns
        names = [name, *(row[0] for row in self.rows)]
        longest_word = _longest(" ".join(names).split())

        def room() -> int:
            return width - sum(_GAP + self._width(column) for column in others)

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
        return ["", f"## {self.title}", "", *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def number(value: float | None, digits: int) -> str:
    """A formatted figure, or a dash for `None`."""
    return "–" if value is None else f"{value:.{digits}f}"


def memory_cell(memory: Memory | None) -> str:
    """Peak and growth in MiB, or a dash for `None`."""
    if memory is None:
        return "–"
    return f"{memory.peak / 2**20:,.1f} ({memory.growth / 2**20:,.1f})"


Cell = Callable[[Row], str]


class Sheet(NamedTuple):
    """A table of some figures of every row.

    Attributes:
        title: its title.
        columns: formats a row's cell, by the name of the column.
        wraps: columns that may wrap.
        spare: columns that a narrow terminal leaves out, the first one first.
    """

    title: str
    columns: dict[str, Cell]
    wraps: Sequence[str] = ()
    spare: Sequence[str] = ()


def _interval(found: Interval | None) -> str:
    """A ratio and its interval."""
    return "–" if found is None else f"{found.value:.2f}x ({found.low:.2f}–{found.high:.2f})"


def _equal(equality: Equality | None) -> str:
    """How many outputs are equal, and the margin of the first difference."""
    if equality is None:
        return "–"
    equal = equality.texts - len(equality.differing)
    if equality.first is None:
        return f"{equal}/{equality.texts}"
    margin = equality.first.margin
    apart = "one stops" if margin is None else f"margin {margin:.2g}"
    return f"{'NOT EQUAL: ' if equality.failed else ''}{equal}/{equality.texts}, {apart}"


def _by_position(row: Row) -> str:
    return " ".join(number(rate, 2) for rate in row.acceptance_by_position) or "–"


def _by_length(row: Row) -> str:
    """Shares of rounds by the number of accepted drafts, from 0 on."""
    rounds = sum(row.accepted_lengths.values())
    most = max(row.accepted_lengths, default=-1)
    shares = (row.accepted_lengths.get(kept, 0) / rounds for kept in range(most + 1))
    return " ".join(number(share, 2) for share in shares) or "–"


def _share_of_limit(row: Row) -> float | None:
    rate, limit = row.tokens_per_second, row.limit
    return None if rate is None or limit is None else rate / limit


def _part(part: str) -> Cell:
    return lambda row: number(row.time_split.get(part), 3)


LIMIT = Sheet(
    "limit by bytes read",
    {
        "tokens/s": lambda row: number(row.tokens_per_second, 1),
        "MB a round": lambda row: (
            "–" if row.bytes_a_round is None else f"{row.bytes_a_round / 1e6:,.1f}"
        ),
        "limit tokens/s": lambda row: number(row.limit, 1),
        "share of it": lambda row: number(_share_of_limit(row), 2),
    },
)
SHEETS = (
    Sheet(
        "speed",
        {
            "tokens/s": lambda row: number(row.tokens_per_second, 1),
            "speedup (95%)": lambda row: _interval(row.speedup),
            "over own loop": lambda row: number(row.drafting and row.drafting.value, 2),
            "accepted": lambda row: number(row.acceptance_rate, 3),
            "length": lambda row: number(row.mean_accepted_length, 2),
            "outputs equal": lambda row: _equal(row.equality),
        },
        wraps=["outputs equal"],
        spare=["over own loop", "length", "accepted", "outputs equal"],
    ),
    Sheet(
        "drafts",
        {
            "accepted, by position": _by_position,
            "rounds, by accepted drafts (0, 1, …)": _by_length,
        },
        wraps=["accepted, by position", "rounds, by accepted drafts (0, 1, …)"],
    ),
    Sheet(
        "share of decode time",
        {
            **{part: _part(part) for part in (*PARTS, "rest")},
            "sampling, ms/round": lambda row: number(row.sampling_ms, 3),
        },
    ),
    LIMIT,
    Sheet(
        "loops",
        {
            "loops": lambda row: number(row.looping, 2),
            "speedup without loops": lambda row: _interval(row.speedup_without_loops),
        },
    ),
    Sheet(
        "waiting and memory",
        {
            "prefill ms": lambda row: number(row.prefill_ms, 1),
            "ms/token (p95)": lambda row: (
                f"{number(row.ms_per_token, 2)} ({number(row.ms_per_token_p95, 2)})"
            ),
            "peak MiB (grown by)": lambda row: memory_cell(row.memory),
        },
    ),
)


def grids(rows: Sequence[Row]) -> Iterator[Grid]:
    """Every sheet of rows that are compared with one another; the first shows failures."""
    several = len({row.place.batch for row in rows}) > 1
    for place, part in groupby(rows, key=lambda row: row.place._replace(method="")):
        title = f"{place.mode} · {place.prompts}" + several * f" · batch {place.batch}"
        compared = list(part)
        for sheet in SHEETS:
            shown = [row for row in compared if row.failure is None or sheet is SHEETS[0]]
            cells = [_cells(sheet, row) for row in shown]
            if sheet is LIMIT and not any(row.limit for row in shown):
                continue  # the bandwidth was not measured
            columns = ["method", *sheet.columns]
            name = f"{title} · {sheet.title}"
            yield Grid(name, columns, cells, sheet.wraps, sheet.spare)


def _cells(sheet: Sheet, row: Row) -> list[str]:
    if row.failure is not None:
        return [row.place.method, "failed", *[""] * (len(sheet.columns) - 1)]
    return [row.place.method, *(cell(row) for cell in sheet.columns.values())]


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
    """The report of a benchmark.

    Attributes:
        head: command, model, device, lengths, versions.
        rows: the figures.
    """

    head: dict[str, Any]
    rows: Sequence[Row]

    @property
    def failed(self) -> bool:
        """Whether outputs differ that must be equal."""
        return any(row.equality is not None and row.equality.failed for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values."""
        rows = [row.to_dict() for row in self.rows]
        return {**self.head, "failed": self.failed, "rows": rows}

    def write(self, folder: Path) -> list[str]:
        """Write results.json, results.md, plots, and report.html, which contains them.

        Returns:
            The names of the files, and the reason if there are no plots.
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


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(inner)}" for name, inner in value.items())
    return ", ".join(map(_plain, value)) if isinstance(value, list) else str(value)
