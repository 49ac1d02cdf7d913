"""What describes a pass (span, skipped sublayers, a head's own layer), and its results."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from selfspec.decoder.cache import Window

MASK = "attention_mask"  # the name that bodies and layers take masks by


class Span(NamedTuple):
    """Layers `start` to `stop - 1`."""

    start: int
    stop: int


class Skips(NamedTuple):
    """Sublayers that a pass leaves out: they add nothing to the residual stream.

    Attributes:
        attention: layers whose attention is left out, from 0.
        mlp: layers whose MLP is left out.
    """

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    @classmethod
    def of(cls, attention: Iterable[int], mlp: Iterable[int]) -> Skips:
        """The skips that name these layers."""
        return cls(frozenset(attention), frozenset(mlp))

    @property
    def layers(self) -> frozenset[int]:
        """Layers that are left out as a whole."""
        return self.attention & self.mlp


class Own(NamedTuple):
    """A head's own layer (`copy_layer`), which runs in place of a span's last.

    Attributes:
        layer: the layer.
        enter: what makes of the residual stream there what the layer starts from.
        added: in which of the layers that were added to the slots its KV lies, from 1.
        leave: what makes of the layer's output what the LM head reads, in place of the final norm
            (`Decoder.leaves`).
        at: what of these states the LM head reads; `None`: all of them.
        readout: what stands in for the LM head.
    """

    layer: nn.Module
    enter: Callable[[Tensor], Tensor] | None = None
    added: int = 1
    leave: Callable[[Tensor], Tensor] | None = None
    at: Callable[[Tensor], Tensor] | None = None
    readout: nn.Module | None = None


class Pass(NamedTuple):
    """What a pass over a span leaves.

    Attributes:
        hidden: `[rows, width, hidden]` residual stream after the span's last layer.
        output: `[rows, width, hidden]` the same, after the final norm where the last layer ran, or
            `[rows, width, vocab]` logits when the pass went through the LM head as well, of the
            states that it read (`Own.at`).
        layer_seconds: wall time inside the span's layers.
        head_seconds: wall time inside a head's own layer, the final norm and the LM head.
        kept: `[rows, width, hidden]` each, the residual streams that the caller asked for.
    """

    hidden: Tensor
    output: Tensor
    layer_seconds: float
    head_seconds: float
    kept: list[Tensor]


Bound = tuple[tuple[Any, ...], dict[str, Any]]  # what a layer is called with


class Stretch:
    """Layers that follow on each other in one pass, and what each is called with.

    Args:
        keep: which of the layers' inputs to keep, by the layers' numbers.

    Attributes:
        start: the number of the first.
        layers: the layers.
        bound: what layers are called with beside the hidden states; layers that are called with
            the same objects share an entry.
        kind_of: which of these each layer is called with.
        handed: the hidden states that the body hands from layer to layer.
    """

    def __init__(self, keep: Sequence[int] = ()):
        self.keep, self.start = keep, 0
        self.layers: list[nn.Module] = []
        self.bound: list[Bound] = []
        self.kind_of: list[int] = []
        self.handed: Tensor | None = None
        self._kinds: dict[Hashable, int] = {}

    def add(
        self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Add the next layer, which has this number."""
        if not self.layers:
            self.start = index
        kind = tuple(map(id, args)), tuple(kwargs), tuple(map(id, kwargs.values()))
        if kind not in self._kinds:
            self._kinds[kind] = len(self.bound)
            self.bound.append((args, kwargs))
        self.layers.append(layer)
        self.kind_of.append(self._kinds[kind])

    def calls(self) -> Iterator[tuple[nn.Module, Bound]]:
        """Each layer with what it is called with."""
        for layer, kind in zip(self.layers, self.kind_of, strict=True):
            yield layer, self.bound[kind]


@dataclass(slots=True)
class ActivePass:
    """A pass in progress, as the gates see it.

    Attributes:
        span: the layers that run.
        window: the slots that it writes; `None` for packed text.
        hidden: what the first of them starts from, instead of what it is handed.
        masks: additive mask for each sliding window (`None`: full attention); empty when the
            family's own masks hold.
        add_masks: whether masks go on top of the family's own, which carry a position bias.
        keep: residual streams to keep, by the number of layers below.
        own: what runs in place of the span's last layer, or `None`.
        normed: whether anyone reads what comes after the final norm; without, it is left out.
        skips: the sublayers that are left out; `None` where nothing is.
        stretch: where calls of layers are gathered, to be run at once; `None`: each runs by itself.
        kept: the residual streams that were kept, by the number of layers below.
        result: residual stream after the span, once it is there.
        began: when the first layer began.
        layer_seconds: wall time inside layers so far.
        head_seconds: wall time inside a head's own layer, the final norm and the LM head so far.
    """

    span: Span
    window: Window | None
    hidden: Tensor | None
    masks: dict[int | None, Tensor]
    add_masks: bool
    keep: tuple[int, ...] = ()
    own: Own | None = None
    normed: bool = True
    skips: Skips | None = None
    stretch: Stretch | None = None
    kept: dict[int, Tensor] = field(default_factory=dict)
    result: Tensor | None = None
    began: float = 0.0
    layer_seconds: float = 0.0
    head_seconds: float = 0.0

    def done(self, output: Tensor) -> Pass:
        """What the pass leaves, now that it is over."""
        assert self.result is not None
        kept = [self.kept[layer] for layer in self.keep] if self.keep else []
        return Pass(self.result, output, self.layer_seconds, self.head_seconds, kept)
