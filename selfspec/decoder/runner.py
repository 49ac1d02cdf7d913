"""Runs one pass: along its route if there is one, otherwise through the model's own code."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from selfspec.decoder.cache import WIDEST
from selfspec.decoder.devices import device_of
from selfspec.decoder.gates import Gates
from selfspec.decoder.passes import ActivePass, Pass
from selfspec.decoder.route import Route, Snapshot, Survey


class Tail:
    """The causal LM's `forward` after its body.

    Args:
        causal_lm: the model.
        base: its body.
        gates: the model's gates.

    Attributes:
        takes: names of what the causal LM's `forward` takes.
        output_class: what the body returns.
    """

    def __init__(self, causal_lm: PreTrainedModel, base: nn.Module, gates: Gates):
        self.causal_lm, self.base, self.gates = causal_lm, base, gates
        self.takes = set(inspect.signature(type(causal_lm).forward).parameters)
        self.output_class: type[Any] = BaseModelOutputWithPast

    def run(self, inputs: dict[str, Any]) -> Tensor:
        """Logits of a pass through body and tail, where its tokens are."""
        if "output_router_logits" in self.takes:
            inputs["output_router_logits"] = False
        return self.causal_lm(**inputs).logits.to(inputs["input_ids"].device)

    def unembed(self, normed: Tensor, readout: nn.Module | None) -> Tensor:
        """Logits `[rows, width, vocab]` of `normed`; the body is stubbed, and maybe the LM head."""
        gates, base, lm_head = self.gates, self.base, self.causal_lm.get_output_embeddings()
        assert lm_head is not None  # a model without is refused
        # Device hooks are not asked where something stands in for what they hang on.
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
    """Something for this thread alone; others that use the model get what they expect."""
    owner = threading.get_ident()

    def either(*args: Any, **kwargs: Any) -> Any:
        return (mine if threading.get_ident() == owner else others)(*args, **kwargs)

    return either


# One pass through a model: along its route where there is one, else through its own code.


class Runner:
    """Runs passes.

    Args:
        causal_lm: the model.
        base: its body, which owns the layers.
        gates: the model's gates.

    Attributes:
        tail: from the body's output to logits.
        routes: what a pass comes down to, by whether it has masks, is normed, and goes on to
            logits; `None` where only the model's own code will do. Routes hold from call to call
            while the model is what it was when they were found (`Snapshot`).
    """

    def __init__(self, causal_lm: PreTrainedModel, base: nn.Module, gates: Gates):
        self.base, self.gates = base, gates
        self.tail = Tail(causal_lm, base, gates)
        self.routes: dict[tuple[bool, ...], Route | None] = {}
        self._surveyed: Snapshot | None = None

    def begin(self) -> None:
        """Gates have been put in: keep the routes that hold, and look for others anew."""
        found = [(key, route) for key, route in self.routes.items() if route is not None]
        self.routes.clear()
        if found and self._snapshot() == self._surveyed:
            self.routes.update(found)
            for _, route in found:
                route.begin()

    def _snapshot(self) -> Snapshot:
        model = self.tail.causal_lm
        return Snapshot(
            self.gates.path, [model.get_input_embeddings(), model.get_output_embeddings()]
        )

    def _keep(self, key: tuple[bool, ...], route: Route | None) -> None:
        """Keep what a survey found."""
        found = self._snapshot()
        if found != self._surveyed:
            self.routes.clear()
        self.routes[key], self._surveyed = route, found

    def run(
        self, active: ActivePass, inputs: dict[str, Any], unembed: bool, routed: bool = False
    ) -> Pass:
        """Run a pass.

        Args:
            active: the pass.
            inputs: what the body is called with.
            unembed: whether to go on to logits.
            routed: whether a route of such a pass would hold for this one. The first that may have
                one is surveyed, if it is over few tokens: a survey keeps copies of their states.
        """
        gates = self.gates
        ends = active.span.stop == gates.depth and active.own is None
        active.normed = unembed or ends
        key = bool(active.masks), active.normed, unembed
        route = self.routes.get(key) if routed else None
        if gates.own_masks:
            gates.open_masks(active)
        gates.active = active
        try:
            if route is not None:
                result = route.run(active, inputs)
            elif routed and key not in self.routes and _is_narrow(active):
                with Survey(gates, inputs) as survey:
                    result = self._run_whole(active, inputs, unembed)
                self._keep(key, survey.route(result))
            else:
                result = self._run_whole(active, inputs, unembed)
        finally:
            gates.active = None
            if gates.own_masks:
                gates.close_masks()
        return active.done(result)

    def _run_whole(self, active: ActivePass, inputs: dict[str, Any], unembed: bool) -> Tensor:
        """The pass through the model's own code."""
        if unembed and self.tail.takes >= inputs.keys():
            return self.tail.run(inputs)
        output = self.base(**inputs)
        self.tail.output_class = type(output)
        if not unembed:
            return output[0]
        logits = self.tail.unembed(output[0], None)  # the LM head's gate knows what an `own` reads
        return logits.to(inputs["input_ids"].device)


def _is_narrow(active: ActivePass) -> bool:
    return active.window is not None and active.window.width <= WIDEST
