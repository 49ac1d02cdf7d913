"""Generates with llama.cpp, as a method of a benchmark."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from selfspec.apps.bench.prompts import Batch
from selfspec.apps.bench.run import Written


class LlamaCpp:
    """Writes one prompt at a time, with the tokens of the prompt as they are.

    llama.cpp tells the time of its prefill, which ends with the first token, and that of all tokens
    after it. Its cache of earlier prompts is off.

    Args:
        file: a GGUF file, loaded at the first call.
        threads: number of CPU threads.
        positions: tokens that prompt and output may have.
        stops: the stop tokens.
    """

    def __init__(self, file: Path, threads: int, positions: int, stops: Collection[int]):
        self.file, self.threads, self.positions = file, threads, positions
        self.stops = set(stops)

    @cached_property
    def _server(self) -> Any:
        return _Apart(self.file, self.threads, self.positions)

    def __call__(self, batch: Batch, options: dict[str, Any], seed: int) -> Written:
        """Generate, as the methods of `selfspec bench` do.

        Args:
            batch: one prompt.
            options: of transformers' `generate`.
            seed: of sampling, which draws other texts than torch does.

        Raises:
            RuntimeError: llama.cpp refuses the request.
            ValueError: the batch has several prompts.
        """
        if batch.rows > 1:
            raise ValueError(f"llama.cpp is asked for one prompt at a time, got {batch.rows}")
        told = self._server.handle_completions(
            {
                "prompt": batch.tokens[0].tolist(),
                "n_predict": options["max_new_tokens"],
                "temperature": options["temperature"] if options["do_sample"] else 0.0,
                "samplers": ["temperature"],
                "seed": seed,
                "cache_prompt": False,
                "return_tokens": True,
                "verbose": True,  # else tokens are left out
            }
        )
        if "error" in told:
            raise RuntimeError(f"llama.cpp: {told['error']['message']}")
        return self._written(told["__verbose"])

    def _written(self, told: dict[str, Any]) -> Written:
        tokens, times = list(told["tokens"]), told["timings"]
        count, prefill = times["predicted_n"], times["prompt_ms"] / 1000
        end = next((place for place, token in enumerate(tokens, 1) if token in self.stops), None)
        counts, arrivals = [1], [prefill]
        if count > 1:
            counts.append(count - 1)
            arrivals.append(prefill + times["predicted_ms"] / 1000)
        return Written([tokens[:end]], counts, arrivals, [0] * (count - 1))


class _Apart:
    """llama.cpp's server in a process of its own.

    In one process with torch it would share OpenMP's runtime, which counts the threads of both as
    more than the cores there are, and puts torch's to sleep at the end of every operation.
    """

    def __init__(self, file: Path, threads: int, positions: int):
        self._process = ProcessPoolExecutor(
            1, get_context("spawn"), _start, (str(file), threads, positions)
        )

    def handle_completions(self, request: dict[str, Any]) -> dict[str, Any]:
        """What llama.cpp answers."""
        return self._process.submit(_complete, request).result()


_SERVERS: list[Any] = []  # of this process


def _start(file: str, threads: int, positions: int) -> None:
    import xllamacpp  # pyright: ignore[reportMissingImports]

    params: Any = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx, params.n_parallel, params.n_gpu_layers = positions, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.verbosity = -1
    _SERVERS.append(xllamacpp.Server(params))


def _complete(request: dict[str, Any]) -> dict[str, Any]:
    return _SERVERS[0].handle_completions(request)
