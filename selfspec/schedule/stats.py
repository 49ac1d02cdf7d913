"""Statistics of a call: counters, rates, time split, and the token trace."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal

from selfspec.config import JsonObject

# Parts of a round's time; what is left is the rest.
PARTS = ("shallow", "deep", "head", "sampling")

Origin = Literal["accepted", "corrected", "bonus", "plain"]


@dataclass(frozen=True)
class Round:
    """One round of one row, cut at the row's stop.

    Attributes:
        drafted: the drafted token ids; of a tree, those of the accepted branch and a continuation.
        accepted: how many of them were accepted.
        target: the token that the target added after them; `None` if the row stopped before.
        proposed: tokens that the target verified, including other branches of a tree.
    """

    drafted: tuple[int, ...]
    accepted: int
    target: int | None
    proposed: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """The emitted tokens."""
        added = () if self.target is None else (self.target,)
        return self.drafted[: self.accepted] + added

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The origin of each emitted token."""
        kept: tuple[Origin, ...] = ("accepted",) * self.accepted
        if self.target is None:
            return kept
        if not self.drafted:
            return (*kept, "plain")
        return (*kept, "bonus" if self.accepted == len(self.drafted) else "corrected")


@dataclass
class Trace:
    """Every round of every row of a call, in order."""

    rows: list[list[Round]]

    def tokens(self, row: int = 0) -> list[int]:
        """The emitted token ids of a row."""
        return [token for step in self.rows[row] for token in step.tokens]

    def origins(self, row: int = 0) -> list[Origin]:
        """The origin of each emitted token of a row."""
        return [origin for step in self.rows[row] for origin in step.origins]


class Clock:
    """Adds the wall time of a `with` block to one of several parts."""

    __slots__ = ("_began", "_part", "_seconds")

    def __init__(self, seconds: dict[str, float], part: str):
        self._seconds, self._part = seconds, part

    def __enter__(self) -> None:
        """Begin."""
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        """Add."""
        self._seconds[self._part] += time.perf_counter() - self._began


@dataclass
class Stats:
    """Counters and seconds of one call.

    Attributes:
        rounds: rounds, counted once per row that took part; without the prefill.
        drafted: drafted tokens that were verified.
        accepted: drafted tokens that were accepted.
        proposed: tokens that the target verified; more than `drafted` if drafts are trees.
        emitted: generated tokens.
        prefilled: the part of them that the prefill generated, one per row.
        lossless: whether the output follows the target's distribution; a lossy rule changes it.
        drafted_at: drafts by position (index 0 is the first of a round).
        accepted_at: accepted drafts by position.
        seconds: wall time of `prefill`, of the layers in `shallow` and `deep` passes, of the
            `head` (exit heads and LM head), of `sampling` (processors, draws and acceptance), and
            the `total` of the call. On a GPU kernels run asynchronously: there the split shows
            where the host waited.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    proposed: int = 0
    emitted: int = 0
    prefilled: int = 0
    lossless: bool = True
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("prefill", *PARTS, "total"), 0.0)
    )

    def count(self, step: Round) -> None:
        """Add one row's round."""
        self.rounds += 1
        self.drafted += len(step.drafted)
        self.accepted += step.accepted
        self.proposed += step.proposed
        self.emitted += len(step.tokens)
        missing = len(step.drafted) - len(self.drafted_at)
        self.drafted_at += [0] * missing
        self.accepted_at += [0] * missing
        for position in range(len(step.drafted)):
            self.drafted_at[position] += 1
            self.accepted_at[position] += position < step.accepted

    def __add__(self, other: Stats) -> Stats:
        """The counters and clocks of both calls together."""
        both = {name: _together(own, getattr(other, name)) for name, own in vars(self).items()}
        return Stats(**both)

    @contextmanager
    def prefilling(self) -> Iterator[None]:
        """Count the tokens of a block as the prefill's, which is not a round."""
        rounds, emitted = self.rounds, self.emitted
        yield
        self.rounds, self.prefilled = rounds, self.prefilled + self.emitted - emitted

    def clock(self, part: str) -> Clock:
        """Add the wall time of a block to `seconds[part]`."""
        return Clock(self.seconds, part)

    @property
    def acceptance_rate(self) -> float:
        """α: accepted over drafted; 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """τ: tokens emitted per round, the token of the target included."""
        return (self.emitted - self.prefilled) / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Fraction of drafts accepted at each position."""
        pairs = zip(self.accepted_at, self.drafted_at, strict=True)
        return [kept / drafted for kept, drafted in pairs]

    @property
    def decode_seconds(self) -> float:
        """Wall time of the call without its prefill."""
        return self.seconds["total"] - self.seconds["prefill"]

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second of decode time, all rows together."""
        decoded = self.emitted - self.prefilled
        return decoded / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def time_split(self) -> dict[str, float]:
        """Fractions of decode time: shallow layers, deep layers, heads, sampling, and the rest.

        The rest is what is left: embeddings, masks, rotary tables and bookkeeping.
        """
        total = self.decode_seconds
        if total <= 0:
            return {}
        parts = {part: self.seconds[part] / total for part in PARTS}
        return {**parts, "rest": 1 - sum(parts.values())}

    def counted(self) -> JsonObject:
        """What does not depend on the clock, as plain values."""
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "proposed": self.proposed,
            "emitted": self.emitted,
            "lossless": self.lossless,
            "acceptance_rate": self.acceptance_rate,
            "mean_accepted_length": self.mean_accepted_length,
            "acceptance_by_position": self.acceptance_by_position,
        }

    def to_dict(self) -> JsonObject:
        """The counters and rates as plain values, for JSON."""
        return {
            **self.counted(),
            "tokens_per_second": self.tokens_per_second,
            "time_split": self.time_split,
            "seconds": dict(self.seconds),
        }


def _together(one: Any, other: Any) -> Any:
    """The sum of two values of a counter; of lists and dicts, element by element."""
    if isinstance(one, bool):
        return one and other
    if isinstance(one, list):
        return [a + b for a, b in zip_longest(one, other, fillvalue=0)]
    if isinstance(one, dict):
        return {name: value + other[name] for name, value in one.items()}
    return one + other
