"""Timed calls on disk: one JSON line each, so that a benchmark goes on where it was stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from selfspec.bench.meters import Memory
from selfspec.bench.methods import Written

_RUNS = "runs.jsonl"
_IDENTITY = "bench.json"


class Place(NamedTuple):
    """A row of the report: one method in one mode on one prompt set, so many prompts at once."""

    mode: str
    prompts: str
    batch: int
    method: str


class Key(NamedTuple):
    """A timed call: the place, the number of the batch of prompts and the repeat's."""

    place: Place
    number: int
    repeat: int


@dataclass(frozen=True)
class Run:
    """One timed call.

    Attributes:
        key: which.
        texts: the new token ids of each row.
        counts: tokens of each arrival, all rows together; the first ends the prefill.
        times: seconds from the call to each arrival.
        accepted: kept drafts of every round of every row behind the prefill.
        stats: fields of selfspec's `Stats`; `None` of a peer.
        joules: what the GPU used.
    """

    key: Key
    texts: list[list[int]]
    counts: list[int]
    times: list[float]
    accepted: list[int]
    stats: dict[str, Any] | None = None
    joules: float | None = None

    @classmethod
    def of(cls, key: Key, written: Written, joules: float | None) -> Run:
        """The run that a call made."""
        stats = asdict(written.stats) if written.stats else None
        times = [round(seconds, 6) for seconds in written.times]
        return cls(key, written.texts, written.counts, times, list(written.accepted), stats, joules)

    @property
    def decoded(self) -> int:
        """Tokens behind the first arrival."""
        return sum(self.counts[1:])

    @property
    def prefill_seconds(self) -> float:
        """Time to the first arrival."""
        return self.times[0]

    @property
    def decode_seconds(self) -> float:
        """Time from the first arrival to the last."""
        return self.times[-1] - self.times[0]

    @property
    def rate(self) -> float | None:
        """Decoded tokens per second, all rows together; `None` where every text ended at once."""
        return self.decoded / self.decode_seconds if self.decoded else None


class RunFile:
    """The runs in a folder.

    Args:
        folder: made if it is not there.
        identity: what the runs depend on; runs of another identity are not mixed in.

    Attributes:
        runs: by key, in the order they were made.
        memory: peak memory by place.
        failures: reasons by place, those of this session.

    Raises:
        ValueError: the folder holds runs of another identity.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]):
        self.folder = folder
        self.runs: dict[Key, Run] = {}
        self.memory: dict[Place, Memory] = {}
        self.failures: dict[Place, str] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._claim(json.loads(json.dumps(identity)))
        self._read()

    def _claim(self, identity: dict[str, Any]) -> None:
        path = self.folder / _IDENTITY
        if not path.is_file():
            path.write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")
            return
        held = json.loads(path.read_text(encoding="utf-8"))
        for name, before, now in _differences(held, identity):
            raise ValueError(
                f"{self.folder} holds the runs of another benchmark: {name} was {before!r}, is "
                f"{now!r}; give another --output, or remove the folder"
            )

    def _read(self) -> None:
        path = self.folder / _RUNS
        if not path.is_file():
            return
        text = path.read_bytes()
        # The last line may have been cut off; what is appended must begin a line.
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            path.write_bytes(whole)
        for line in whole.decode("utf-8").splitlines():
            self._take(json.loads(line))

    def _take(self, record: dict[str, Any]) -> None:
        place = Place(*(record.pop(name) for name in Place._fields))
        if "peak" in record:
            self.memory[place] = Memory(**record)
        elif "error" not in record:  # what failed is tried again
            key = Key(place, record.pop("number"), record.pop("repeat"))
            self.runs[key] = Run(key, **record)

    def add(self, run: Run) -> None:
        """Keep a run."""
        record = {name: value for name, value in vars(run).items() if name != "key"}
        self._append(run.key.place, {"number": run.key.number, "repeat": run.key.repeat, **record})
        self.runs[run.key] = run

    def add_memory(self, place: Place, memory: Memory) -> None:
        """Keep what a call needed."""
        self._append(place, memory._asdict())
        self.memory[place] = memory

    def fail(self, place: Place, reason: str) -> None:
        """Keep why a method has no figures."""
        self._append(place, {"error": reason})
        self.failures[place] = reason

    def _append(self, place: Place, record: Mapping[str, Any]) -> None:
        line = json.dumps({**place._asdict(), **record}, allow_nan=False)
        with (self.folder / _RUNS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _differences(before: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Leaves of two trees of dicts and lists that differ, with their names."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            inner = f"{name}.{key}" if name else str(key)
            yield from _differences(before.get(key), now.get(key), inner)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, pair in enumerate(zip(before, now, strict=True)):
            yield from _differences(*pair, f"{name}.{index}")
    elif before != now:
        yield name, before, now
