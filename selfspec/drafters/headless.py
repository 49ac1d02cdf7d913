"""What a checkpoint without heads drafts with: a shared exit at first, fewer bits once they pay."""

from __future__ import annotations

from typing import NamedTuple, get_args

from selfspec.config import LONGEST, DraftConfig, Precision
from selfspec.decoder import Approximation, Decoder
from selfspec.decoder.kernels.low_precision import (
    MOST_TOKENS,
    Trial,
    largest_linears,
    try_copies,
)
from selfspec.decoder.kernels.prepacked import fits
from selfspec.schedule.rounds import ACCEPTED
from selfspec.schedule.stats import Stats

_SHARE = 0.01  # of the time spent decoding, which a trial may take, and as much the copies
_SECONDS_PER_WEIGHT = 2e-8  # of a trial, until one was made; it takes 6 to 20 nanoseconds
_WORTH = 1.1  # expected speed over plain decoding for which memory is taken


class _Choice(NamedTuple):
    """A precision: its expected speed over plain decoding, seconds to make copies, their bytes."""

    speed: float
    seconds: float
    nbytes: int
    precision: Precision


class Headless:
    """The default draft of a checkpoint without heads.

    It is `auto` with the shared exit at first. On a CPU, `auto` later drafts with the whole model
    in fewer bits: once making the copies takes a small part of the time spent decoding so far, if
    they are expected to pay, by what a trial with a few weights has measured, and if there is
    enough free memory.

    Args:
        decoder: the target.

    Attributes:
        draft: the default draft now.
    """

    def __init__(self, decoder: Decoder):
        self._decoder, self._seconds = decoder, 0.0
        self._choice: _Choice | None = None
        self.draft = DraftConfig(drafter="auto", rule="coupled")
        if decoder.depth == 1:  # no exit
            self.draft = DraftConfig(drafter="none")
        self._undecided = decoder.depth > 1 and decoder.device.type == "cpu"

    def decoded(self, stats: Stats, rows: int) -> None:
        """A call of so many rows, which drafted by default, has ended."""
        if not self._undecided or rows > MOST_TOKENS["cpu"] or not stats.rounds:
            return
        self._seconds += stats.decode_seconds
        spare = _SHARE * self._seconds
        if self._choice is None:
            linears = largest_linears(self._decoder.layers[0])
            trial = _SECONDS_PER_WEIGHT * sum(module.weight.numel() for module in linears)
            if spare > trial:
                self._choice = self._best(linears, stats.decode_seconds * rows / stats.rounds)
                self._undecided = self._choice is not None
        elif spare > self._choice.seconds:
            self._undecided = False
            if fits(self._choice.nbytes):
                depth, precision = self._decoder.depth, self._choice.precision
                whole = {"exit_layer": depth, "precision": precision}
                self.draft = self.draft.model_copy(update=whole)

    def _best(self, linears: list, step: float) -> _Choice | None:
        """The precision that is expected to be fastest, if one is expected to pay.

        `step` is what a plain step takes, in seconds.
        """
        if not linears:
            return None
        choices = (self._try(linears, precision, step) for precision in get_args(Precision))
        worth = [choice for choice in choices if choice is not None and choice.speed > _WORTH]
        return max(worth, default=None)

    def _try(self, linears: list, precision: Precision, step: float) -> _Choice | None:
        decoder = self._decoder
        try:
            decoder.check_approximation(Approximation(precision, precision, layers=True))
        except ValueError:
            return None
        with decoder:
            trial = try_copies(linears, precision)
        parts = [*decoder.layers, decoder.lm_head]
        size = sum(weight.numel() for part in parts for weight in part.parameters())
        nbytes = sum(decoder.copy_bytes(precision).values())
        speed = expected_speed(trial, size, step)
        return _Choice(speed, trial.copying * size / trial.weights, nbytes, precision)


def expected_speed(trial: Trial, size: int, step: float) -> float:
    """Tokens per second of chains from low-precision copies over those of plain decoding.

    Args:
        trial: what some of the weights took.
        size: number of weights that a step reads.
        step: seconds of a plain step.
    """
    scale = size / trial.weights / step
    draft = max(0.0, 1 - scale * (trial.own - trial.copied))
    growth = max(0.0, scale * (trial.several - trial.own) / (MOST_TOKENS["cpu"] - 1))
    tokens = [sum(ACCEPTED**position for position in range(n + 1)) for n in range(1, LONGEST + 1)]
    return max(each / (1 + n * (draft + growth)) for n, each in enumerate(tokens, start=1))
