"""A pass in progress: what it shall do, and what the gates record of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from selfspec.decoder.cache import Window
from selfspec.decoder.own_layer import OwnLayer
from selfspec.decoder.passes import Approximation, LayerCall, Pass, Skips, Span


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
        watch: learns what the body does between its layers, or `None`.
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
    watch: BodyWatch | None = None
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
