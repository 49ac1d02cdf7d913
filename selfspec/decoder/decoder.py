"""`Decoder`: runs any span of decoder layers of a causal language model."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from selfspec.config import Kernels, KVCacheDtype
from selfspec.decoder.cache import RoundedCache, SlotCache, StepCache
from selfspec.decoder.devices import bare_copy, device_of
from selfspec.decoder.families import (
    find_layers,
    layer_windows,
    plain_weight,
    refuse_options,
    refuse_unsupported,
    unwrap,
)
from selfspec.decoder.gates import Gates
from selfspec.decoder.masks import Masks, Packing
from selfspec.decoder.passes import MASK, ActivePass, Own, Pass, Skips, Span
from selfspec.decoder.quantized import trainable
from selfspec.decoder.runner import Runner
from selfspec.sampling.draft import Tree


class Inputs:
    """Names that a family's body takes, and values for them.

    Args:
        body: its class.
        learned_positions: rows of its table of learned positions; `None` without such a table.
        takes_masks: whether it takes a mask for every query and key.
    """

    def __init__(self, body: type[nn.Module], learned_positions: int | None, takes_masks: bool):
        self._takes = set(inspect.signature(body.forward).parameters)
        self._limit = learned_positions
        self._takes_masks = takes_masks

    def __call__(
        self,
        tokens: Tensor,
        slots: SlotCache | None,
        positions: Tensor,
        masks: dict[int | None, Tensor],
    ) -> dict[str, Any]:
        """Arguments of the body's `forward`.

        Args:
            tokens: `[rows, width]` token ids.
            slots: the KV cache, if there is one.
            positions: `[rows, width]` of the tokens.
            masks: by sliding window; none where the family's own hold.
        """
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            "past_key_values": slots,
            "use_cache": slots is not None,
        }
        if "return_dict" in self._takes:
            inputs["return_dict"] = True
        if masks and self._takes_masks:
            inputs[MASK] = masks[None]
        if "position_ids" in self._takes:
            # After a row's last token a block may reach past a table of learned positions.
            limit = self._limit
            inputs["position_ids"] = positions if limit is None else positions.clamp(max=limit - 1)
        return inputs


# Runs any span of decoder layers of a causal language model.

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class Decoder:
    """A causal language model whose layers can be run in spans.

    Args:
        model: any decoder-only causal LM of transformers, PEFT-wrapped or not.
        kernels: what computes the layers in passes.
        kv_cache_dtype: what keys and values are kept in.

    Attributes:
        kernels: what computes the layers in passes.
        kv_cache_dtype: what keys and values are kept in.
        causal_lm: the transformers model inside.
        base: its body, which owns the layers.
        layers: the decoder layers.
        depth: number of decoder layers.
        windows: per layer, the sliding window in tokens, or `None`.
        counts_keys: whether attention is biased by the number of a key, wherever its token stands.
        max_positions: positions that the model was made for; `None` where its config names none.
        learned_positions: rows of the table of learned positions; `None` without such a table.

    Raises:
        TypeError: `model` is no transformers model.
        ValueError: the model cannot be run in spans, or there are no such kernels, or no such
            cache; the message says what to do.
    """

    def __init__(
        self,
        model: nn.Module,
        kernels: Kernels = "eager",
        kv_cache_dtype: KVCacheDtype = "auto",
    ):
        refuse_options(kernels, kv_cache_dtype)
        self.kernels: Kernels = kernels
        self.kv_cache_dtype: KVCacheDtype = kv_cache_dtype
        self.causal_lm = unwrap(model)
        self.config = self.causal_lm.config.get_text_config(decoder=True)
        refuse_unsupported(self.causal_lm)
        self.base, name, self.layers = find_layers(self.causal_lm, self.config.num_hidden_layers)
        self.windows = layer_windows(self.config, len(self.layers))
        self.gates = Gates(self.causal_lm, self.base, name, self.layers, self.windows, kernels)
        self.depth = self.gates.depth
        self._runner = Runner(self.causal_lm, self.base, self.gates)
        self._masks = Masks(self.gates, self.windows)
        kind = self.config.model_type
        # These size their position bias from a 2-D mask and refuse a 4-D one.
        self._alibi = kind == "bloom" or getattr(self.config, "alibi", False)
        self.counts_keys = self._alibi or kind == "mpt"
        if self.gates.graphs is not None and self.counts_keys:
            self.gates.graphs.give_up("biases of attention that count keys")
        self.max_positions: int | None = getattr(self.config, "max_position_embeddings", None)
        words = self.causal_lm.get_input_embeddings()
        tables = [m for m in self.base.children() if isinstance(m, nn.Embedding) and m is not words]
        self.learned_positions = self.max_positions if tables else None
        self._inputs = Inputs(type(self.base), self.learned_positions, not self._alibi)

    @property
    def device(self) -> torch.device:
        """Device of the embeddings, where tokens go in and logits come out."""
        return self.device_at(0)

    def device_at(self, layer: int) -> torch.device:
        """Device of the residual stream with `layer` layers below it."""
        return device_of(self.layers[layer - 1] if layer else self.causal_lm.get_input_embeddings())

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
    def lm_head_weight(self) -> Tensor:
        """`[vocab, hidden]` the LM head's matrix, whole.

        Raises:
            ValueError: it is quantized, or has an adapter.
        """
        return plain_weight(self.lm_head, self.vocab_size)

    @property
    def final_norm(self) -> nn.Module | None:
        """The norm between the last layer and the LM head, if there is one."""
        return self.gates.final_norm

    @property
    def leaves(self) -> bool:
        """Whether a pass may go on from a head's own layer to logits: the final norm can be shut.

        Device hooks would bring states where that norm and the LM head are, not where the head is.
        """
        tail = (self.final_norm, self.lm_head)
        return not any(part is None or hasattr(part, "_hf_hook") for part in tail)

    def include(self, *modules: nn.Module) -> None:
        """Count modules of heads among those that run in passes, and that kernels are for."""
        self.gates.others += modules

    def copy_layer(self, index: int) -> nn.Module:
        """A trainable copy of a layer, to be run in its place with KV of its own.

        Raises:
            ValueError: there is no such layer, or its weights are quantized in a way that cannot be
                undone.
        """
        self.check_layer(index)
        return trainable(self.copy(self.layers[index]), self.dtype)

    def check_layer(self, index: int) -> None:
        """Raise ValueError unless there is a layer `index`."""
        if not 0 <= index < self.depth:
            raise ValueError(f"place must be a layer in [0, {self.depth - 1}], got {index}")

    def check_skips(self, skips: Skips) -> None:
        """Raise ValueError where a pass could not skip these sublayers, or would skip them all."""
        self.gates.sublayers.check(skips)

    def copy(self, module: ModuleT) -> ModuleT:
        """A deep copy of one of the target's modules as it is outside of passes, whole, unhooked.

        Raises:
            RuntimeError: the calling thread has the gates in, which would be copied too.
        """
        with self.gates.lock:  # another thread may have them in
            if self.gates.entered:
                raise RuntimeError("build heads outside `with decoder:`, or they copy its gates")
            return bare_copy(module)

    def new_slots(self, rows: int, capacity: int = 0) -> SlotCache:
        """An empty KV cache for `rows` rows."""
        page = 1 if self.gates.graphs is None else self.gates.graphs.page
        return SlotCache(self.windows, rows, capacity, self.device, self.kv_cache_dtype, page)

    def own_cache(self) -> Cache | None:
        """What the model's own `generate` needs as `past_key_values` to round as slots do.

        `None` where they do not.
        """
        return None if self.kv_cache_dtype == "auto" else RoundedCache(config=self.config)

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
        offset: int | Sequence[int] = 0,
        unembed: bool = False,
        keep: Sequence[int] = (),
        own: Own | None = None,
        tree: Tree | None = None,
        skips: Skips | None = None,
    ) -> Pass:
        """Run `span` over `tokens`, writing its KV after each row's committed tokens.

        Args:
            tokens: `[rows, width]` token ids.
            span: the layers to run.
            slots: the KV cache.
            hidden: `[rows, width, hidden]` residual stream to resume from; needed when the span
                does not start at layer 0.
            offset: distance of the first token from the committed ones; one, or one per row.
            unembed: whether to go on through the model's own norm and LM head, to logits.
            keep: residual streams to keep, by the number of layers below.
            own: a head's own layer, in place of the span's last.
            tree: which drafts continue which, when `tokens` are some of a tree's block; `offset`
                is then the place of the first.
            skips: sublayers to leave out, which write no KV (`check_skips`).
        """
        if span.start > 0 and hidden is None:
            raise ValueError(f"a span from layer {span.start} needs the hidden states below it")
        gates = self.gates
        if not gates.entered or gates.owner != threading.get_ident():
            rest = hidden, offset, unembed, keep, own, tree, skips
            with self:
                return Decoder.run(self, tokens, span, slots, *rest)
        window = slots.window(tokens.shape[1], offset, tree)
        outer = slots.turn(window, {} if own is None else {span.stop - 1: own.added})
        try:
            masks = self._masks.of_slots(slots, window, hidden, added=own is not None)
            if (span.start > 0 or skips is not None) and gates.returns_tuple is None:
                raise RuntimeError("run all layers once before a pass that leaves some of them out")
            active = ActivePass(span, window, hidden, masks, self._alibi, tuple(keep), own)
            active.skips = skips
            inputs = self._inputs(tokens, slots, window.positions, masks)
            return self._runner.run(active, inputs, unembed)
        finally:
            slots.turn(*outer)

    def run_packed(
        self,
        tokens: Tensor,
        span: Span,
        packing: Packing,
        hidden: Tensor | None = None,
        keep: Sequence[int] = (),
        own: Own | None = None,
        memory: StepCache | None = None,
        step: int = 0,
    ) -> Pass:
        """Run `span` over packed text, without KV that stays; gradients flow.

        Args:
            tokens: `[rows, width]` token ids.
            span: the layers to run.
            packing: which tokens belong together.
            hidden: `[rows, width, hidden]` residual stream to start from.
            keep: residual streams to keep, by the number of layers below.
            own: a head's own layer, in place of the span's last.
            memory: states of earlier readings of the same text by that layer.
            step: number of earlier readings.
        """
        with self:
            masks = self._masks.of_packing(packing, hidden, step)
            active = ActivePass(span, None, hidden, masks, self._alibi, tuple(keep), own)
            inputs = self._inputs(tokens, memory, packing.positions, masks)
            return self._runner.run(active, inputs, unembed=False)

    def check_trees(self) -> None:
        """Raise ValueError where a pass over a tree would put drafts in the wrong positions."""
        if self.counts_keys:
            raise ValueError(
                f"{type(self.causal_lm).__name__} biases attention by the number of a key, so "
                "siblings cannot stand at one position; use a drafter that makes chains"
            )

    def unembed(self, normed: Tensor, readout: nn.Module | None = None) -> Tensor:
        """Logits `[rows, width, vocab]` of final-norm outputs, by the model's own tail.

        Args:
            normed: `[rows, width, hidden]` inputs of the LM head.
            readout: what stands in for the LM head.
        """
        return self._runner.tail.unembed(normed, readout).to(self.device)


# Several models at once in the hands of one thread.


@contextmanager
def held(*decoders: Decoder) -> Iterator[None]:
    """Put the gates of several models in, for this thread alone.

    Models are always taken in the same order: threads of which one drafts with the model that the
    other one writes with would wait for each other for ever.
    """
    with ExitStack() as stack:
        for decoder in sorted(decoders, key=lambda decoder: id(decoder.gates.lock)):
            stack.enter_context(decoder)
        yield
