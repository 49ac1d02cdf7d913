"""Decoder layers through `torch.compile`, for passes over few tokens.

A pass over few tokens spends a good part of a layer's time between its operations. Compiled, what
lies between the matrix products is one kernel each. One program serves all layers alike, of the
target and of heads: it takes weights, KV buffers and masks as inputs, of any length and width.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.decoder.cache import WIDEST, SlotCache, Strip
from selfspec.decoder.direct import hooked_part
from selfspec.decoder.kernels.fallback import StandIn, told

# How a layer's inputs differ: one row or several, one token or several, with or without a mask,
# rows of one length or of many, gradients wanted of its weights or not, kinds of layers.
PROGRAMS = 16
BACKEND: Any = "inductor"
_HERE = ...  # where the cache goes among a layer's arguments


class CompiledLayers(StandIn):
    """Calls decoder layers by compiled code, or as they are where that cannot be.

    Args:
        name: the model's, for the warning.
    """

    manner = "compiled"

    def __init__(self, name: str):
        super().__init__(name)
        self._plain: dict[nn.Module, bool] = {}
        wanted = {"recompile_limit": PROGRAMS, "isolate_recompiles": True}
        known = inspect.signature(torch.compile).parameters  # older builds of torch lack them
        limits: Any = {key: value for key, value in wanted.items() if key in known}
        self._run = torch.compile(_run, dynamic=True, fullgraph=True, backend=BACKEND, **limits)

    def begin(self) -> None:
        """Look at the layers anew: between calls of `generate` they may have got hooks."""
        self._plain.clear()

    def __call__(
        self, layer: nn.Module, index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """What the layer returns.

        Args:
            layer: the layer.
            index: of the layer that it replaces.
            hidden: `[rows, width, hidden]` its input.
            args: what it is handed beside.
            kwargs: the same, by name.
        """
        slots = next((v for v in (*kwargs.values(), *args) if isinstance(v, SlotCache)), None)
        if self.problem is None and slots is not None and hidden.shape[1] <= WIDEST:
            inputs = slots.strip(index)
            if inputs is not None and self._is_plain(layer):
                rest = tuple(_HERE if value is slots else value for value in args)
                named = {name: _HERE if v is slots else v for name, v in kwargs.items()}
                try:
                    return self._run(layer, hidden, rest, named, *inputs)
                except Exception as error:  # whatever it was, the layer itself may run
                    self.give_up(told(error))
        return layer(hidden, *args, **kwargs)

    def _is_plain(self, layer: nn.Module) -> bool:
        """Whether nothing hangs on the layer that compiled code would leave out or be stale of."""
        plain = self._plain.get(layer)
        if plain is None:
            hooked = hooked_part(layer)
            plain = self._plain[layer] = hooked is None
            if hooked is not None:
                self.give_up(f"hooks on {hooked}")
        return plain


def _run(
    layer: nn.Module,
    hidden: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    seen: Tensor,
) -> Any:
    strip = Strip(keys, values, slots, seen)
    args = tuple(strip if value is _HERE else value for value in args)
    kwargs = {name: strip if value is _HERE else value for name, value in kwargs.items()}
    return layer(hidden, *args, **kwargs)
