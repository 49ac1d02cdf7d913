"""A pass over a span of layers: what describes it, a head's own layer in it, and its progress.

A head's own layer runs behind the target's layers of a span, in place of the next one, with the
arguments that the model's body calls that one with; or, if it is a `StandaloneLayer`, without the
body. Its keys and values are one more layer of the KV cache, which the pass writes in place of the
replaced layer's (`SlotCache.set_window`). What a head makes of the layer's output, it computes
behind the pass.
"""

from __future__ import annotations

import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.generation.utils import GenerateDecoderOnlyOutput

from selfspec.config import Options, Precision
from selfspec.decoder.cache import Window
from selfspec.decoder.devices import device_of

MASK = "attention_mask"  # the name that bodies and layers take masks by
# Names by which modules take a cache; transformers renamed the last two to the first in 5.24.
CACHES = ("cache", "past_key_values", "cache_params")


def cache_name(taker: Callable[..., object]) -> str:
    """The name by which a module's `forward`, or a class of outputs, takes the KV cache.

    Since transformers 5.24 it is `cache`. Modules that take any keyword do not see another name.
    """
    return "cache" if "cache" in inspect.signature(taker).parameters else "past_key_values"


CACHE = cache_name(GenerateDecoderOnlyOutput)  # by which `generate` takes and returns it


class Span(NamedTuple):
    """Layers `start` to `stop - 1`."""

    start: int
    stop: int


class Skips(NamedTuple):
    """Sublayers that a pass skips: they add nothing to the residual stream.

    Attributes:
        attention: layers whose attention is skipped, from 0.
        mlp: layers whose MLP is skipped.
    """

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    @classmethod
    def of(cls, attention: Iterable[int], mlp: Iterable[int]) -> Skips:
        """The skips that name these layers."""
        return cls(frozenset(attention), frozenset(mlp))

    @property
    def layers(self) -> frozenset[int]:
        """Layers that are skipped as a whole."""
        return self.attention & self.mlp


class Approximation(NamedTuple):
    """What passes that draft do otherwise than the model's own.

    Attributes:
        precision: what the weights are rounded to that they read; `None` for the model's own.
        lm_head_precision: the same of the model's LM head.
        window: the most recent keys that they see; `None` for all.
        sinks: the first keys that they see, too.
        layers: whether this holds for the model's layers, so that verification cannot resume from
            their output; else only for the LM head and heads' own layers.
    """

    precision: Precision | None = None
    lm_head_precision: Precision | None = None
    window: int | None = None
    sinks: int = 0
    layers: bool = False


class Pass(NamedTuple):
    """Results of a pass.

    Attributes:
        hidden: `[rows, width, hidden]` hidden states after the span's last layer.
        output: `[rows, width, hidden]` the same, normed if the model's last layer ran; or
            `[rows, width, vocab]` logits if the pass applied the LM head.
        layer_seconds: wall time inside the span's layers.
        head_seconds: wall time inside a head's own layer, the final norm and the LM head.
        kept: `[rows, width, hidden]` each, the hidden states that the caller asked for.
        logits: `[rows, 1, vocab]` at the rows' ends, if the caller named these.
    """

    hidden: Tensor
    output: Tensor
    layer_seconds: float
    head_seconds: float
    kept: list[Tensor]
    logits: Tensor | None = None


class LayerCall(NamedTuple):
    """What the model's body calls one of its layers with, beside the hidden states.

    Attributes:
        layer_index: index of the layer.
        layer: the layer, or a head's own layer in its place.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """

    layer_index: int
    layer: nn.Module
    args: tuple[object, ...]
    kwargs: Options


class StandaloneLayer(nn.Module, ABC):
    """A head's own layer of another architecture than the target's layers.

    The target's body does not run it: it starts from token embeddings, has its own position
    embeddings, and attends to all earlier tokens.

    Attributes:
        depth: number of layers with keys and values that it consists of. Their indices are
            `OwnLayer.place` and those after it.
    """

    depth: int = 1

    @abstractmethod
    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        past_key_values: Cache | None,
    ) -> Tensor:
        """Output `[rows, width, hidden]` of the layer.

        Args:
            hidden: `[rows, width, any]` what the head's `enter` makes.
            attention_mask: `[rows, 1, width, keys]` additive mask; `None` if every token sees all
                keys up to itself.
            position_ids: `[rows, width]` positions of the tokens.
            past_key_values: takes the keys and values of the layer `OwnLayer.place`.
        """


class OwnLayer(NamedTuple):
    """A head's own layer, which runs in place of a span's last layer.

    Attributes:
        layer: the layer: one of the target's classes (`copy_layer`), or a `StandaloneLayer`.
        enter: maps the hidden states at the exit to the layer's input.
        added: which of the layers added to the KV cache (`SlotCache.add_layer`) holds its KV, from
            1.
        place: index of the layer that it replaces in passes that run no other layer.
        embed: makes the embeddings that a `StandaloneLayer` starts from, in place of the target's.
        skips_first: whether the first token of a document has no key for the layer; only passes
            over packed documents read this.
    """

    layer: nn.Module
    enter: Callable[[Tensor], Tensor] | None = None
    added: int = 1
    place: int = 0
    embed: Callable[[Tensor], Tensor] | None = None
    skips_first: bool = False

    @property
    def is_standalone(self) -> bool:
        """Whether the target's body does not run it."""
        return isinstance(self.layer, StandaloneLayer)

    @property
    def depth(self) -> int:
        """Number of layers with keys and values."""
        return self.layer.depth if isinstance(self.layer, StandaloneLayer) else 1

    def kv_layers(self, index: int) -> dict[int, int]:
        """Which added layers of the KV cache hold its KV, by the indices that it writes to.

        Args:
            index: the first of these, that of the layer that it replaces.
        """
        return {index + i: self.added + i for i in range(self.depth)}

    def in_place_of(self, call: LayerCall) -> LayerCall:
        """The layer, called with what the body calls the layer with that it replaces."""
        index, replaced, args, kwargs = call
        if "_hf_hook" in replaced.__dict__:  # which brings the layer what comes from elsewhere
            device = device_of(self.layer)
            args, kwargs = send_to_device((args, kwargs), device, skip_keys=list(CACHES))
        return LayerCall(index, self.layer, args, kwargs)

    def alone(
        self, index: int, mask: Tensor | None, positions: Tensor, cache: Cache | None
    ) -> LayerCall:
        """A `StandaloneLayer`, called without the target's body; see its `forward`."""
        arguments = {MASK: mask, "position_ids": positions, "past_key_values": cache}
        return LayerCall(index, self.layer, (), arguments)


class BodyError(Exception):
    """A model's body does more with hidden states than hand them from layer to layer."""


class BodyDone(Exception):
    """The body has run, and the pass needs nothing of what the causal LM does after it."""


class BodyWatch:
    """Finds out whether a body only hands hidden states from layer to layer.

    It watches one pass over all layers, which run when the body calls them.

    Attributes:
        hands_on: whether it has done nothing else so far.
    """

    def __init__(self) -> None:
        self.hands_on = True
        self._count = 0
        self._given: tuple[Tensor, int] | None = None

    def receive(self, index: int, hidden: Tensor) -> None:
        """Compare what the body hands to a layer with what it was given by the one before."""
        same = index == self._count
        if same and self._given is not None:
            given, version = self._given
            same = hidden is given and hidden._version == version
        self.hands_on = self.hands_on and same
        self._count = index + 1

    def give(self, output: Tensor) -> Tensor:
        """A layer's output, or a copy of it that counts the changes that are made in place."""
        if output.is_inference():  # such tensors count none
            with torch.inference_mode(False):
                output = output.clone()
        self._given = output, output._version
        return output


@dataclass(slots=True)
class ActivePass:
    """A pass in progress: what it shall do, what the gates have recorded, and its results.

    Attributes:
        span: the layers that run.
        window: the slots that it writes; `None` for packed text.
        hidden: input of the first of them, in place of what the body hands over.
        masks: additive mask for each sliding window (`None`: full attention); empty if the
            family's own masks are used.
        add_masks: whether masks are added to the family's own, which carry a position bias.
        keep: hidden states to keep, by the number of layers below.
        own: the head's layer that replaces the span's last layer, or `None`.
        normed: whether the final norm's output is used; otherwise the norm is skipped.
        skips: skipped sublayers, or `None`.
        approximation: what it does otherwise than the model's own passes, or `None`.
        documents: lengths of packed documents, in order; `None` if each row is one.
        one_by_one: whether each layer runs when the body calls it, not all after the last call.
        body_watch: learns what the body does between its layers, or `None`.
        calls: the recorded calls of the span's layers that have not run.
        count: how many layers the body has called.
        handed: the hidden states that it hands from layer to layer.
        kept: the hidden states that were kept, by the number of layers below.
        result: hidden states after the span, once computed.
        ends: `[rows]` the only positions at which the LM head reads; `None` for all.
        body_only: whether the pass ends when the body has run.
        body_output: what the body returned, hooks included.
        layer_seconds: wall time inside layers so far.
        head_seconds: wall time inside a head's own layer, the final norm and the LM head so far.
    """

    span: Span
    window: Window | None
    hidden: Tensor | None
    masks: dict[int | None, Tensor]
    add_masks: bool
    keep: tuple[int, ...] = ()
    own: OwnLayer | None = None
    normed: bool = True
    skips: Skips | None = None
    approximation: Approximation | None = None
    documents: Sequence[int] | None = None
    one_by_one: bool = False
    body_watch: BodyWatch | None = None
    calls: list[LayerCall] = field(default_factory=list)
    count: int = 0
    handed: Tensor | None = None
    kept: dict[int, Tensor] = field(default_factory=dict)
    result: Tensor | None = None
    ends: Tensor | None = None
    body_only: bool = False
    body_output: Tensor | None = None
    layer_seconds: float = 0.0
    head_seconds: float = 0.0

    def done(self, output: Tensor, logits: Tensor | None = None) -> Pass:
        """The results, once the pass is over."""
        assert self.result is not None
        kept = [self.kept[layer] for layer in self.keep] if self.keep else []
        times = self.layer_seconds, self.head_seconds
        return Pass(self.result, output, *times, kept, logits)


class CurrentPass:
    """The pass of a model that is in progress, and the thread whose passes are gated.

    Other threads use the model as it is.

    Attributes:
        active: the pass; `None` between passes.
        owner: the thread.
        unembeds: whether states are on the way from a pass to logits (`LogitsTail.unembed`).
    """

    def __init__(self) -> None:
        self.active: ActivePass | None = None
        self.owner: int | None = None
        self.unembeds = False

    @property
    def mine(self) -> ActivePass | None:
        """The pass, if the calling thread runs it."""
        active = self.active
        return active if active is None or self.owner == threading.get_ident() else None

    @property
    def gated(self) -> bool:
        """Whether the calling thread is inside a pass, or on the way from one to logits."""
        inside = self.active is not None or self.unembeds
        return inside and self.owner == threading.get_ident()
