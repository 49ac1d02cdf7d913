"""How fast this device allows plain decoding and self-speculation to be.

Three clocks for the same rounds: what their passes take alone, one after the other; the part of it
inside layers and heads, with no Python around them; and the time that reading weights and KV takes
at the memory's speed. An oracle drafts in each round exactly what will be kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any, NamedTuple

from selfspec.bench.config import PLAIN, MethodConfig
from selfspec.bench.grid import Grid, mebibytes, number
from selfspec.bench.methods import make_method
from selfspec.bench.runner import Bench
from selfspec.bench.runs import Place, Run, RunFile
from selfspec.bench.traffic import Traffic, read_bandwidth
from selfspec.bench.tune.clock import measure_times
from selfspec.bench.tune.config import TuneConfig
from selfspec.bench.tune.work import WorkFile
from selfspec.config import DraftConfig
from selfspec.heads import ExitHead
from selfspec.schedule.profile import Times, exit_name

_ORACLE_TOKENS = 12  # drafts of a round, of which the oracle takes those that were kept
_COLUMNS = ("way", "tokens/s", "passes", "layers", "memory", "of layers", "of memory")


@dataclass(frozen=True)
class LimitRow:
    """Tokens per second of one way to decode on one prompt set, and what bounds them.

    Attributes:
        prompts: the set.
        way: the method, or its oracle.
        achieved: in this run; `None` of an oracle, which nobody can be.
        by_passes: if a round took its passes and its drafting, as they were timed alone.
        by_layers: if it took the time inside layers and heads; `None` on a GPU, where the host's
            clock does not see it.
        by_memory: if it took the time of reading its weights and KV.
        lengths: rounds by drafted tokens.
    """

    prompts: str
    way: str
    achieved: float | None
    by_passes: float
    by_layers: float | None
    by_memory: float
    lengths: dict[int, int]


@dataclass(frozen=True)
class Limits:
    """What a device allows.

    Attributes:
        bandwidth: bytes per second of reading as much as the weights are.
        weight_bytes: what a step of plain decoding reads of them.
        rows: of each prompt set.
    """

    bandwidth: float
    weight_bytes: int
    rows: list[LimitRow]

    notes = (
        "Limits, tokens/s of one row, greedy: passes: if a round took what its passes and drafts "
        "take alone; layers: what of that is inside layers and heads; memory: reading the round's "
        "weights and KV once a pass, at the speed at which this device reads as many bytes as the "
        "weights are again and again. of layers, of memory: achieved over limit. oracle: each "
        f"round drafts exactly the tokens that will be kept of {_ORACLE_TOKENS}."
    )

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return asdict(self)

    @property
    def grids(self) -> list[Grid]:
        """One table for each prompt set."""
        read = f"{mebibytes(self.weight_bytes)} MiB of weights, {self.bandwidth / 1e9:.1f} GB/s"
        return [
            Grid(
                f"limits · {prompts} · {read}",
                _COLUMNS,
                [_cells(row) for row in self.rows if row.prompts == prompts],
            )
            for prompts in dict.fromkeys(row.prompts for row in self.rows)
        ]


def _cells(row: LimitRow) -> list[str]:
    limits = [row.by_passes, row.by_layers, row.by_memory]
    shares = [_over(row.achieved, limit) for limit in limits[1:]]
    return [
        row.way,
        number(row.achieved, 1),
        *(number(limit, 1) for limit in limits),
        *(number(share, 3) for share in shares),
    ]


def _over(achieved: float | None, limit: float | None) -> float | None:
    return achieved / limit if achieved is not None and limit else None


class Rounds(NamedTuple):
    """Rounds of one row.

    Attributes:
        tokens: that they wrote.
        lengths: rounds by drafted tokens.
    """

    tokens: int
    lengths: Mapping[int, int]


def measure_limits(
    bench: Bench,
    file: RunFile,
    work: WorkFile,
    say: Callable[[str], object] = lambda part: None,
) -> Limits:
    """What this device allows plain decoding and every chain from an exit head.

    Args:
        bench: the benchmark; its runs are there.
        file: its runs.
        work: keeps what was measured.
        say: told what is measured.

    Raises:
        ValueError: nothing was decoded greedily, one prompt at a time, or the target is a mixture
            of experts.
    """
    return _Measurement(bench, file, work, say).run()


def check_limits(bench: Bench) -> str:
    """The mode that limits are stated for.

    Raises:
        ValueError: as `measure_limits`.
    """
    greedy = [mode.name for mode in bench.config.modes if mode.greedy]
    if not greedy or 1 not in bench.config.batch_sizes:
        raise ValueError(
            "limits are those of greedy decoding of one prompt at a time; have a greedy mode among "
            f"modes and 1 among batch_sizes, got {list(bench.config.batch_sizes)} and "
            f"{[mode.name for mode in bench.config.modes]}"
        )
    return greedy[0]


class _Measurement:
    def __init__(self, bench: Bench, file: RunFile, work: WorkFile, say: Callable[[str], object]):
        self.bench, self.file, self.work, self.say = bench, file, work, say
        self.engine = bench.spec.engine
        self.mode = check_limits(bench)
        self.traffic = Traffic(self.engine.decoder)
        self.chains = dict(_chains(bench))

    def run(self) -> Limits:
        device, weights = self.engine.decoder.device, self.traffic.weights
        self.say("memory bandwidth")
        self.bandwidth = self.work.part(
            "bandwidth", weights, lambda: read_bandwidth(weights, device)
        )
        self.wall, self.inside = self._times()
        rows = [row for prompts in self.bench.prompts for row in self._rows(prompts)]
        return Limits(self.bandwidth, weights, rows)

    def _times(self) -> tuple[Times, Times]:
        self.say("times of passes")
        heads = {(h.kind, h.exit_layer): h for h in (head for _, head in self.chains.values())}

        def measure() -> list[Any]:
            prompts = next(iter(self.bench.prompts.values()))
            found = measure_times(self.engine, list(heads.values()), prompts, 1, TuneConfig())
            return [times.model_dump(mode="json") for times in found]

        found = self.work.part("times of passes", [list(key) for key in heads], measure)
        wall, inside = map(Times.model_validate, found)
        return wall, inside

    def _rows(self, prompts: str) -> list[LimitRow]:
        ways: list[tuple[str, ExitHead | None]] = [(PLAIN, None)]
        ways += [(name, head) for name, (_, head) in self.chains.items()]
        rows: list[LimitRow] = []
        for name, head in ways:
            place = Place(self.mode, prompts, 1, name)
            runs = [run for key, run in self.file.runs.items() if key.place == place]
            seconds = sum(run.decode_seconds for run in runs)
            if not seconds:
                continue
            rounds = _rounds(runs)
            rows.append(self._row(prompts, name, head, rounds, rounds.tokens / seconds))
            if head is not None:
                oracle = self._oracle(prompts, name)
                rows.append(self._row(prompts, f"{name}, oracle", head, oracle, None))
        return rows

    def _row(
        self,
        prompts: str,
        way: str,
        head: ExitHead | None,
        rounds: Rounds,
        achieved: float | None,
    ) -> LimitRow:
        name = exit_name(head.kind, head.exit_layer) if head else ""
        exit_layer = head.exit_layer if head else 0
        widths = [len(prompt) for prompt in self.bench.prompts[prompts]]
        context = mean(widths) + self.bench.config.max_new_tokens / 2

        def rate(seconds_of: Callable[[int], float]) -> float:
            taken = (count * seconds_of(k) for k, count in rounds.lengths.items())
            return rounds.tokens / sum(taken)

        def read(k: int) -> float:
            read = self.traffic.round(head, k, context) if head else self.traffic.plain(context)
            return read / self.bandwidth

        on_host = self.engine.decoder.device.type == "cpu"
        return LimitRow(
            prompts=prompts,
            way=way,
            achieved=achieved,
            by_passes=rate(lambda k: self.wall.round(name, exit_layer, k)),
            by_layers=rate(lambda k: self.inside.round(name, exit_layer, k)) if on_host else None,
            by_memory=rate(read),
            lengths=dict(rounds.lengths),
        )

    def _oracle(self, prompts: str, name: str) -> Rounds:
        """The rounds of a drafter that knows how many drafts will be kept.

        Every round drafts as many as it may; what is kept would have been kept of a shorter draft,
        and greedy text is the same, so the next round begins at the same token.
        """
        draft, _ = self.chains[name]
        chain = {"num_draft_tokens": _ORACLE_TOKENS, "schedule": "fixed"}
        longest = draft.model_copy(update=chain)
        self.say(f"oracle of {name}")
        settings = [prompts, self.mode, longest.model_dump(mode="json")]
        found = self.work.part("oracle", settings, lambda: self._kept(prompts, longest))
        return Rounds(found["tokens"], {int(k): count for k, count in found["lengths"].items()})

    def _kept(self, prompts: str, draft: DraftConfig) -> dict[str, Any]:
        write = make_method(self.bench.spec, MethodConfig(name="oracle", draft=draft))
        mode = next(mode for mode in self.bench.config.modes if mode.name == self.mode)
        options, seed = self.bench.options(mode), self.bench.config.seed
        texts = [write(batch, options, seed) for batch in self.bench.batches[prompts, 1]]
        kept = Counter(kept for text in texts for kept in text.accepted)
        tokens = sum(sum(text.counts[1:]) for text in texts)
        return {"tokens": tokens, "lengths": {str(k): count for k, count in sorted(kept.items())}}


def _chains(bench: Bench) -> list[tuple[str, tuple[DraftConfig, ExitHead]]]:
    """The methods that draft chains from an exit head, with their drafts and heads."""
    found: list[tuple[str, tuple[DraftConfig, ExitHead]]] = []
    for method in bench.config.methods:
        draft = method.draft or bench.spec.default_draft
        if method.peer is None and method.name in bench.methods and draft.drafter == "early_exit":
            found.append((method.name, (draft, bench.spec.engine.head(draft))))
    return found


def _rounds(runs: list[Run]) -> Rounds:
    """Rounds of timed calls; the model's own `generate` drafts nothing."""
    tokens = sum(run.decoded for run in runs)
    lengths: Counter[int] = Counter()
    for run in runs:
        if run.stats is None:
            lengths[0] += run.decoded
            continue
        # Of the rounds that drafted a token at a position, some drafted another behind it.
        at = [run.stats["rounds"], *run.stats["drafted_at"], 0]
        lengths.update({k: at[k] - at[k + 1] for k in range(len(at) - 1)})
    return Rounds(tokens, +lengths)
