"""Runs any span of decoder layers of a causal language model."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from selfspec.decoder.gates import ActivePass, Gates, Span
from selfspec.decoder.support import find_layers, layer_windows, refuse_unsupported, unwrap
from selfspec.slots import SlotCache, Window


class Pass(NamedTuple):
    """What a pass over a span leaves.

    Attributes:
        hidden: `[rows, width, hidden]` residual stream after the span's last layer.
        output: `[rows, width, hidden]` the same after the model's final norm, or
            `[rows, width, vocab]` logits when the pass went through the LM head as well.
        layer_seconds: wall time inside the span's layers.
        head_seconds: wall time inside the final norm and the LM head.
    """

    hidden: Tensor
    output: Tensor
    layer_seconds: float
    head_seconds: float


class Decoder:
    """A causal language model whose layers can be run in spans.

    Args:
        model: any decoder-only causal LM of transformers, PEFT-wrapped or not.

    Attributes:
        causal_lm: the transformers model inside.
        base: its body, which owns the layers.
        layers: the decoder layers.
        windows: per layer, the sliding window in tokens, or `None`.
        max_positions: positions that the model was made for; `None` where its config names none.
        learned_positions: rows of the table of learned positions; `None` without such a table.

    Raises:
        TypeError: `model` is no transformers model.
        ValueError: the model cannot be run in spans; the message says why.
    """

    def __init__(self, model: nn.Module):
        self.causal_lm = unwrap(model)
        self.config = self.causal_lm.config.get_text_config(decoder=True)
        refuse_unsupported(self.causal_lm)
        self.base, name, self.layers = find_layers(self.causal_lm, self.config.num_hidden_layers)
        self.windows = layer_windows(self.config, len(self.layers))
        self._mask_kinds = {None, *self.windows}
        self.gates = Gates(self.causal_lm, self.base, name, self.layers, self.windows)
        self._takes = set(inspect.signature(type(self.base).forward).parameters)
        self._tail_takes = set(inspect.signature(type(self.causal_lm).forward).parameters)
        # These size their position bias from a 2-D mask and refuse a 4-D one.
        self._alibi = self.config.model_type == "bloom" or getattr(self.config, "alibi", False)
        self.max_positions: int | None = getattr(self.config, "max_position_embeddings", None)
        words = self.causal_lm.get_input_embeddings()
        tables = [m for m in self.base.children() if isinstance(m, nn.Embedding) and m is not words]
        self.learned_positions = self.max_positions if tables else None
        self._output_class: type[Any] = BaseModelOutputWithPast

    @property
    def depth(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def device(self) -> torch.device:
        """Device of the embeddings, where tokens go in."""
        return next(self.causal_lm.get_input_embeddings().parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the residual stream."""
        return self.causal_lm.dtype

    @property
    def vocab_size(self) -> int:
        """Rows of the LM head."""
        return self.config.vocab_size

    @property
    def lm_head(self) -> nn.Module:
        """The module that turns final-norm outputs into logits."""
        head = self.causal_lm.get_output_embeddings()
        assert head is not None
        return head

    @property
    def final_norm(self) -> nn.Module:
        """The norm between the last layer and the LM head.

        Raises:
            ValueError: the model has none.
        """
        norm = self.gates.final_norm
        if norm is None:
            name = type(self.causal_lm).__name__
            raise ValueError(f"{name} has no final norm to start a lens from")
        return norm

    def new_slots(self, rows: int, capacity: int = 0) -> SlotCache:
        """An empty KV cache for `rows` rows."""
        return SlotCache(self.windows, rows, capacity, self.device)

    def __enter__(self) -> Decoder:
        """Put the gates in; passes inside a `with decoder:` do not have to."""
        self.gates.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Take the gates out, whatever happened."""
        self.gates.__exit__(*error)

    # Passes

    def run(
        self,
        tokens: Tensor,
        span: Span,
        slots: SlotCache,
        hidden: Tensor | None = None,
        offset: int = 0,
        unembed: bool = False,
    ) -> Pass:
        """Run `span` over `tokens`, writing its KV behind each row's settled tokens.

        Args:
            tokens: `[rows, width]` token ids.
            span: the layers to run.
            slots: the KV cache.
            hidden: `[rows, width, hidden]` residual stream to resume from; needed when the span
                does not start at layer 0.
            offset: distance of the first token from the settled ones.
            unembed: whether to go on through the model's own norm and LM head, to logits.
        """
        if span.start > 0 and hidden is None:
            raise ValueError(f"a span from layer {span.start} needs the hidden states below it")
        with self, slots.writing(tokens.shape[1], offset) as window:
            masks = self._masks(slots, window, hidden)
            active = ActivePass(span, window, hidden, masks, self._alibi)
            if span.start > 0 and self.gates.returns_tuple is None:
                raise RuntimeError("run the layers below a span once before resuming above them")
            self.gates.active = active
            inputs = self._inputs(tokens, slots, window.positions, masks)
            through_tail = unembed and self._tail_takes >= inputs.keys()
            try:
                result = self._run_tail(inputs) if through_tail else self._run_body(inputs)
                if unembed and not through_tail:
                    result = self.unembed(result)
            finally:
                self.gates.active = None
        assert active.result is not None
        return Pass(active.result, result, active.layer_seconds, active.head_seconds)

    def _run_body(self, inputs: dict[str, Any]) -> Tensor:
        output = self.base(**inputs)
        self._output_class = type(output)
        return output[0]

    def _run_tail(self, inputs: dict[str, Any]) -> Tensor:
        if "output_router_logits" in self._tail_takes:
            inputs["output_router_logits"] = False
        return self.causal_lm(**inputs).logits

    def _masks(
        self, slots: SlotCache, window: Window, hidden: Tensor | None
    ) -> dict[int | None, Tensor]:
        # A prefill from nothing is causal in every row, and one token of rows of equal length sees
        # all there is: the family's own mask is right then, and may be none at all. Anywhere else
        # masks come from the rows' lengths.
        fresh = not any(window.starts)
        if (fresh or (window.uniform and window.width == 1)) and not self.gates.own_masks:
            return {}
        dtype = self.dtype if hidden is None else hidden.dtype  # a model looks its own up slowly
        return {kind: slots.mask(kind, dtype) for kind in self._mask_kinds}

    def _inputs(
        self, tokens: Tensor, slots: SlotCache, positions: Tensor, masks: dict[int | None, Tensor]
    ) -> dict[str, Any]:
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            "past_key_values": slots,
            "use_cache": True,
        }
        if "return_dict" in self._takes:
            inputs["return_dict"] = True
        if masks and not self._alibi:
            inputs["attention_mask"] = masks[None]
        if "position_ids" in self._takes:
            # Behind a row's last token a block may reach past a table of learned positions.
            limit = self.learned_positions
            inputs["position_ids"] = positions if limit is None else positions.clamp(max=limit - 1)
        return inputs

    def unembed(self, normed: Tensor) -> Tensor:
        """Logits `[rows, width, vocab]` of final-norm outputs, by the model's own tail.

        The causal LM's `forward` runs with its body stubbed, so scaling and soft-capping of any
        family apply.
        """
        with self.gates.lock:
            self.gates.shadow(self.base.__dict__, "forward", self._stub(normed, self.base.forward))
            try:
                tail = self.causal_lm(inputs_embeds=normed, use_cache=False, return_dict=True)
            finally:
                self.gates.unshadow()
        return tail.logits

    def _stub(self, normed: Tensor, forward: Callable[..., Any]) -> Callable[..., Any]:
        owner = threading.get_ident()
        output = self._output_class(last_hidden_state=normed)

        def stub(*args: Any, **kwargs: Any) -> Any:
            return output if threading.get_ident() == owner else forward(*args, **kwargs)

        return stub
