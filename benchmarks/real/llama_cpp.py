"""Generates with llama.cpp, as a method of a benchmark.

llama.cpp and its Python interface come from PyPI (`xllamacpp`, MIT), unpacked and not installed.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from selfspec.apps.bench.prompts import Batch
from selfspec.apps.bench.run import Written
from selfspec.apps.smollm2 import pip

_LLAMA_CPP = "xllamacpp>=2026.10,<2027"


def fetch_llama_cpp(folder: Path, offline: bool) -> bool:
    """Make `xllamacpp` importable, from `folder` if it is not installed; returns whether it is."""
    if not offline and not folder.is_dir():
        pip("install", "--no-deps", "--target", str(folder), _LLAMA_CPP)
    sys.path.append(str(folder))
    try:
        import xllamacpp  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    return True


class LlamaCpp:
    """Writes one prompt at a time with a GGUF file, which is loaded at the first call.

    llama.cpp tells the time of its prefill, which ends with the first token, and that of all tokens
    after it. Its cache of earlier prompts is off.
    """

    def __init__(self, file: Path, threads: int, positions: int, stops: Collection[int]):
        self.file, self.threads, self.positions = file, threads, positions
        self.stops = set(stops)

    @cached_property
    def _server(self) -> ProcessPoolExecutor:
        """A process for llama.cpp's server.

        In one process with torch it would share OpenMP's runtime, which counts the threads of both
        as more than the cores there are, and puts torch's to sleep at the end of every operation.
        """
        given = (str(self.file), self.threads, self.positions)
        return ProcessPoolExecutor(1, get_context("spawn"), _start, given)

    def __call__(self, batch: Batch, options: dict[str, Any], seed: int) -> Written:
        """Continue one prompt, given options of transformers' `generate`.

        The seed draws other texts than torch does. Raises RuntimeError if llama.cpp refuses.
        """
        if batch.rows > 1:
            raise ValueError(f"llama.cpp is asked for one prompt at a time, got {batch.rows}")
        request = {
            "prompt": batch.tokens[0].tolist(),
            "n_predict": options["max_new_tokens"],
            "temperature": options["temperature"] if options["do_sample"] else 0.0,
            "samplers": ["temperature"],
            "seed": seed,
            "cache_prompt": False,
            "return_tokens": True,
            "verbose": True,  # else tokens are left out
        }
        told = self._server.submit(_complete, request).result()
        if "error" in told:
            raise RuntimeError(f"llama.cpp: {told['error']['message']}")
        tokens, times = list(told["__verbose"]["tokens"]), told["__verbose"]["timings"]
        count, prefill = times["predicted_n"], times["prompt_ms"] / 1000
        end = next((place for place, token in enumerate(tokens, 1) if token in self.stops), None)
        counts, arrivals = [1], [prefill]
        if count > 1:
            counts.append(count - 1)
            arrivals.append(prefill + times["predicted_ms"] / 1000)
        return Written([tokens[:end]], counts, arrivals, [0] * (count - 1))


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
