"""Types that describe a forward pass over a span of layers, and its results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.generation.utils import GenerateDecoderOnlyOutput

from selfspec.config import Precision

MASK = "attention_mask"  # the name that bodies and layers take masks by
# Names by which modules take a cache; transformers renamed the last two to the first in 5.24.
CACHES = ("cache", "past_key_values", "cache_params")


def cache_name(taker: Callable[..., Any]) -> str:
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
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
