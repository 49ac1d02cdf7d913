"""The figures of a benchmark: what reports, plots and JSON show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import mean, median
from typing import Any

from selfspec.bench.config import PLAIN, ModeConfig
from selfspec.bench.equality import Divergence, first_divergence
from selfspec.bench.meters import Memory
from selfspec.bench.runner import Bench
from selfspec.bench.runs import Place, Run, RunFile
from selfspec.bench.statistics import Interval, loops, median_interval, percentile
from selfspec.schedule.stats import PARTS


@dataclass(frozen=True)
class Equality:
    """Whether a method's greedy texts are those of the model's own `generate`.

    Attributes:
        texts: prompts compared.
        differing: numbers of the prompts whose texts differ, batch after batch.
        first: the divergence of the first of them that rounding does not explain, or else of the
            first.
        failed: whether float32 or wider was asked for, and more than rounding parts the texts.
    """

    texts: int
    differing: list[int]
    first: Divergence | None
    failed: bool


@dataclass(frozen=True)
class Row:
    """One method in one mode on one prompt set, with one batch size.

    Attributes:
        place: which.
        failure: why there are no figures.
        texts: written, repeats included.
        tokens_per_second: median over batches, decoding alone, all rows together.
        prefill_ms: median time to the first arrival of tokens.
        ms_per_token: median, a round's time shared among its tokens.
        ms_per_token_p95: what 95 % of tokens do not exceed.
        speedup: over the model's own `generate` on the same batches: median of the paired ratios
            of tokens/s.
        speedup_of_totals: all tokens over all seconds, as a ratio of both methods, of batches that
            both wrote; a batch has the median pace of its repeats.
        speedup_without_loops: of batches in which neither method's texts end in circles.
        looping: share of texts that end in circles.
        ended: share of texts that ended before their last token was asked for.
        acceptance_rate: accepted over drafted; `None` of peers, which do not tell.
        mean_accepted_length: tokens of a row's round.
        acceptance_by_position: share kept at each position of the draft.
        accepted_lengths: rounds of rows by the number of kept drafts.
        time_split: shares of decode time.
        memory: what the warm-up call needed.
        joules_per_token: where the GPU counts them.
        equality: of greedy texts.
    """

    place: Place
    failure: str | None = None
    texts: int = 0
    tokens_per_second: float | None = None
    prefill_ms: float | None = None
    ms_per_token: float | None = None
    ms_per_token_p95: float | None = None
    speedup: Interval | None = None
    speedup_of_totals: float | None = None
    speedup_without_loops: Interval | None = None
    looping: float | None = None
    ended: float | None = None
    acceptance_rate: float | None = None
    mean_accepted_length: float | None = None
    acceptance_by_position: list[float] = field(default_factory=list)
    accepted_lengths: dict[int, int] = field(default_factory=dict)
    time_split: dict[str, float] = field(default_factory=dict)
    memory: Memory | None = None
    joules_per_token: float | None = None
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
            for method in bench.config.methods:
                place = Place(mode.name, prompts, batch, method.name)
                if place in file.failures or place not in by_place:
                    rows.append(Row(place, failure=file.failures.get(place, "was not run")))
                    continue
                runs = by_place[place]
                equality = _equality(bench, mode, base, runs)
                rows.append(_row(bench, base, runs, equality, file.memory.get(place)))
    return rows


def _row(
    bench: Bench,
    base: Sequence[Run],
    runs: Sequence[Run],
    equality: Equality | None,
    memory: Memory | None,
) -> Row:
    rates, own, seed = _rates(runs), _rates(base), bench.config.seed
    ratios = _ratios(rates, own)
    circling = {run.key.number for run in (*base, *runs) if any(map(loops, run.texts))}
    straight = [ratio for number, ratio in ratios.items() if number not in circling]
    texts = [text for run in runs for text in run.texts]
    return Row(
        place=runs[0].key.place,
        texts=len(texts),
        speedup=median_interval(list(ratios.values()), seed),
        speedup_of_totals=_of_totals((runs, rates), (base, own)),
        speedup_without_loops=median_interval(straight, seed),
        looping=sum(map(loops, texts)) / len(texts),
        ended=sum(len(text) < bench.config.max_new_tokens for text in texts) / len(texts),
        memory=memory,
        equality=equality,
        **_times(runs, rates),
        **_drafts(runs),
    )


def _rates(runs: Sequence[Run]) -> dict[int, float]:
    """Tokens per second of each batch: the median of its repeats."""
    found: dict[int, list[float]] = {}
    for run in runs:
        if run.rate is not None:
            found.setdefault(run.key.number, []).append(run.rate)
    return {number: median(rates) for number, rates in found.items()}


def _ratios(rates: Mapping[int, float], base: Mapping[int, float]) -> dict[int, float]:
    return {number: rate / base[number] for number, rate in rates.items() if number in base}


def _of_totals(*methods: tuple[Sequence[Run], Mapping[int, float]]) -> float | None:
    """Tokens per second of the first method over the second's, by runs and rates of both."""
    both = set.intersection(*(set(rates) for _, rates in methods))
    totals: list[float] = []
    for runs, rates in methods:
        tokens = {
            number: [run.decoded for run in runs if run.key.number == number] for number in both
        }
        usual = {number: mean(counts) for number, counts in tokens.items()}
        seconds = sum(count / rates[number] for number, count in usual.items())
        totals.append(sum(usual.values()) / seconds if seconds else 0.0)
    return totals[0] / totals[1] if all(totals) else None


def _times(runs: Sequence[Run], rates: Mapping[int, float]) -> dict[str, Any]:
    values: list[float] = []
    weights: list[int] = []
    for run in runs:
        for count, (start, stop) in zip(run.counts[1:], pairwise(run.times), strict=True):
            values.append(1000 * (stop - start) / count)
            weights.append(count)
    joules = [run.joules for run in runs if run.joules is not None]
    tokens = sum(sum(run.counts) for run in runs)
    return {
        "tokens_per_second": median(rates.values()) if rates else None,
        "prefill_ms": 1000 * median(run.prefill_seconds for run in runs),
        "ms_per_token": percentile(values, weights, 0.5) if values else None,
        "ms_per_token_p95": percentile(values, weights, 0.95) if values else None,
        "joules_per_token": sum(joules) / tokens if joules else None,
    }


def _drafts(runs: Sequence[Run]) -> dict[str, Any]:
    """What was drafted and kept, and where decode time went."""
    rounds = Counter(kept for run in runs for kept in run.accepted)
    count = rounds.total()
    found: dict[str, Any] = {
        "mean_accepted_length": sum(run.decoded for run in runs) / count if count else None,
        "accepted_lengths": dict(sorted(rounds.items())),
    }
    stats = [run.stats for run in runs if run.stats is not None]
    if not stats:
        return found
    drafted, accepted = (sum(s[name] for s in stats) for name in ("drafted", "accepted"))
    at = [_columns([s[name] for s in stats]) for name in ("accepted_at", "drafted_at")]
    seconds = {part: sum(s["seconds"][part] for s in stats) for part in stats[0]["seconds"]}
    decoding = seconds["total"] - seconds["prefill"]
    shares = {part: seconds[part] / decoding for part in PARTS} if decoding > 0 else {}
    return {
        **found,
        "acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_by_position": [kept / all_ for kept, all_ in zip(*at, strict=True)],
        "time_split": {**shares, "rest": 1 - sum(shares.values())} if shares else {},
    }


def _columns(rows: Sequence[Sequence[int]]) -> list[int]:
    """Sums over rows of different length."""
    width = max(map(len, rows))
    return [sum(row[place] for row in rows if place < len(row)) for place in range(width)]


def _equality(
    bench: Bench, mode: ModeConfig, base: Sequence[Run], runs: Sequence[Run]
) -> Equality | None:
    """Compare every text with the one that the model's own `generate` wrote first."""
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
    wide = bench.spec.engine.decoder.dtype.itemsize >= 4
    first = next(iter(unexplained or plain), None)
    return Equality(
        sum(map(len, own.values())), sorted(differing), first, wide and bool(unexplained)
    )
