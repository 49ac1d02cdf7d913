"""What a device does, recorded to be done again at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor


class Tape(Protocol):
    """What a device did, to be done again.

    Attributes:
        outputs: what it left, each time in the same places.
    """

    outputs: list[Tensor]

    def replay(self) -> None:
        """Do it again."""


class CudaTape:
    """A recorded CUDA graph.

    Args:
        graph: the graph.
        outputs: what it leaves.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: list[Tensor]):
        self._graph, self.outputs = graph, outputs

    def replay(self) -> None:
        """Launch the graph."""
        self._graph.replay()


class CudaRecorder:
    """Records CUDA graphs of one device, on a stream beside.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device):
        # One for all: libraries keep room of their own for every stream.
        self._device, self._aside = device, torch.cuda.Stream(device)

    def __call__(self, run: Callable[[], list[Tensor]]) -> CudaTape:
        """Record what was run before."""
        here = torch.cuda.current_stream(self._device)
        self._aside.wait_stream(here)
        try:
            with torch.cuda.stream(self._aside):
                run()  # libraries make that room the first time
                return self._captured(run)
        finally:
            here.wait_stream(self._aside)  # also for what was begun before an error

    def _captured(self, run: Callable[[], list[Tensor]]) -> CudaTape:
        # Not by `torch.cuda.graph`, which collects garbage and empties the cache each time.
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            outputs = run()
        except BaseException:
            with suppress(RuntimeError):  # it fails as well then, and says less
                graph.capture_end()
            raise
        graph.capture_end()
        return CudaTape(graph, outputs)


Recorder = Callable[[Callable[[], list[Tensor]]], Tape]
RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}
