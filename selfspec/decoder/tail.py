"""From a body's output to logits, by the model's own code: what scales or caps them applies."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from selfspec.decoder.devices import device_of
from selfspec.decoder.gates import Gates


class Tail:
    """The causal LM's `forward` behind its body.

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
