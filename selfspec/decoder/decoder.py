"""`Decoder`: runs any span of decoder layers of a causal language model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from selfspec.config import Kernels, KVCacheDtype, Options, Precision
from selfspec.decoder.cache import RoundedCache, SlotCache, StepCache, Window
from selfspec.decoder.devices import bare_copy, device_of, weight_of
from selfspec.decoder.families import (
    attention_layers,
    find_layers,
    is_multimodal,
    layer_windows,
    plain_weight,
    prefills_again,
    refuse_body,
    refuse_options,
    refuse_unsupported,
    text_parts,
    unwrap,
)
from selfspec.decoder.kernels.low_precision import Part, copy_bytes, refuse_copies
from selfspec.decoder.kernels.prepacked import choose_kernels, packed_bytes
from selfspec.decoder.packing import Packing
from selfspec.decoder.passes import (
    MASK,
    ActivePass,
    Approximation,
    OwnLayer,
    Pass,
    Skips,
    Span,
    cache_name,
)
from selfspec.decoder.quantized import trainable
from selfspec.decoder.run import Runner
from selfspec.sampling.draft import Tree


class Inputs:
    """Builds the keyword arguments that a family's body takes.

    Args:
        body: the body's class.
        tabled_positions: rows of its table of positions; `None` without such a table.
        takes_masks: whether it takes 4-D masks.
    """

    def __init__(self, body: type[nn.Module], tabled_positions: int | None, takes_masks: bool):
        self._takes = set(inspect.signature(body.forward).parameters)
        self._limit = tabled_positions
        self._takes_masks = takes_masks
        self._cache = cache_name(body.forward)
        self._own_cache = body.__name__ == "MiniMaxModel"

    def __call__(
        self,
        tokens: Tensor,
        slots: SlotCache | None,
        positions: Tensor,
        masks: dict[int | None, Tensor],
        embeds: Tensor | None = None,
    ) -> dict[str, object]:
        """Arguments of the body's `forward`.

        Args:
            tokens: `[rows, width]` token ids.
            slots: the KV cache, if there is one.
            positions: `[rows, width]` of the tokens; `[axes, rows, width]` after images of
                families whose positions have several axes.
            masks: by sliding window; empty where the family's own masks are used.
            embeds: `[rows, width, hidden]` embeddings, in place of the tokens'.
        """
        inputs: dict[str, object] = {
            **({"input_ids": tokens} if embeds is None else {"inputs_embeds": embeds}),
            self._cache: slots,
            # MiniMax refuses other caches than its own if this is set; its layers do not.
            "use_cache": slots is not None and not self._own_cache,
        }
        if "return_dict" in self._takes:
            inputs["return_dict"] = True
        if masks and self._takes_masks:
            inputs[MASK] = masks[None]
        if "position_ids" in self._takes:
            # A padded block may reach past the table of positions.
            limit = self._limit
            inputs["position_ids"] = positions if limit is None else positions.clamp(max=limit - 1)
        return inputs


ModuleT = TypeVar("ModuleT", bound=nn.Module)


class Decoder:
    """A causal language model whose layers can be run in spans.

    Args:
        model: any decoder-only causal LM of transformers, PEFT-wrapped or not.
        kernels: how layers are computed.
        kv_cache_dtype: dtype of the KV cache.

    Attributes:
        requested_kernels: `kernels` as it was given.
        kernels: how layers are computed; never `auto`.
        kv_cache_dtype: dtype of the KV cache.
        causal_lm: the transformers model inside.
        base: its body, which owns the layers.
        layers: the decoder layers.
        depth: number of decoder layers.
        windows: per layer, the sliding window in tokens, or `None`.
        attention_layers: indices of the layers that attend and have no recurrent state.
        recurrent_layers: indices of the layers with a recurrent state.
        is_multimodal: whether the body is the text model of a multimodal one.
        counts_keys: whether attention is biased by the index of a key in the cache (ALiBi), not by
            the position of its token.
        max_positions: positions that the model was made for; `None` where its config names none.
        tabled_positions: rows of the table of positions; `None` without such a table.
        original_length: the length beyond which rotary embeddings change with the largest position
            of a pass (LongRoPE, dynamic NTK); `None` where they do not.
        prefills_again: whether the model's own `generate` computes its cache anew beyond it.

    Raises:
        TypeError: `model` is not a transformers model.
        ValueError: the model cannot be run in spans, or `kernels` or `kv_cache_dtype` is unknown.
    """

    def __init__(
        self,
        model: nn.Module,
        kernels: Kernels = "auto",
        kv_cache_dtype: KVCacheDtype = "auto",
    ):
        refuse_options(kernels, kv_cache_dtype)
        self.kv_cache_dtype: KVCacheDtype = kv_cache_dtype
        self.causal_lm = unwrap(model)
        self.requested_kernels: Kernels = kernels
        self.kernels: Kernels = (
            choose_kernels(*text_parts(self.causal_lm)) if kernels == "auto" else kernels
        )
        self.config = self.causal_lm.config.get_text_config(decoder=True)
        refuse_unsupported(self.causal_lm)
        self.base, name, self.layers = find_layers(self.causal_lm, self.config.num_hidden_layers)
        refuse_body(self.causal_lm, self.base)
        self.windows = layer_windows(self.config, len(self.layers))
        self.attention_layers = attention_layers(self.config, len(self.layers))
        self._runner = Runner(
            self.causal_lm, self.base, name, self.layers, self.windows, self.kernels
        )
        self.gates = self._runner.gates
        self.depth = self.gates.depth
        self.recurrent_layers = [index for _, index in self.gates.mixers.found]
        self._spare: SlotCache | None = None  # the KV cache of the last call
        self.is_multimodal = is_multimodal(self.causal_lm)
        self._kinds = {None, *self.windows}  # of masks: one for each sliding window
        kind = self.config.model_type
        # These size their position bias from a 2-D mask and refuse a 4-D one.
        self._alibi = kind == "bloom" or getattr(self.config, "alibi", False)
        self.counts_keys = self._alibi or kind == "mpt"
        if self.gates.graphs is not None and self.counts_keys:
            self.gates.graphs.give_up("biases of attention that count keys")
        self.original_length = self.gates.original_length
        self.prefills_again = self.original_length is not None and prefills_again(self.causal_lm)
        self.max_positions: int | None = getattr(self.config, "max_position_embeddings", None)
        self.tabled_positions = self.max_positions if self._has_table else None
        self._inputs = Inputs(type(self.base), self.tabled_positions, not self._alibi)

    @property
    def _has_table(self) -> bool:
        """Whether positions are looked up, in embeddings or in a table of sines and cosines."""
        words, positions = self.causal_lm.get_input_embeddings(), self.max_positions
        # GPT-J and CodeGen had it in every layer before transformers 5.23.
        in_layers = any("embed_positions" in part._buffers for part in self.layers.modules())
        return in_layers or any(
            (isinstance(part, nn.Embedding) and part is not words)
            or any(b.ndim == 2 and len(b) == positions for b in part.buffers(recurse=False))
            for part in self.base.children()
        )

    @property
    def device(self) -> torch.device:
        """Device of the embeddings, where tokens go in and logits come out."""
        return self.device_at(0)

    def device_at(self, layer: int) -> torch.device:
        """Device of the hidden states after `layer` layers."""
        return device_of(self.layers[layer - 1] if layer else self.causal_lm.get_input_embeddings())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the hidden states."""
        return self.causal_lm.dtype

    @property
    def vocab_size(self) -> int:
        """Number of tokens, by the config; an LM head that was padded has more rows."""
        return self.config.vocab_size

    @property
    def lm_head(self) -> nn.Module:
        """The module that turns final-norm outputs into logits."""
        return self.gates.lm_head

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held by the thread whose passes run; others that want to generate wait for it."""
        return self.gates.lock

    @property
    def lm_head_weight(self) -> Tensor:
        """The LM head's full weight, `[vocab, hidden]`.

        Raises:
            ValueError: it is quantized, or has an adapter.
        """
        return plain_weight(self.lm_head, self.vocab_size)

    @property
    def final_norm(self) -> nn.Module | None:
        """The norm between the last layer and the LM head, if there is one."""
        return self.gates.final_norm

    def include(self, *modules: nn.Module) -> None:
        """Add modules of heads to those that the kernels cover."""
        self.gates.others += modules

    def copy_layer(self, index: int) -> nn.Module:
        """A trainable copy of a layer, which a head runs with a KV cache of its own.

        Raises:
            ValueError: there is no such layer, its weights cannot be dequantized, or its adapters
                cannot be merged.
        """
        self.check_layer(index)
        return trainable(self.copy(self.layers[index]), self.dtype)

    def check_layer(self, index: int) -> None:
        """Raise ValueError unless a head can have a layer like `index` of its own."""
        if not 0 <= index < self.depth:
            raise ValueError(f"place must be a layer in [0, {self.depth - 1}], got {index}")
        if index not in self.attention_layers:
            others = f"; place may be {self.attention_layers}" if self.attention_layers else ""
            raise ValueError(
                f"layer {index} of {type(self.causal_lm).__name__} does not attend, or has a "
                f"recurrent state, so that a head cannot have one like it{others}; or use a "
                "shared, lens, lora or eagle3 head"
            )

    def layer_for(self, exit_layer: int) -> int:
        """The layer that a head at an exit copies: the next that attends, else the last.

        Raises:
            ValueError: every layer that attends has a recurrent state, too.
        """
        if not self.attention_layers:
            self.check_layer(exit_layer)
        above = [index for index in self.attention_layers if index >= exit_layer]
        return above[0] if above else self.attention_layers[-1]

    def check_skips(self, skips: Skips) -> None:
        """Raise ValueError unless these sublayers exist, can be skipped, and leave something."""
        self.gates.sublayers.check(skips)

    def check_approximation(self, approximation: Approximation) -> None:
        """Raise ValueError, with the reason, if passes cannot be approximated so.

        What is possible is prepared when the gates are put in next.
        """
        name = type(self.causal_lm).__name__
        if approximation.window is not None and self.counts_keys:
            raise ValueError(
                f"window: {name} biases attention by the index of a key, which leaving out others "
                "would change; leave window out"
            )
        if approximation.precision is None and approximation.lm_head_precision is None:
            return
        if self.kernels == "compiled":
            raise ValueError(
                "precision: compiled layers hold the weights that they were compiled for; choose "
                "other kernels than 'compiled', or leave precision out"
            )
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"precision: torch has low-precision products on CPUs and CUDA devices, not on "
                f"{self.device.type!r}; leave precision out"
            )
        if approximation.lm_head_precision is not None:
            refuse_copies([self.lm_head], f"the LM head of {name}")
        if approximation.layers and approximation.precision is not None:
            refuse_copies([*self.layers], f"the layers of {name}")
        self.gates.low_precision.want(approximation)

    def approximating(self, approximation: Approximation) -> AbstractContextManager[None]:
        """While active, this thread's passes are approximate; see `check_approximation`."""
        return self.gates.approximating(approximation)

    @property
    def approximates_layers(self) -> bool:
        """Whether passes over the model's layers are approximate now."""
        active = self.gates.approximation
        return active is not None and active.layers

    @property
    def windows_own_layer(self) -> bool:
        """Whether a head's own layer sees other keys now than the model's layers do."""
        active = self.gates.approximation
        return active is not None and active.window is not None and not active.layers

    def copy_bytes(self, precision: Precision) -> dict[Part, int]:
        """Bytes of low-precision copies of the layers, the heads and the LM head."""
        parts = self.gates.parts()
        return {part: copy_bytes(modules, precision) for part, modules in parts.items()}

    @property
    def packed_bytes(self) -> int:
        """Bytes that the kernels `prepacked` take on this CPU beside the weights."""
        return packed_bytes(*text_parts(self.causal_lm))

    def copy(self, module: ModuleT) -> ModuleT:
        """A deep copy of one of the target's modules, with full weights and without hooks.

        Raises:
            RuntimeError: called inside `with decoder:`; the gates would be copied too.
        """
        with self.gates.lock:  # another thread may have them in
            if self.gates.entered:
                raise RuntimeError("build heads outside `with decoder:`, or they copy its gates")
            return bare_copy(module)

    def new_slots(self, rows: int, capacity: int = 0) -> SlotCache:
        """An empty KV cache for `rows` rows, reusing the one of `give_back` if it fits."""
        page = 1 if self.gates.graphs is None else self.gates.graphs.page
        (spare, self._spare), made_for = (self._spare, None), self.dtype_and_devices
        if spare is not None and spare.made_for == made_for and spare.fits(rows, capacity, page):
            return spare
        kind, recurrent = self.kv_cache_dtype, self.recurrent_layers
        slots = SlotCache(self.windows, rows, capacity, self.device, kind, page, recurrent)
        slots.made_for = made_for
        return slots

    def give_back(self, slots: SlotCache) -> None:
        """Keep a call's KV cache for the next call, if graphs were recorded that read it."""
        if self.gates.graphs is not None and self.gates.graphs.problem is None:
            slots.recycle()
            self._spare = slots

    @property
    def dtype_and_devices(self) -> tuple[object, ...]:
        """Dtype and devices of the layers' states."""
        return self.dtype, *map(device_of, self.layers)

    def own_cache(self) -> Cache | None:
        """A cache with which the model's own `generate` rounds KV as `new_slots` does.

        `None` if the KV cache does not round.
        """
        return None if self.kv_cache_dtype == "auto" else RoundedCache(config=self.config)

    def __enter__(self) -> Decoder:
        """Put the gates in once for all passes inside `with decoder:`."""
        self.gates.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Take the gates out."""
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
        own: OwnLayer | None = None,
        tree: Tree | None = None,
        skips: Skips | None = None,
        embeds: Tensor | None = None,
        prompt: Options | None = None,
        ends: Tensor | None = None,
    ) -> Pass:
        """Run `span` over `tokens`, writing its KV after each row's committed tokens.

        Args:
            tokens: `[rows, width]` token ids.
            span: the layers to run.
            slots: the KV cache.
            hidden: `[rows, width, hidden]` hidden states to resume from; required unless the span
                starts at layer 0 or is a head's `own` layer, which else starts from the embeddings.
            offset: slots between the last committed token and the first of `tokens`; one number,
                or one per row.
            unembed: whether to apply the final norm and the LM head.
            keep: hidden states to keep, by the number of layers below.
            own: a head's own layer, run in place of the span's last layer.
            tree: the token tree of the block that `tokens` are part of; `offset` is then the index
                of the first of them in the block.
            skips: sublayers to skip, which write no KV (`check_skips`).
            embeds: `[rows, width, hidden]` what `embed` returns, or replaces it.
            ends: `[rows]` index of one token of each row; in a pass through all layers, logits
                at these are returned beside the normed hidden states (`Pass.logits`).
            prompt: what `prompt_inputs` returns: the multimodal model then makes
                embeddings, masks and positions; only for all layers and an empty cache.
        """
        if span.start > 0 and hidden is None and own is None:
            raise ValueError(f"a span from layer {span.start} needs the hidden states below it")
        gates = self.gates
        if not gates.are_in:
            rest = hidden, offset, unembed, keep, own, tree, skips, embeds, prompt, ends
            with self:
                return Decoder.run(self, tokens, span, slots, *rest)
        window = slots.window(tokens.shape[1], offset, tree, paged=prompt is None)
        otherwise = gates.approximation
        if otherwise is not None and otherwise.window is not None:
            alone = own is not None and span.start == span.stop - 1
            if alone or otherwise.layers:
                window.view = slots.view(window, otherwise.sinks, otherwise.window)
        outer = slots.set_window(window, {} if own is None else own.kv_layers(span.stop - 1))
        try:
            masks: dict[int | None, Tensor] = {}
            if prompt is None and self._needs_masks(slots, window, added=own is not None):
                dtype = gates.dtype if hidden is None else hidden.dtype
                masks = {kind: slots.mask(kind, dtype, own is not None) for kind in self._kinds}
            given = span, window, hidden, masks, self._alibi, tuple(keep), own
            active = ActivePass(*given, skips=skips, approximation=otherwise, ends=ends)
            if own is not None and own.is_standalone:
                return self._run_standalone(own, active, tokens, window.positions, slots, embeds)
            if (span.start > 0 or skips is not None) and gates.returned_values is None:
                raise RuntimeError("run all layers once before a pass that leaves some of them out")
            if prompt is not None:
                return self._runner.run_around(active, prompt, slots)
            inputs = self._inputs(tokens, slots, slots.positions(window), masks, embeds)
            return self._runner.run(active, inputs, unembed or ends is not None)
        finally:
            slots.set_window(*outer)

    def _needs_masks(self, slots: SlotCache, window: Window, added: bool) -> bool:
        """Whether the family's own masks are wrong for a pass over slots, or slower.

        They are right for a prefill into an empty cache, and for one token in rows of equal length,
        which sees everything. A model with images makes the masks of its prompt.

        Args:
            slots: the KV cache.
            window: the slots that the pass writes.
            added: whether a head's own layer runs, which lacks KV of earlier turns.
        """
        widths = (window.end,) if self.gates.masks_one else (1, window.end)
        simple = window.even and window.tight and window.width in widths and window.view is None
        return not simple or bool(self.gates.own_masks) or (added and any(slots.added_from))

    def prompt_inputs(self, tokens: Tensor, real: Tensor, given: Options) -> dict[str, object]:
        """What the model's own `generate` passes to its forward for a prompt with images.

        Args:
            tokens: `[rows, width]` token ids, left-aligned.
            real: `[rows, width]` which of them are not padding.
            given: further inputs; those with an entry per token are aligned as `tokens` are.
        """
        prepare: Any = self.causal_lm.prepare_inputs_for_generation
        mask = None if bool(real.all()) else real.long()
        first = {"attention_mask": mask, "use_cache": True, "is_first_iteration": True}
        return prepare(tokens, **first, **given)

    def run_packed(
        self,
        tokens: Tensor,
        span: Span,
        packing: Packing,
        hidden: Tensor | None = None,
        keep: Sequence[int] = (),
        own: OwnLayer | None = None,
        memory: StepCache | None = None,
        step: int = 0,
        embeds: Tensor | None = None,
    ) -> Pass:
        """Run `span` over packed documents with gradients and without a KV cache.

        Args:
            tokens: `[rows, width]` token ids.
            span: the layers to run.
            packing: which tokens belong together.
            hidden: `[rows, width, hidden]` hidden states to start from.
            keep: hidden states to keep, by the number of layers below.
            own: a head's own layer, run in place of the span's last layer.
            memory: keys and values of the layers in earlier draft steps over the same tokens.
            step: number of earlier draft steps.
            embeds: `[rows, width, hidden]` what `embed` returns, or replaces it.
        """
        with self:
            masks: dict[int | None, Tensor] = {}
            skips_first = bool(own and own.skips_first)
            if not packing.whole or step or self.gates.own_masks or skips_first:
                dtype = self.gates.dtype if hidden is None else hidden.dtype
                rest = dtype, step, skips_first
                masks = {kind: packing.mask(kind, *rest) for kind in self._kinds}
            documents = packing.lengths if self.recurrent_layers else None
            given = span, None, hidden, masks, self._alibi, tuple(keep), own
            active = ActivePass(*given, documents=documents)
            if own is not None and own.is_standalone:
                positions = packing.positions
                return self._run_standalone(own, active, tokens, positions, memory, embeds)
            inputs = self._inputs(tokens, memory, packing.positions, masks, embeds)
            return self._runner.run(active, inputs, unembed=False)

    def _run_standalone(
        self,
        own: OwnLayer,
        active: ActivePass,
        tokens: Tensor,
        positions: Tensor,
        cache: Cache | None,
        embeds: Tensor | None,
    ) -> Pass:
        """Run a head's layer without the target's body."""
        hidden = embeds if active.hidden is None else active.hidden
        if hidden is None:
            hidden = (own.embed or self.embed)(tokens)
        call = own.alone(active.span.stop - 1, active.masks.get(None), positions, cache)
        return self._runner.run_alone(active, own, call, hidden)

    def embed(self, tokens: Tensor, raw: bool = False) -> Tensor:
        """Embeddings `[rows, width, hidden]` of tokens, without position embeddings.

        Args:
            tokens: `[rows, width]` token ids.
            raw: take the rows as they are stored, also where the embedding scales them (Gemma).
        """
        embedding = self.causal_lm.get_input_embeddings()
        scales = type(embedding).forward is not nn.Embedding.forward
        if raw and scales and isinstance(embedding, nn.Embedding):
            return nn.functional.embedding(tokens, weight_of(embedding, "weight"))
        return embedding(tokens)

    def check_trees(self, instead: str = "use a drafter that makes chains") -> None:
        """Raise ValueError, which says what to do `instead`, if the target cannot run trees."""
        name, why = type(self.causal_lm).__name__, None
        if self.counts_keys:
            why = "biases attention by the index of a key, so siblings cannot have one position"
        if self.recurrent_layers:
            why = "has recurrent layers, whose state has no branches"
        if why is not None:
            raise ValueError(f"{name} {why}; {instead}")

    def unembed(self, normed: Tensor, readout: nn.Module | None = None) -> Tensor:
        """Logits `[rows, width, vocab]` of final-norm outputs, by the model's own LM head.

        Args:
            normed: `[rows, width, hidden]` inputs of the LM head.
            readout: replaces the LM head, if given.
        """
        return self._runner.tail.unembed(normed, readout)


@contextmanager
def entered(*decoders: Decoder) -> Iterator[None]:
    """Enter several decoders.

    They are always entered in the same order, so two threads that use the same models cannot
    deadlock.
    """
    with ExitStack() as stack:
        for decoder in _sorted(decoders):
            stack.enter_context(decoder)
        yield


@contextmanager
def locked(*decoders: Decoder) -> Iterator[None]:
    """Have other threads wait for several decoders."""
    with ExitStack() as stack:
        for decoder in _sorted(decoders):
            stack.enter_context(decoder.lock)
        yield


def _sorted(decoders: Iterable[Decoder]) -> list[Decoder]:
    return sorted(decoders, key=lambda decoder: id(decoder.lock))
