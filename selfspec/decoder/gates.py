"""Gates in place of decoder layers: what turns a model's own forward into a pass over a span.

While gates are in, the model's body iterates over them instead of its layers. Only instance
attributes shadow what the model has; taking them away restores it to the letter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.decoder.compiled import CompiledLayers
from selfspec.decoder.lean import lean_forward
from selfspec.decoder.passes import ActivePass, Own
from selfspec.decoder.placement import device_of
from selfspec.decoder.rotary import RotaryTables, is_static
from selfspec.decoder.sublayers import Skipped, Sublayers
from selfspec.decoder.support import causal_tables

# One model may have several wrappers; only one at a time may have its gates in.
_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_NOTHING = object()


class Gates:
    """The gates of one model: put in by `with gates:`, for one thread at a time.

    Args:
        model: the model.
        base: its body, which owns the layers.
        layers_name: their name in it.
        layers: the decoder layers.
        windows: sliding window of each, or `None`.

    Attributes:
        active: the pass in progress.
        owner: the thread whose passes are gated; any other uses the model as it is.
        returns_tuple: whether layers return tuples; known once one has run.
        final_norm: the norm between the last layer and the LM head, if there is one.
        sublayers: what passes may skip of each layer.
        entered: how many `with gates:` are open.
        compiled: how layers are called; `None` for as they are.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        base: nn.Module,
        layers_name: str,
        layers: nn.ModuleList,
        windows: Sequence[int | None],
    ):
        self.model, self.base, self.layers = model, base, layers
        self.layers_name, self.windows = layers_name, windows
        self.active: ActivePass | None = None
        self.owner: int | None = None
        self.returns_tuple: bool | None = None
        self.sublayers = Sublayers(layers)
        self._rotary = [module for module in base.children() if is_static(module)]
        self.own_masks = causal_tables(layers)
        norms = [m for m in base.children() if "norm" in type(m).__name__.lower()]
        self.final_norm: nn.Module | None = norms[-1] if norms else None
        self.lock = _LOCKS.setdefault(model, threading.RLock())
        self.entered = 0
        self.compiled: CompiledLayers | None = None
        self._shadows: list[tuple[dict[str, Any], str, Any]] = []

    def compile(self) -> None:
        """Call layers by compiled code from now on, where that can be."""
        self.compiled = CompiledLayers(type(self.model).__name__)
        if self.own_masks:
            self.compiled.give_up("attention masks that are tables of its own")

    def __enter__(self) -> Gates:
        """Put the gates in; another thread that enters waits."""
        self.lock.acquire()
        self.owner = threading.get_ident()
        self.entered += 1
        if self.entered == 1:
            if self.compiled is not None:
                self.compiled.begin()
            gates = [Gate(self, index, layer) for index, layer in enumerate(self.layers)]
            self.shadow(self.base.__dict__, self.layers_name, gates)
            for module in (self.base, self.model):
                if "forward" not in module.__dict__:  # else device hooks have one of their own
                    self.shadow(module.__dict__, "forward", self._lean(module))
            if self.final_norm is not None:
                norm = self._timed(self._needed(self.final_norm.forward))
                self.shadow(self.final_norm.__dict__, "forward", norm)
            lm_head = self.model.get_output_embeddings()
            assert lm_head is not None  # a model without is refused
            self.shadow(lm_head.__dict__, "forward", self._timed(lm_head.forward))
            for module in self._rotary:
                self.shadow(module.__dict__, "forward", self._tabled(module.forward))
        return self

    def __exit__(self, *error: object) -> None:
        """Take the gates out, whatever happened."""
        self.entered -= 1
        while self._shadows and self.entered == 0:
            self.unshadow()
        self.lock.release()

    @contextmanager
    def passing(self, active: ActivePass) -> Iterator[None]:
        """While active, the model's forward is this pass."""
        tables = list(self.own_masks)
        if tables and active.own is not None:
            tables += causal_tables(active.own.layer)
        for module in tables:
            # The pass brings the whole mask; the module's own assumes that keys end at the query.
            keys = active.masks[None].shape[-1]
            everything = torch.ones_like(module.get_buffer("bias")[..., :1, :1])
            self.shadow(module._buffers, "bias", everything.expand(-1, -1, keys, keys))
        self.active = active
        try:
            yield
        finally:
            self.active = None
            for _ in tables:
                self.unshadow()

    @contextmanager
    def skipping(self, skipped: Sequence[Skipped]) -> Iterator[None]:
        """While active, these sublayers add nothing in this thread's passes."""
        for stand_in in skipped:
            module = stand_in.module
            self.shadow(module.__dict__, "forward", self._either(stand_in, module.forward))
        try:
            yield
        finally:
            for _ in skipped:
                self.unshadow()

    def _either(self, stand_in: Skipped, own: Callable[..., Any]) -> Callable[..., Any]:
        def either(*args: Any, **kwargs: Any) -> Any:
            return stand_in(own, args, kwargs) if self.gated else own(*args, **kwargs)

        return either

    def shadow(self, attributes: dict[str, Any], name: str, value: Any) -> None:
        """Put `value` in front of an attribute, until `unshadow`."""
        # Something may be there already: device hooks, and outer calls of another wrapper.
        self._shadows.append((attributes, name, attributes.get(name, _NOTHING)))
        attributes[name] = value

    def unshadow(self) -> None:
        """Take the last shadow away."""
        attributes, name, held = self._shadows.pop()
        if held is _NOTHING:
            del attributes[name]
        else:
            attributes[name] = held

    @property
    def gated(self) -> bool:
        """Whether the calling thread is inside a pass."""
        return self.active is not None and self.owner == threading.get_ident()

    def _lean(self, module: nn.Module) -> Callable[..., Any]:
        whole, lean = module.forward, partial(lean_forward(type(module).forward), module)
        return lambda *args, **kwargs: (lean if self.gated else whole)(*args, **kwargs)

    def _needed(self, norm: Callable[..., Any]) -> Callable[..., Any]:
        def needed(hidden_states: Tensor) -> Tensor:
            active = self.active if self.gated else None
            # NanoChat norms its embeddings by the same module, before there is a result.
            if active is None or active.result is None or active.normed:
                return norm(hidden_states)
            return hidden_states

        return needed

    def _timed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            output = forward(*args, **kwargs)
            if self.active is not None and self.gated:
                self.active.head_seconds += time.perf_counter() - began
            return output

        return timed

    def _tabled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        # Made anew each time gates go in: in between the model may have been cast.
        tables = RotaryTables(forward)

        def tabled(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            window = self.active.window if self.active is not None and self.gated else None
            regular = window is not None and window.uniform and window.tree is None
            if window is None or not regular or position_ids is not window.positions:
                return forward(x, position_ids, *args, **kwargs)
            return tables.view(x, window, *args, **kwargs)

        return tabled


class Gate:
    """Stands in for a decoder layer while its gates are in."""

    def __init__(self, gates: Gates, index: int, layer: nn.Module):
        self.gates = gates
        self.index = index
        self.layer = layer
        self.window = gates.windows[index]

    def __getattr__(self, name: str) -> Any:
        """What the layer has: the body may ask it for its type."""
        return getattr(self.layer, name)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; hand `hidden_states` through where it is skipped or outside the span."""
        gates = self.gates
        active = gates.active
        if active is None or gates.owner != threading.get_ident():
            # Plain use of the model, from a streamer or from another thread.
            return self.layer(hidden_states, *args, **kwargs)
        start, stop = active.span
        if self.index == stop:
            active.result = hidden_states
        if self.index == start and active.hidden is not None:
            hidden_states = active.hidden
        if self.index in active.keep:
            active.kept[self.index] = hidden_states
        if start <= self.index < stop and self.index not in active.skips.layers:
            output = self._run(active, hidden_states, args, kwargs)
        else:
            output = (hidden_states,) if gates.returns_tuple else hidden_states
        if self.index == stop - 1 and stop == len(gates.layers):
            left = output[0] if isinstance(output, tuple) else output
            active.result = active.kept[stop] = left
        return output

    def _run(
        self,
        active: ActivePass,
        hidden_states: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        gates = self.gates
        if active.masks:
            args, kwargs = _with_mask(args, kwargs, active, self.window)
        own = active.own if self.index == active.span.stop - 1 else None
        if own is not None:
            return self._run_own(own, active, hidden_states, args, kwargs)
        layer = self.layer
        skipped = gates.sublayers.skipped(self.index, active.skips)
        began = time.perf_counter()
        if skipped:
            with gates.skipping(skipped):
                output = layer(hidden_states, *args, **kwargs)
        else:
            output = self._call(layer, hidden_states, args, kwargs)
        active.layer_seconds += time.perf_counter() - began
        gates.returns_tuple = isinstance(output, tuple)
        return output

    def _run_own(
        self,
        own: Own,
        active: ActivePass,
        hidden_states: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        began = time.perf_counter()
        if own.enter is not None:
            hidden_states = own.enter(hidden_states)
        if hasattr(self.layer, "_hf_hook"):  # which brings the layer what comes from elsewhere
            device = device_of(own.layer)
            args, kwargs = send_to_device((args, kwargs), device, skip_keys="past_key_values")
        output = self._call(own.layer, hidden_states, args, kwargs)
        active.head_seconds += time.perf_counter() - began
        return output

    def _call(
        self,
        layer: nn.Module,
        hidden_states: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        compiled = self.gates.compiled
        if compiled is None:
            return layer(hidden_states, *args, **kwargs)
        return compiled(layer, self.index, hidden_states, args, kwargs)


def _with_mask(
    args: tuple[Any, ...], kwargs: dict[str, Any], active: ActivePass, window: int | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The layer's arguments with the slots' mask for its window."""
    mask, full = active.masks[window], active.masks[None]
    if active.add_masks:
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
