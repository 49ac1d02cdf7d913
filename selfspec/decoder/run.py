"""One pass: the model's own code with gates in it, the loop over layers, and on to logits.

The body of the model is called with gates in place of its layers. They record what the body calls
each layer with; the last of them calls back, and the layers of the span run in one loop
(`run_layers`). The body then goes on with their output.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils.generic import ModelOutput

from selfspec.config import Kernels, Options
from selfspec.decoder.devices import device_of
from selfspec.decoder.direct import Forward, StandIn, parents_of
from selfspec.decoder.gates import Gates
from selfspec.decoder.passes import (
    ActivePass,
    BodyDone,
    BodyError,
    BodyWatch,
    LayerCall,
    OwnLayer,
    Pass,
    Skips,
    cache_name,
)

# Calls a layer, given its index, its input, and its other arguments.
CallLayer = Callable[[nn.Module, int, Tensor, tuple[object, ...], Options], Any]


class Normed(ModelOutput):
    """Stands in for what a body returns, of which nothing but the states is there.

    Args:
        last_hidden_state: `[rows, width, hidden]` outputs of the final norm.
    """

    def __init__(self, last_hidden_state: Tensor):
        # Without what dataclasses of transformers do here, which takes 12 microseconds.
        vars(self)["last_hidden_state"] = last_hidden_state
        OrderedDict.__setitem__(self, "last_hidden_state", last_hidden_state)

    def __getitem__(self, index: Any) -> Any:
        """Outputs by position, or by name."""
        return getattr(self, index) if isinstance(index, str) else (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        """`None` for every other field."""
        if name.startswith("_"):
            raise AttributeError(name)


class LogitsTail:
    """The part of the causal LM's `forward` after its body.

    Args:
        causal_lm: the model.
        base: its body.
        gates: the model's gates.
    """

    def __init__(self, causal_lm: PreTrainedModel, base: nn.Module, gates: Gates):
        self.causal_lm, self.gates = causal_lm, gates
        parameters = inspect.signature(type(causal_lm).forward).parameters
        self._takes = set(parameters)
        self._passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        lm_head, around = causal_lm.get_output_embeddings(), causal_lm.base_model
        inside = any(part is lm_head for part in around.modules())
        # The causal LM calls its body, or the multimodal model around it.
        bodies = {base} if inside else {base, around}
        self._parents = [(*at, body) for body in bodies for at in parents_of(causal_lm, body)]

    def takes_all(self, inputs: Options) -> bool:
        """Whether the causal LM's `forward` takes what its body is called with."""
        return self._passes_on or self._takes >= inputs.keys()

    def prepares(self, inputs: Options) -> bool:
        """Whether the causal LM may change what its body is called with, or how it computes.

        Hooks may, and so may a `forward` that is not transformers' own, as that of accelerate for
        mixed precision.
        """
        changes = bool(self.causal_lm._forward_pre_hooks) or self.gates.has_own_forward
        return changes and self.takes_all(inputs)

    def run(self, inputs: dict[str, object]) -> Tensor:
        """Logits of a pass through body and tail, on the tokens' device."""
        if "output_router_logits" in self._takes:
            inputs["output_router_logits"] = False
        return self.causal_lm(**inputs).logits.to(_device_of_inputs(inputs))

    def unembed(self, normed: Tensor, readout: nn.Module | None) -> Tensor:
        """Logits `[rows, width, vocab]` of `normed`, with the body (and the LM head) replaced.

        This is not a pass, so neither the body's hooks nor those of the causal LM run.
        """
        gates = self.gates
        # A replaced module's device hooks do not run, so the states are moved here.
        head_device, device = gates.devices()
        normed = normed.to(head_device if readout is None else device_of(readout))
        output = Normed(normed)
        others: list[tuple[nn.Module, str, Forward]] = [
            (parent, name, StandIn(body, _mine(lambda *args, **kwargs: output, body)))
            for parent, name, body in self._parents
        ]
        if readout is not None:
            others.append((gates.lm_head, "forward", _mine(readout, gates.lm_head.forward)))
        with gates.lock:
            for module, name, other in others:
                gates.shadows.put(module.__dict__, name, other)
            current = gates.current
            outer, current.unembeds = current.unembeds, True
            try:
                tail = self.causal_lm.forward(
                    inputs_embeds=normed, use_cache=False, return_dict=True
                )
            finally:
                current.unembeds = outer
                gates.shadows.undo(len(others))
        return tail.logits.to(device)


def _mine(mine: Forward, others: Forward) -> Forward:
    """`mine` in this thread, `others` in every other thread."""
    owner = threading.get_ident()

    def either(*args: object, **kwargs: object) -> object:
        return (mine if threading.get_ident() == owner else others)(*args, **kwargs)

    return either


def call_layer(
    layer: nn.Module,
    index: int,
    hidden: Tensor,
    args: tuple[object, ...],
    kwargs: Options,
) -> Any:
    """Call a layer as it is."""
    return layer(hidden, *args, **kwargs)


def run_layers(
    calls: Iterable[LayerCall],
    hidden: Tensor,
    keep: Sequence[int],
    kept: dict[int, Tensor],
    call: CallLayer = call_layer,
) -> Tensor:
    """Run layers one after the other: the loop that every pass of a model goes through.

    Args:
        calls: the layers, and what each is called with.
        hidden: `[rows, width, hidden]` input of the first.
        keep: indices of layers whose inputs to keep.
        kept: takes the kept inputs, by the index of the layer.
        call: calls a layer: as it is, compiled, or without some of its sublayers.

    Returns:
        `[rows, width, hidden]` output of the last.
    """
    for index, layer, args, kwargs in calls:
        if index in keep:
            kept[index] = hidden
        output = call(layer, index, hidden, args, kwargs)
        hidden = output[0] if isinstance(output, tuple) else output
    return hidden


class Runner:
    """Runs passes: the model's own code with gates in it, and the layers that these record.

    Args:
        causal_lm: the model.
        base: its body, which owns the layers.
        layers_name: their name in it.
        layers: the decoder layers.
        windows: sliding window of each, or `None`.
        kernels: how layers are computed.

    Attributes:
        gates: the model's gates.
        tail: maps the body's output to logits.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        base: nn.Module,
        layers_name: str,
        layers: nn.ModuleList,
        windows: Sequence[int | None],
        kernels: Kernels,
    ):
        self.base = base
        self.gates = Gates(causal_lm, base, layers_name, layers, windows, self._run_span, kernels)
        self.tail = LogitsTail(causal_lm, base, self.gates)
        compiled = self.gates.compiled
        self._call: CallLayer = call_layer if compiled is None else compiled

    def run(self, active: ActivePass, inputs: dict[str, object], unembed: bool) -> Pass:
        """Run a pass.

        Args:
            active: the pass.
            inputs: what the body is called with.
            unembed: whether to compute logits.
        """
        gates = self.gates
        ends = active.span.stop == gates.depth and active.own is None
        active.normed = unembed or ends
        with gates.opening_masks(active) if gates.own_masks else nullcontext():
            try:
                if gates.hands_on is None:
                    return self._run_watched(active, inputs, unembed)
                active.one_by_one = not gates.hands_on
                return self._run_once(active, inputs, unembed)
            except BodyError:  # for other inputs the body did nothing between its layers
                again = replace(active, one_by_one=True, calls=[], kept={}, result=None)
                return self._run_once(again, inputs, unembed)
            finally:
                gates.current.active = None

    def run_around(self, active: ActivePass, inputs: Options, slots: Cache) -> Pass:
        """Run a pass over all layers of a prompt with images.

        Args:
            active: the pass, with `ends`.
            inputs: what the causal LM is called with, but for the cache.
            slots: the KV cache.
        """
        gates, body_watch = self.gates, BodyWatch()
        # The body may add features of images between its layers, which says nothing about text.
        active.one_by_one, active.body_watch = True, body_watch if gates.hands_on is None else None
        gates.current.active = active
        try:
            cache = {cache_name(type(self.tail.causal_lm).forward): slots}
            logits = self.tail.run({**inputs, **cache})
        finally:
            gates.current.active = None
        if active.body_watch is not None and body_watch.hands_on:
            gates.hands_on = True
        assert active.body_output is not None
        return active.done(active.body_output, logits)

    def _run_watched(self, active: ActivePass, inputs: dict[str, object], unembed: bool) -> Pass:
        """Run one of the first passes, and learn what the body does between its layers."""
        gates, body_watch = self.gates, BodyWatch()
        active.one_by_one, active.body_watch = True, body_watch
        result = self._run_once(active, inputs, unembed)
        if active.span == (0, gates.depth) and active.own is None:
            gates.hands_on = body_watch.hands_on
            if gates.graphs is not None and not body_watch.hands_on:
                body = type(self.base).__name__
                gates.graphs.give_up(f"{body} does more than call them one by one")
        return result

    def _run_once(self, active: ActivePass, inputs: dict[str, object], unembed: bool) -> Pass:
        """The pass through the model's own code."""
        gates, tail = self.gates, self.tail
        gates.current.active, logits = active, None
        active.body_only = not (unembed and tail.takes_all(inputs))
        try:
            if active.body_only and not tail.prepares(inputs):
                gates.body(**inputs)
            else:
                logits = tail.run(inputs)
        except BodyDone:
            active.body_only = False
        normed = active.body_output
        assert normed is not None
        if not unembed:
            return active.done(normed)
        if logits is None:
            logits = tail.unembed(normed, None)
        return active.done(logits) if active.ends is None else active.done(normed, logits)

    def _run_span(self, active: ActivePass, handed: Tensor) -> Tensor:
        """Run the layers that the gates have recorded, and a head's own in place of the last."""
        calls, active.calls = active.calls, []
        hidden, (start, stop), own = handed, active.span, active.own
        if active.hidden is not None and calls and calls[0].layer_index == start:
            hidden = active.hidden
        replaced = calls.pop() if own and calls and calls[-1].layer_index == stop - 1 else None
        began = time.perf_counter()
        hidden = self.run_calls(active, calls, hidden, active.keep)
        active.layer_seconds += time.perf_counter() - began
        if own and replaced:
            if replaced.layer_index in active.keep:
                active.kept[replaced.layer_index] = hidden
            hidden = self._run_own(active, own, own.in_place_of(replaced), hidden)
        if stop in active.keep:
            active.kept[stop] = hidden
        active.result = hidden
        return hidden

    def run_alone(self, active: ActivePass, own: OwnLayer, call: LayerCall, hidden: Tensor) -> Pass:
        """Run a head's own layer without the model's body."""
        active.result = self._run_own(active, own, call, hidden)
        return active.done(active.result)

    def _run_own(
        self, active: ActivePass, own: OwnLayer, call: LayerCall, hidden: Tensor
    ) -> Tensor:
        began = time.perf_counter()
        entered = hidden if own.enter is None else own.enter(hidden)
        if own.depth == 1:
            output = self.run_calls(active, [call], entered, ())
        else:  # recorded and compiled layers have keys and values of one layer each
            output = run_layers([call], entered, (), active.kept)
        active.head_seconds += time.perf_counter() - began
        return output

    def run_calls(
        self, active: ActivePass, calls: Sequence[LayerCall], hidden: Tensor, keep: Sequence[int]
    ) -> Tensor:
        """Run consecutive layers: by a recorded graph if there is one, else in the loop.

        Args:
            active: the pass, which takes the kept states.
            calls: the layers, and what each is called with.
            hidden: `[rows, width, hidden]` input of the first.
            keep: indices of layers whose inputs to keep.
        """
        graphs = self.gates.graphs
        if graphs is not None and active.skips is None and not active.one_by_one:
            output = graphs.run(run_layers, active, calls, hidden, keep)
            if output is not None:
                return output
        return run_layers(calls, hidden, keep, active.kept, self._caller(active))

    def _caller(self, active: ActivePass) -> CallLayer:
        if active.skips is not None:
            return partial(self._call_in_part, active.skips)
        return self._call if active.body_watch is None else self._call_first

    def _call_first(
        self,
        layer: nn.Module,
        index: int,
        hidden: Tensor,
        args: tuple[object, ...],
        kwargs: Options,
    ) -> Any:
        """Call a layer in one of the first passes, and learn what layers return."""
        output = self._call(layer, index, hidden, args, kwargs)
        self.gates.returned_values = len(output) if isinstance(output, tuple) else 0
        return output

    def _call_in_part(
        self,
        skips: Skips,
        layer: nn.Module,
        index: int,
        hidden: Tensor,
        args: tuple[object, ...],
        kwargs: Options,
    ) -> Any:
        """Call a layer without its skipped sublayers."""
        if index in skips.layers:
            return hidden
        skipped = self.gates.sublayers.skipped(index, skips)
        if not skipped:
            return self._call(layer, index, hidden, args, kwargs)
        with self.gates.skipping(layer, skipped):
            return layer(hidden, *args, **kwargs)


def _device_of_inputs(inputs: Options) -> torch.device:
    given = inputs.get("input_ids")
    return (inputs["inputs_embeds"] if given is None else given).device
