"""Runs any span of decoder layers of any Hugging Face causal language model.

While a decoder is entered, the model's body iterates over gates instead of its layers: a gate
outside the span hands its input through, the first one of the span may start from a stored hidden
state, and what the span leaves (the residual stream before the final norm) is kept. The model's
own `forward` still makes embeddings, positions and rotary tables, so nothing of a family's
modelling code is copied, and a layer with all that hangs on it (adapters, quantized weights, hooks,
device placement) is called as it is. Outside `with decoder:` the model is exactly what it was.

This is the only file that knows transformers' layer API.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import ModelOutput

from selfspec.slots import SlotCache, Window

# One model may have several wrappers; only one at a time may have its gates in.
_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_NOTHING = object()


class Span(NamedTuple):
    """Layers `start` to `stop - 1`."""

    start: int
    stop: int


class Pass(NamedTuple):
    """What a pass over a span leaves.

    Attributes:
        hidden: `[rows, width, hidden]` residual stream after the span's last layer.
        output: `[rows, width, hidden]` the same after the model's final norm, or
            `[rows, width, vocab]` logits when the pass went through the LM head as well.
        layer_seconds: wall time inside the span's layers.
        head_seconds: wall time inside the LM head.
    """

    hidden: Tensor
    output: Tensor
    layer_seconds: float
    head_seconds: float


@dataclass
class _Gating:
    """The active pass, as the gates see it."""

    span: Span
    hidden: Tensor | None
    masks: dict[int | None, Tensor]
    add_masks: bool
    result: Tensor | None = None
    layer_seconds: float = 0.0
    head_seconds: float = 0.0


class Decoder:
    """A causal language model whose layers can be run in spans.

    Args:
        model: any decoder-only causal LM of transformers, PEFT-wrapped or not.

    Raises:
        TypeError: `model` is no transformers model.
        ValueError: the model cannot be run in spans; the message says why.
    """

    def __init__(self, model: nn.Module):
        self.causal_lm = _unwrap(model)
        self.config = self.causal_lm.config.get_text_config(decoder=True)
        refuse_unsupported(self.causal_lm)
        found = _find_layers(self.causal_lm, self.config.num_hidden_layers)
        self.base, self._layers_name, self.layers = found
        self.windows = _windows(self.config, len(self.layers))
        self._takes = set(inspect.signature(self.base.forward).parameters)
        self._tail_takes = set(inspect.signature(self.causal_lm.forward).parameters)
        # These size their position bias from a 2-D mask and refuse a 4-D one.
        self._alibi = self.config.model_type == "bloom" or getattr(self.config, "alibi", False)
        self._own_masks = [m for m in self.layers.modules() if _has_causal_buffer(m)]
        self._returns_tuple: bool | None = None
        self._output_class: type[ModelOutput] = BaseModelOutputWithPast
        self._gating: _Gating | None = None
        self._lock = _LOCKS.setdefault(self.causal_lm, threading.RLock())
        self._owner: int | None = None
        self._entered = 0
        self._shadows: list[tuple[dict[str, Any], str, Any]] = []

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
    def max_positions(self) -> int | None:
        """Positions that the model was made for; `None` where its config names none."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def learned_positions(self) -> int | None:
        """Rows of the table of learned positions; `None` for models without one."""
        words = self.causal_lm.get_input_embeddings()
        tables = [m for m in self.base.children() if isinstance(m, nn.Embedding) and m is not words]
        return self.max_positions if tables else None

    @property
    def final_norm(self) -> nn.Module:
        """The norm between the last layer and the LM head.

        Raises:
            ValueError: the model has none.
        """
        norms = [m for m in self.base.children() if "norm" in type(m).__name__.lower()]
        if not norms:
            name = type(self.causal_lm).__name__
            raise ValueError(f"{name} has no final norm to start a lens from")
        return norms[-1]

    def new_slots(self, rows: int, capacity: int = 0) -> SlotCache:
        """An empty KV cache for `rows` rows."""
        return SlotCache(self.windows, rows, capacity, self.device)

    # Gates

    def __enter__(self) -> Decoder:
        """Put the gates in; another thread that enters waits."""
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._entered += 1
        if self._entered == 1:
            # An instance attribute shadows the registered ModuleList without touching it.
            gates = [_Gate(self, index, layer) for index, layer in enumerate(self.layers)]
            self._shadow(self.base.__dict__, self._layers_name, gates)
            head = self.lm_head
            self._shadow(head.__dict__, "forward", self._timed_head(head.forward))
            for module in self._own_masks:
                # Slots carry the whole mask; the module's own table assumes keys end at the query.
                table = module._buffers["bias"]
                assert table is not None
                everything = torch.ones_like(table[..., :1, :1]).expand_as(table)
                self._shadow(module._buffers, "bias", everything)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take the gates out, whatever happened."""
        self._entered -= 1
        while self._shadows and self._entered == 0:
            self._unshadow()
        self._lock.release()

    def _shadow(self, attributes: dict[str, Any], name: str, value: Any) -> None:
        # Something may be there already: device hooks, and outer calls of another wrapper.
        self._shadows.append((attributes, name, attributes.get(name, _NOTHING)))
        attributes[name] = value

    def _unshadow(self) -> None:
        attributes, name, held = self._shadows.pop()
        if held is _NOTHING:
            del attributes[name]
        else:
            attributes[name] = held

    def _timed_head(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            output = forward(*args, **kwargs)
            if self._gating is not None:
                self._gating.head_seconds += time.perf_counter() - began
            return output

        return timed

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
            masks = self._masks(slots, window)
            gating = _Gating(span, hidden, masks, self._alibi)
            if span.start > 0 and self._returns_tuple is None:
                raise RuntimeError("run the layers below a span once before resuming above them")
            self._gating = gating
            inputs = self._inputs(tokens, slots, window.positions, masks)
            through_tail = unembed and inputs.keys() <= self._tail_takes
            try:
                result = self._run_tail(inputs) if through_tail else self._run_body(inputs)
                if unembed and not through_tail:
                    result = self.unembed(result)
            finally:
                self._gating = None
        assert gating.result is not None
        return Pass(gating.result, result, gating.layer_seconds, gating.head_seconds)

    def _run_body(self, inputs: dict[str, Any]) -> Tensor:
        output = self.base(**inputs)
        self._output_class = type(output)
        return output[0]

    def _run_tail(self, inputs: dict[str, Any]) -> Tensor:
        if "output_router_logits" in self._tail_takes:
            inputs["output_router_logits"] = False
        return self.causal_lm(**inputs).logits

    def _masks(self, slots: SlotCache, window: Window) -> dict[int | None, Tensor]:
        # A prefill from nothing is causal in every row, and one token of rows of equal length sees
        # all there is: the family's own mask is right then, and may be none at all. Anywhere else
        # masks come from the rows' lengths.
        fresh = not any(window.starts)
        if (fresh or (window.uniform and window.width == 1)) and not self._own_masks:
            return {}
        return {window: slots.mask(window, self.dtype) for window in {None, *self.windows}}

    def _inputs(
        self, tokens: Tensor, slots: SlotCache, positions: Tensor, masks: dict[int | None, Tensor]
    ) -> dict[str, Any]:
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            "past_key_values": slots,
            "use_cache": True,
            "return_dict": True,
        }
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
        with self._lock:
            self._shadow(self.base.__dict__, "forward", self._stub(normed, self.base.forward))
            try:
                tail = self.causal_lm(inputs_embeds=normed, use_cache=False, return_dict=True)
            finally:
                self._unshadow()
        return tail.logits

    def _stub(self, normed: Tensor, forward: Callable[..., Any]) -> Callable[..., Any]:
        owner = threading.get_ident()
        output = self._output_class(last_hidden_state=normed)  # pyright: ignore[reportCallIssue]

        def stub(*args: Any, **kwargs: Any) -> Any:
            return output if threading.get_ident() == owner else forward(*args, **kwargs)

        return stub


class _Gate:
    """Stands in for a decoder layer while its decoder is entered."""

    def __init__(self, decoder: Decoder, index: int, layer: nn.Module):
        self.decoder = decoder
        self.index = index
        self.layer = layer
        self.window = decoder.windows[index]

    def __getattr__(self, name: str) -> Any:
        # The body may ask a layer for its type.
        return getattr(self.layer, name)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        decoder = self.decoder
        gating = decoder._gating
        if gating is None or decoder._owner != threading.get_ident():
            # Plain use of the model, from a streamer or from another thread.
            return self.layer(hidden_states, *args, **kwargs)
        start, stop = gating.span
        if self.index == stop:
            gating.result = hidden_states
        if not start <= self.index < stop:
            return (hidden_states,) if decoder._returns_tuple else hidden_states
        if self.index == start and gating.hidden is not None:
            hidden_states = gating.hidden
        if gating.masks:
            args, kwargs = _with_mask(args, kwargs, gating, self.window)
        began = time.perf_counter()
        output = self.layer(hidden_states, *args, **kwargs)
        gating.layer_seconds += time.perf_counter() - began
        decoder._returns_tuple = isinstance(output, tuple)
        if stop == decoder.depth and self.index == stop - 1:
            gating.result = output[0] if isinstance(output, tuple) else output
        return output


def _with_mask(
    args: tuple[Any, ...], kwargs: dict[str, Any], gating: _Gating, window: int | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The layer's arguments with the slots' mask for its window."""
    mask, full = gating.masks[window], gating.masks[None]
    if gating.add_masks:
        kwargs = dict(kwargs)
        kwargs["attention_mask"] = _added(kwargs.get("attention_mask"), mask)
        return args, kwargs
    if mask is full:
        return args, kwargs
    args = tuple(mask if arg is full else arg for arg in args)
    return args, {name: mask if arg is full else arg for name, arg in kwargs.items()}


def _added(own: Tensor | None, mask: Tensor) -> Tensor:
    """The family's own mask, which carries its position bias, with the slots' mask on top."""
    if own is None or own.dtype == torch.bool:
        return mask
    return torch.where(mask < 0, mask, own.to(mask.dtype))


def _unwrap(model: nn.Module) -> PreTrainedModel:
    inner = model
    if hasattr(model, "peft_config"):
        configs: dict[str, Any] = model.peft_config  # pyright: ignore[reportAssignmentType]
        config = next(iter(configs.values()))
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"a PEFT model of type {config.peft_type} adds virtual tokens, which a span of "
                "layers cannot see; use an adapter inside the layers (LoRA), or merge it"
            )
        if hasattr(model, "get_base_model"):
            inner = model.get_base_model()  # pyright: ignore[reportCallIssue]
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    return inner


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise ValueError, with the reason, for a model that cannot draft for itself."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    attention = getattr(config, "_attn_implementation", "eager")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder; selfspec runs decoder-only causal LMs")
    if model.get_output_embeddings() is None or not model.can_generate():
        raise ValueError(f"{name} has no LM head; load the model with AutoModelForCausalLM")
    if model._is_stateful or not hasattr(config, "num_hidden_layers"):
        raise ValueError(
            f"{name} keeps a recurrent state, which cannot take rejected tokens back; "
            "selfspec runs models whose layers attend to a KV cache"
        )
    if attention not in ("sdpa", "eager"):
        raise ValueError(
            f"{name} uses attention {attention!r}, which takes no mask per row; "
            "load it with attn_implementation='sdpa' (or 'eager')"
        )
    kinds = {type(layer).__name__ for layer in DynamicCache(config=config).layers}
    strange = kinds - {"DynamicLayer", "DynamicSlidingWindowLayer"}
    chunked = getattr(config, "attention_chunk_size", None) is not None
    if strange or chunked:
        what = "attends in chunks" if chunked else f"caches {', '.join(sorted(strange))}"
        raise ValueError(
            f"{name} {what}; selfspec runs models whose every layer has full or "
            "sliding-window attention over a KV cache of its own"
        )


def _find_layers(model: nn.Module, count: int) -> tuple[nn.Module, str, nn.ModuleList]:
    """The module that owns the decoder layers (the model's body), their name in it, and they."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, name, child
    raise ValueError(
        f"{type(model).__name__} has no ModuleList of num_hidden_layers = {count} layers; "
        "selfspec cannot tell its decoder layers"
    )


def _windows(config: Any, depth: int) -> list[int | None]:
    """Per layer, the sliding window in tokens, or None."""
    if config.model_type == "gpt_neo":
        local = [kind == "local" for kind in config.attention_layers]
        return [config.window_size if is_local else None for is_local in local]
    layers = DynamicCache(config=config).layers
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    return windows or [None] * depth


def _has_causal_buffer(module: nn.Module) -> bool:
    """Whether an attention module masks by a table of its own (GPT-Neo)."""
    table = module._buffers.get("bias")
    return table is not None and table.dtype == torch.bool and table.ndim == 4
