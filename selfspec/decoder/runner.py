"""Runs one pass through the model's own code, and goes on to logits."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from selfspec.decoder.devices import device_of
from selfspec.decoder.gates import BodyError, Gates
from selfspec.decoder.kernels.graphs import GraphedLayers, are_equal
from selfspec.decoder.passes import ActivePass, Pass, Stretch


class Tail:
    """The part of the causal LM's `forward` after its body.

    Args:
        causal_lm: the model.
        base: its body.
        gates: the model's gates.

    Attributes:
        takes: parameter names of the causal LM's `forward`.
        output_class: the body's output class.
    """

    def __init__(self, causal_lm: PreTrainedModel, base: nn.Module, gates: Gates):
        self.causal_lm, self.base, self.gates = causal_lm, base, gates
        self.takes = set(inspect.signature(type(causal_lm).forward).parameters)
        self.output_class: type[Any] = BaseModelOutputWithPast

    def run(self, inputs: dict[str, Any]) -> Tensor:
        """Logits of a pass through body and tail, on the tokens' device."""
        if "output_router_logits" in self.takes:
            inputs["output_router_logits"] = False
        return self.causal_lm(**inputs).logits.to(_device_of_inputs(inputs))

    def unembed(self, normed: Tensor, readout: nn.Module | None) -> Tensor:
        """Logits `[rows, width, vocab]` of `normed`, with the body (and the LM head) replaced."""
        gates, base, lm_head = self.gates, self.base, self.causal_lm.get_output_embeddings()
        assert lm_head is not None  # a model without is refused
        # A replaced module's device hooks do not run, so the states are moved here.
        normed = normed.to(device_of(lm_head if readout is None else readout))
        output = self.output_class(last_hidden_state=normed)
        others = [(base, lambda *args, **kwargs: output)]
        if readout is not None:
            others.append((lm_head, readout))
        with gates.lock:
            for module, other in others:
                gates.shadow(module.__dict__, "forward", _mine(other, module.forward))
            try:
                tail = self.causal_lm(inputs_embeds=normed, use_cache=False, return_dict=True)
            finally:
                for _ in others:
                    gates.unshadow()
        return tail.logits


def _mine(mine: Callable[..., Any], others: Callable[..., Any]) -> Callable[..., Any]:
    """`mine` in this thread, `others` in every other thread."""
    owner = threading.get_ident()

    def either(*args: Any, **kwargs: Any) -> Any:
        return (mine if threading.get_ident() == owner else others)(*args, **kwargs)

    return either


class Runner:
    """Runs passes.

    Args:
        causal_lm: the model.
        base: its body, which owns the layers.
        gates: the model's gates.

    Attributes:
        tail: maps the body's output to logits.
    """

    def __init__(self, causal_lm: PreTrainedModel, base: nn.Module, gates: Gates):
        self.base, self.gates = base, gates
        self.tail = Tail(causal_lm, base, gates)

    def run(self, active: ActivePass, inputs: dict[str, Any], unembed: bool) -> Pass:
        """Run a pass.

        Args:
            active: the pass.
            inputs: what the body is called with.
            unembed: whether to compute logits.
        """
        gates, graphs = self.gates, self.gates.graphs
        ends = active.span.stop == gates.depth and active.own is None
        active.normed = unembed or ends
        if gates.own_masks:
            gates.open_masks(active)
        try:
            if graphs is not None and gates.returned_values is not None and graphs.takes(active):
                return self._run_deferred(graphs, active, inputs, unembed)
            return self._run_once(active, inputs, unembed)
        finally:
            gates.active = None
            if gates.own_masks:
                gates.close_masks()

    def _run_deferred(
        self, graphs: GraphedLayers, active: ActivePass, inputs: dict[str, Any], unembed: bool
    ) -> Pass:
        """Run the layers together, which is right if the body only passes hidden states along.

        The first pass over a span is run again layer by layer, and has to be equal to the bit: a
        body that does more has its layers run one by one from then on.
        """
        again = replace(active, kept={})
        active.stretch = Stretch(active.keep)
        try:
            result = self._run_once(active, inputs, unembed)
        except BodyError:
            result = None
        if result is not None and (active.own is not None or active.span in graphs.checked):
            return result
        expected = self._run_once(again, inputs, unembed)
        if result is not None and _are_equal(result, expected):
            graphs.checked.add(active.span)
        else:
            graphs.give_up(f"{type(self.base).__name__} does more than call them one by one")
        return expected

    def _run_once(self, active: ActivePass, inputs: dict[str, Any], unembed: bool) -> Pass:
        """The pass through the model's own code."""
        self.gates.active = active
        if unembed and self.tail.takes >= inputs.keys():
            return active.done(self.tail.run(inputs))
        output = self.base(**inputs)
        self.tail.output_class = type(output)
        if not unembed:
            return active.done(output[0])
        logits = self.tail.unembed(output[0], None)  # the LM head's gate knows what an `own` reads
        return active.done(logits.to(_device_of_inputs(inputs)))


def _device_of_inputs(inputs: dict[str, Any]) -> torch.device:
    given = inputs.get("input_ids")
    return (inputs["inputs_embeds"] if given is None else given).device


def _are_equal(one: Pass, other: Pass) -> bool:
    left, right = ([each.hidden, each.output, *each.kept] for each in (one, other))
    return are_equal(left, right)
