"""A head's own decoder layer.

It runs behind the target's layers of a span, in place of the next one, with the arguments that the
model's body calls that one with; or, if it is a `StandaloneLayer`, without the body. Its keys and
values are one more layer of the KV cache, which the pass writes in place of the replaced layer's
(`SlotCache.set_window`). What a head makes of the layer's output, it computes behind the pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers.cache_utils import Cache

from selfspec.decoder.devices import device_of
from selfspec.decoder.passes import CACHES, MASK, LayerCall


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
