"""Decoder layers through `torch.compile`, for passes over few tokens.

A pass over few tokens spends a good part of a layer's time between its operations. Compiled, what
lies between the matrix products is one kernel each. One program serves all layers alike, of the
target and of heads: it takes weights, KV buffers and masks as inputs, of any length and width.
"""

from __future__ import annotations

import inspect
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from selfspec.config import Options
from selfspec.decoder.cache import WIDEST, LayerKV, SlotCache
from selfspec.decoder.direct import hooked_part
from selfspec.decoder.kernels.fallback import FallbackKernel, summarize

# Programs are specialised by: one row or several, one token or several, with or without a mask,
# rows of equal or different lengths, weights with or without gradients, kinds of layers.
PROGRAMS = 16
BACKEND: Any = "inductor"
_HERE = ...  # placeholder for the cache among a layer's arguments


class CompiledLayers(FallbackKernel):
    """Calls compiled decoder layers, and the layers themselves where compiling is impossible.

    Args:
        model: whose layers these are.
    """

    manner = "compiled"

    def __init__(self, model: nn.Module):
        super().__init__(type(model).__name__)
        self._plain: dict[nn.Module, bool] = {}
        if model not in _RUNS:
            _RUNS[model] = _compiled_run()
        self._run = _RUNS[model]

    def begin(self) -> None:
        """Forget what is known about hooks: they may change between calls of `generate`."""
        self._plain.clear()

    def __call__(
        self,
        layer: nn.Module,
        index: int,
        hidden: Tensor,
        args: tuple[object, ...],
        kwargs: Options,
    ) -> Any:
        """What the layer returns.

        Args:
            layer: the layer.
            index: index of the layer, or of the layer that it replaces.
            hidden: `[rows, width, hidden]` its input.
            args: its other positional arguments.
            kwargs: its keyword arguments.
        """
        slots = next((v for v in (*kwargs.values(), *args) if isinstance(v, SlotCache)), None)
        if self.problem is None and slots is not None and hidden.shape[1] <= WIDEST:
            inputs = slots.layer_kv(index)
            if inputs is not None and self._is_plain(layer):
                rest = tuple(_HERE if value is slots else value for value in args)
                named = {name: _HERE if v is slots else v for name, v in kwargs.items()}
                try:
                    return self._run(layer, hidden, rest, named, *inputs)
                except Exception as error:  # the layer itself may still run
                    self.give_up(summarize(error))
        return layer(hidden, *args, **kwargs)

    def _is_plain(self, layer: nn.Module) -> bool:
        """Whether the layer has no hooks, which compiled code would ignore."""
        plain = self._plain.get(layer)
        if plain is None:
            hooked = hooked_part(layer)
            plain = self._plain[layer] = hooked is None
            if hooked is not None:
                self.give_up(f"hooks on {hooked}")
        return plain


# By model, as long as it lives. Its wrappers share programs: each call with an `assistant_model`
# wraps that model anew.
_RUNS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def _compiled_run() -> Any:
    wanted = {"recompile_limit": PROGRAMS, "isolate_recompiles": True}
    known = inspect.signature(torch.compile).parameters  # older builds of torch lack them
    limits: Any = {key: value for key, value in wanted.items() if key in known}
    return torch.compile(_run, dynamic=True, fullgraph=True, backend=BACKEND, **limits)


def _run(
    layer: nn.Module,
    hidden: Tensor,
    args: tuple[object, ...],
    kwargs: Options,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    seen: Tensor,
) -> Any:
    layer_kv = LayerKV(keys, values, slots, seen)
    args = tuple(layer_kv if value is _HERE else value for value in args)
    kwargs = {name: layer_kv if value is _HERE else value for name, value in kwargs.items()}
    return layer(hidden, *args, **kwargs)
