"""Consecutive decoder layers as CUDA graphs, for passes over few tokens.

A GPU finishes small operations faster than Python launches them. A CUDA graph launches the recorded
kernels with one call, on fixed addresses and shapes. Inputs are copied to where the graph reads
them, and the visible part of the KV cache grows in pages, so that shapes change seldom.

Every recording is compared with the layers once in every call of `generate`, bit by bit, so changes
that a user makes to the model between calls cannot make it stale. It lasts as long as the keys and
values that it reads: `Decoder.new_slots` hands those of the last call out again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from selfspec.config import Options
from selfspec.decoder.cache import GROWTH, WIDEST, LayerKV, SlotCache
from selfspec.decoder.direct import hooked_part
from selfspec.decoder.kernels.fallback import FallbackKernel, summarize
from selfspec.decoder.passes import ActivePass, LayerCall


class Tape(Protocol):
    """A recording of operations on a device.

    Attributes:
        outputs: the output tensors, at fixed addresses.
    """

    outputs: list[Tensor]

    def replay(self) -> None:
        """Run the operations again."""


class CudaTape:
    """A recorded CUDA graph.

    Args:
        graph: the graph.
        outputs: its output tensors.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: list[Tensor]):
        self._graph, self.outputs = graph, outputs

    def replay(self) -> None:
        """Launch the graph."""
        self._graph.replay()


class CudaRecorder:
    """Records CUDA graphs on one device, on a side stream.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device):
        # One stream for all graphs: libraries keep a workspace for every stream.
        self._device, self._aside = device, torch.cuda.Stream(device)

    def __call__(self, run: Callable[[], list[Tensor]]) -> CudaTape:
        """Record a function that has run before."""
        here = torch.cuda.current_stream(self._device)
        self._aside.wait_stream(here)
        try:
            with torch.cuda.stream(self._aside):
                run()  # libraries allocate their workspace the first time
                return self._captured(run)
        finally:
            here.wait_stream(self._aside)  # after an error, too

    def _captured(self, run: Callable[[], list[Tensor]]) -> CudaTape:
        # `torch.cuda.graph` would collect garbage and empty the cache each time.
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            outputs = run()
        except BaseException:
            with suppress(RuntimeError):  # a second, less helpful error
                graph.capture_end()
            raise
        graph.capture_end()
        return CudaTape(graph, outputs)


RunLayers = Callable[[Iterable[LayerCall], Tensor, Sequence[int], dict[int, Tensor]], Tensor]
Arguments = tuple[tuple[object, ...], Options]
Recorder = Callable[[Callable[[], list[Tensor]]], Tape]
RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}


MOST = 64  # graphs kept for a model
_KNOWN = (Tensor, SlotCache, torch.dtype, bool, int, float, str, type(None))  # argument types


class _Recording:
    """Recorded layers.

    It owns its inputs and outputs, but holds weak references to keys and values: once a cache has
    freed its buffers, the recording is dead.

    Args:
        run_layers: runs layers one after the other.
        calls: the layers.
        kinds: index into the arguments in `leaves` for each layer.
        keep: indices of layers whose inputs to keep.
        leaves: the flattened inputs: hidden states, slots, then the layers' arguments.
        spec: how to unflatten them.
        layer_kvs: keys, values, slots and `seen` of each layer.

    Attributes:
        addresses: where the weights of each layer are, which recorded kernels read.
        trusted: whether it was compared with the layers in this call of `generate`.
    """

    def __init__(
        self,
        run_layers: RunLayers,
        calls: Sequence[LayerCall],
        kinds: Sequence[int],
        keep: Sequence[int],
        leaves: Sequence[Any],
        spec: TreeSpec,
        layer_kvs: Sequence[tuple[Tensor, ...]],
    ):
        self._inputs = [_clone(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        hidden, slots, *_ = self._inputs
        self.layers, self._spec = [call.layer for call in calls], spec
        self._buffers = list(map(ref, _buffers_of(layer_kvs)))
        own_calls: list[LayerCall] = []  # with arguments that stay where they are
        for call, kind, (keys, values, _, seen) in zip(calls, kinds, layer_kvs, strict=True):
            layer_kv = LayerKV(keys, values, slots, seen)
            filled = [layer_kv if isinstance(leaf, SlotCache) else leaf for leaf in self._inputs]
            _, _, bound = tree_unflatten(filled, spec)
            own_calls.append(LayerCall(call.layer_index, call.layer, *bound[kind]))

        def run() -> list[Tensor]:
            kept: dict[int, Tensor] = {}
            last = run_layers(own_calls, hidden, keep, kept)
            return [*(kept[index].clone() for index in keep), last]  # it may be the static input

        self._run: Callable[[], list[Tensor]] | None = run
        self._tape: Tape | None = None
        self.addresses: list[list[int] | None] = []
        self.trusted = True

    def record(self, recorder: Recorder) -> str | None:
        """Record the layers and compare a replay with them.

        Returns:
            What is wrong with the recording; `None` if it is right.
        """
        run, self._run = self._run, None  # it holds keys and values
        assert run is not None
        expected = run()
        self.addresses = list(map(_addresses, self.layers))
        self._tape = recorder(run)
        for output in self._tape.outputs:
            output.zero_()
        self._tape.replay()
        if are_equal(self._tape.outputs, expected):
            return None
        return "a replay differs from the layers' own output"

    def agrees(self, leaves: Sequence[object], layers: _Recording) -> bool:
        """Whether a replay gives the same results as the layers; `layers` runs them eagerly."""
        assert layers._run is not None
        self.trusted = are_equal(self.replay(leaves), layers._run())
        return self.trusted

    @property
    def is_dead(self) -> bool:
        """Whether keys or values that it uses have been freed."""
        return any(buffer() is None for buffer in self._buffers)

    def fits(self, spec: TreeSpec, buffers: Sequence[Tensor]) -> bool:
        """Whether it was recorded with arguments of this structure and these keys and values."""
        pairs = zip(self._buffers, buffers, strict=True)
        return spec == self._spec and all(own() is buffer for own, buffer in pairs)

    def replay(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Run the recording on other inputs of the same shapes."""
        for own, leaf in zip(self._inputs, leaves, strict=True):
            if isinstance(own, Tensor):
                own.copy_(leaf)
        assert self._tape is not None
        self._tape.replay()
        # The next replay overwrites the outputs.
        return [output.clone() for output in self._tape.outputs]


class GraphedLayers(FallbackKernel):
    """Runs consecutive layers as CUDA graphs, and eagerly where that is impossible.

    Args:
        name: the model's, for the warning.

    """

    manner = "recorded as graphs"

    def __init__(self, name: str):
        super().__init__(name)
        self._recordings: dict[Hashable, _Recording] = {}  # in the order of their last use
        self._passes: Counter[Hashable] = Counter()
        self._recorders: dict[torch.device, Recorder] = {}

    @property
    def page(self) -> int:
        """Step in slots by which the visible KV cache grows."""
        return GROWTH if self.problem is None else 1

    def begin(self, layers: Iterable[nn.Module]) -> None:
        """Check layers and recordings again: the model may have changed since the last call."""
        recordings = list(self._recordings.items())
        used = {layer for _, recording in recordings for layer in recording.layers}
        now = {layer: _addresses(layer) for layer in used}
        for key, recording in recordings:
            recording.trusted = False
            there = [now[layer] for layer in recording.layers]
            if recording.is_dead or None in there or there != recording.addresses:
                del self._recordings[key], self._passes[key]
        for layer in layers if self.problem is None else ():
            devices = {weight.device for weight in layer.parameters()}
            strange = sorted({device.type for device in devices} - RECORDERS.keys())
            part = hooked_part(layer)
            if strange:
                return self.give_up(f"a device of the kind {strange[0]} has none")
            if len(devices) > 1:
                return self.give_up(f"a {type(layer).__name__} lies on several devices")
            if part is not None:
                return self.give_up(f"hooks on {part}")

    def end(self) -> None:
        """Forget what was seen in a call, except recordings and shapes that may be recorded."""
        if len(self._passes) > 2 * MOST:
            self._passes = Counter({key: self._passes[key] for key in self._recordings})

    def run(
        self,
        run_layers: RunLayers,
        active: ActivePass,
        calls: Sequence[LayerCall],
        hidden: Tensor,
        keep: Sequence[int],
    ) -> Tensor | None:
        """Run consecutive layers.

        Args:
            run_layers: runs them one after the other.
            active: the pass, which receives the kept hidden states.
            calls: the layers.
            hidden: `[rows, width, hidden]` the first layer's input.
            keep: indices of layers whose inputs to keep.

        Returns:
            `[rows, width, hidden]` the last layer's output; `None` if they have to run eagerly.
        """
        window = active.window
        if self.problem is not None or window is None or not calls or hidden.shape[1] > WIDEST:
            return None
        bound, kinds = _arguments(calls)
        leaves, spec = tree_flatten((hidden, window.slots, bound))
        slots = next((leaf for leaf in leaves if isinstance(leaf, SlotCache)), None)
        strange = next((leaf for leaf in leaves if not isinstance(leaf, _KNOWN)), None)
        if strange is not None:
            return self.give_up(f"they are called with a {type(strange).__name__}")
        if slots is None:
            return None
        layer_kvs = [kv for call in calls if (kv := slots.layer_kv(call.layer_index)) is not None]
        if len(layer_kvs) < len(calls):  # the cache is still empty
            return None
        keep = tuple(call.layer_index for call in calls if call.layer_index in keep)
        layers = tuple(id(call.layer) for call in calls)
        which = layers, calls[0].layer_index, tuple(kinds), keep, active.approximation
        # Caches that are used in turn have recordings of their own.
        key = which, id(layer_kvs[0][0]), window.end, tuple(map(_shape_of, leaves))
        recording = self._recordings.pop(key, None)
        if recording is not None and not recording.fits(spec, _buffers_of(layer_kvs)):
            recording = None
        make = partial(_Recording, run_layers, calls, kinds, keep, leaves, spec, layer_kvs)
        if recording is not None and not recording.trusted:
            recording = recording if recording.agrees(leaves, make()) else None
        if recording is None:
            recording = self._record(key, hidden.device, make)
        if recording is None:
            return None
        self._recordings[key] = recording
        *kept, last = recording.replay(leaves)
        active.kept.update(zip(keep, kept, strict=True))
        return last

    def _record(
        self, key: Hashable, device: torch.device, make: Callable[[], _Recording]
    ) -> _Recording | None:
        """Record a pass, if its shape has occurred before."""
        self._passes[key] += 1
        if self._passes[key] <= 2:  # a shape may be that of few passes
            return None
        self._make_room()
        recording = make()
        try:
            if device not in self._recorders:
                self._recorders[device] = RECORDERS[device.type](device)
            problem = recording.record(self._recorders[device])
        except Exception as error:  # the layers themselves may still run
            problem = summarize(error)
        return recording if problem is None else self.give_up(problem)

    def _make_room(self) -> None:
        """Drop dead recordings, and the least recently used one if there are too many."""
        for key, recording in list(self._recordings.items()):
            if recording.is_dead or len(self._recordings) >= MOST:
                del self._recordings[key], self._passes[key]

    def give_up(self, problem: str) -> None:
        """Run layers eagerly from now on, and warn with the reason."""
        self._recordings.clear()
        self.end()
        super().give_up(problem)


def _addresses(layer: nn.Module) -> list[int] | None:
    """Addresses of a layer's weights; `None` if they are unknown."""
    try:
        return [tensor.data_ptr() for tensor in (*layer.parameters(), *layer.buffers())]
    except RuntimeError:  # of some tensor subclasses
        return None


def _arguments(calls: Sequence[LayerCall]) -> tuple[list[Arguments], list[int]]:
    """What layers are called with, and for each an index into it: many share the same objects."""
    bound: list[Arguments] = []
    kinds: dict[Hashable, int] = {}
    kind_of: list[int] = []
    for _, _, args, kwargs in calls:
        kind = tuple(map(id, args)), tuple(kwargs), tuple(map(id, kwargs.values()))
        if kind not in kinds:
            kinds[kind] = len(bound)
            bound.append((args, kwargs))
        kind_of.append(kinds[kind])
    return bound, kind_of


def are_equal(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    """Whether tensors are the same to the bit, where NaN equals NaN."""
    pairs = zip(one, other, strict=True)
    return all(torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True) for a, b in pairs)


def _clone(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _buffers_of(layer_kvs: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    return [buffer for keys, values, *_ in layer_kvs for buffer in (keys, values)]


def _shape_of(leaf: object) -> Hashable:
    """What of an argument must be the same: a tensor's shape, dtype and device, else its value."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return None if isinstance(leaf, SlotCache) else leaf
