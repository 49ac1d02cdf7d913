"""Every method on every prompt, interleaved, each call on disk as soon as it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec.bench.batches import Batch, make_batches
from selfspec.bench.config import BenchConfig, ModeConfig
from selfspec.bench.meters import EnergyMeter, peak_memory
from selfspec.bench.methods import Write, make_method, stop_ids
from selfspec.bench.prompts import read_prompts
from selfspec.bench.runs import Key, Place, Run, RunFile
from selfspec.model import SelfSpecModel


class Progress(NamedTuple):
    """How far a benchmark is: timed calls done, all there are, and what comes next."""

    done: int
    total: int
    doing: str


class Bench:
    """A benchmark of one target.

    Args:
        spec: the target, with its heads.
        tokenizer: its tokenizer.
        config: what is run.

    Attributes:
        prompts: by set, `[width]` each.
        batches: the same by set and batch size.
        methods: what writes, by name.
        unmade: why others cannot be made, by name.

    Raises:
        FileNotFoundError: a prompt set's file is not there.
        ValueError: a prompt set has too few prompts.
    """

    def __init__(
        self, spec: SelfSpecModel, tokenizer: PreTrainedTokenizerBase, config: BenchConfig
    ):
        self.spec, self.tokenizer, self.config = spec, tokenizer, config
        decoder = spec.engine.decoder
        longest = decoder.max_positions and decoder.max_positions - config.max_new_tokens
        self.prompts: dict[str, list[Tensor]] = {
            prompts.name: [
                torch.tensor(tokens) for tokens in read_prompts(prompts, tokenizer, longest)
            ]
            for prompts in config.prompts
        }
        self.batches: dict[tuple[str, int], list[Batch]] = {
            (name, rows): make_batches(prompts, rows, decoder.device)
            for name, prompts in self.prompts.items()
            for rows in config.batch_sizes
        }
        self.methods: dict[str, Write] = {}
        self.unmade: dict[str, str] = {}
        for method in config.methods:
            try:
                self.methods[method.name] = make_method(spec, method)
            except Exception as error:  # a row of the report, whatever it is
                self.unmade[method.name] = reason(error)

    @property
    def total(self) -> int:
        """Timed calls in all."""
        each = len(self.config.modes) * len(self.config.methods) * self.config.repeats
        return sum(map(len, self.batches.values())) * each

    def options(self, mode: ModeConfig) -> dict[str, Any]:
        """Options of `generate`, the same for every method."""
        padding = self.spec.causal_lm.generation_config.pad_token_id
        return {
            **mode.generation,
            "max_new_tokens": self.config.max_new_tokens,
            "pad_token_id": next(iter([*stop_ids(self.spec), 0])) if padding is None else padding,
        }

    def run(self, file: RunFile, show: Callable[[Progress], None] = lambda progress: None) -> None:
        """Make all runs that the file does not hold yet.

        Args:
            file: where they are kept.
            show: told before every call.
        """
        for mode in self.config.modes:
            for prompts, rows in self.batches:
                _Session(self, file, mode, prompts, rows, show).run()


class _Session:
    """The runs of one mode on one prompt set with one batch size."""

    def __init__(
        self,
        bench: Bench,
        file: RunFile,
        mode: ModeConfig,
        prompts: str,
        rows: int,
        show: Callable[[Progress], None],
    ):
        self.bench, self.file, self.show = bench, file, show
        self.mode, self.prompts, self.rows = mode, prompts, rows
        self.batches = bench.batches[prompts, rows]
        self.options = bench.options(mode)
        self.energy = EnergyMeter(bench.spec.engine.decoder.device)

    def run(self) -> None:
        for method, why in self.bench.unmade.items():
            self.file.fail(self._place(method), why)
        wanted = [key for key in self._order() if key not in self.file.runs]
        for method in dict.fromkeys(key.place.method for key in wanted):
            self._guarded(self._place(method), lambda method=method: self._warm_up(method))
        for key in wanted:
            if key.place not in self.file.failures:
                self._guarded(key.place, lambda key=key: self._time(key))

    def _place(self, method: str) -> Place:
        return Place(self.mode.name, self.prompts, self.rows, method)

    def _order(self) -> Iterator[Key]:
        """Batch by batch; who begins moves on, and every second turn goes backwards."""
        methods = list(self.bench.methods)
        for number in range(len(self.batches)):
            for repeat in range(self.bench.config.repeats):
                turn = number * self.bench.config.repeats + repeat
                first = turn % len(methods)
                order = methods[first:] + methods[:first]
                for method in order[:: -1 if turn % 2 else 1]:
                    yield Key(self._place(method), number, repeat)

    def _guarded(self, place: Place, call: Callable[[], None]) -> None:
        done = len(self.file.runs)
        doing = f"{place.mode} · {place.prompts} · batch {place.batch} · {place.method}"
        self.show(Progress(done, self.bench.total, doing))
        try:
            call()
        except Exception as error:  # a row of the report, whatever it is
            self.file.fail(place, reason(error))

    def _warm_up(self, method: str) -> None:
        """Write a little, untimed, and see how much memory it takes."""
        write = self.bench.methods[method]
        longest = max(self.batches, key=lambda batch: batch.width)
        options = {**self.options, "max_new_tokens": self.bench.config.warm_up}
        device = longest.tokens.device
        memory = peak_memory(lambda: write(longest, options, self.bench.config.seed), device)
        if memory is not None:
            self.file.add_memory(self._place(method), memory)

    def _time(self, key: Key) -> None:
        seed = self.bench.config.seed + 1000 * key.repeat + key.number
        before = self.energy.joules()
        batch = self.batches[key.number]
        written = self.bench.methods[key.place.method](batch, self.options, seed)
        after = self.energy.joules()
        used = None if before is None or after is None else after - before
        self.file.add(Run.of(key, written, used))


def reason(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
