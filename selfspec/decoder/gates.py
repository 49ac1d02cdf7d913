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
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.config import Kernels
from selfspec.decoder.direct import is_watched, shortcuts
from selfspec.decoder.gate import Gate
from selfspec.decoder.kernels.compiled import CompiledLayers
from selfspec.decoder.kernels.graphs import GraphedLayers
from selfspec.decoder.kernels.prepacked import PrepackedLinears
from selfspec.decoder.lean import lean_forward
from selfspec.decoder.passes import ActivePass
from selfspec.decoder.rotary import RotaryTables, is_static
from selfspec.decoder.sublayers import Skipped, Sublayers
from selfspec.decoder.support import causal_tables, path_to

if TYPE_CHECKING:
    from selfspec.decoder.survey import Survey

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
        kernels: what computes the layers.

    Attributes:
        depth: number of layers.
        active: the pass in progress, which the model's forward then is.
        owner: the thread whose passes are gated; any other uses the model as it is.
        returns_tuple: whether layers return tuples; known once one has run.
        final_norm: the norm between the last layer and the LM head, if there is one.
        sublayers: what passes may skip of each layer.
        entered: how many `with gates:` are open.
        compiled: how layers are called; `None` for as they are.
        graphs: how stretches of layers are run; `None` for layer by layer.
        prepacked: how linear maps are called; `None` for as they are.
        others: modules of heads, which run in passes beside the model's own.
        survey: what watches the pass in progress, if anything does.
        dtype: the model's, which takes time to find.
        path: the model, modules between it and its body, and that.
        bare: whether nobody but the gates hangs on the forward of any of these.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        base: nn.Module,
        layers_name: str,
        layers: nn.ModuleList,
        windows: Sequence[int | None],
        kernels: Kernels = "eager",
    ):
        self.model, self.base, self.layers = model, base, layers
        self.depth = len(layers)
        self.path = path_to(base, model)
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
        self.compiled = CompiledLayers(type(model).__name__) if kernels == "compiled" else None
        self.graphs = GraphedLayers(type(model).__name__) if kernels == "graphs" else None
        for special in (self.compiled, self.graphs):
            if special is not None and self.own_masks:
                special.give_up("attention masks that are tables of its own")
        packs = kernels == "prepacked"
        self.prepacked = PrepackedLinears(type(model).__name__) if packs else None
        self.others: list[nn.Module] = []
        self.survey: Survey | None = None
        self.bare = False
        self.dtype = model.dtype
        self._tables: list[nn.Module] = []
        self._shadows: list[tuple[dict[str, Any], str, Any]] = []

    def __enter__(self) -> Gates:
        """Put the gates in; another thread that enters waits."""
        self.lock.acquire()
        self.owner = threading.get_ident()
        self.entered += 1
        if self.entered == 1:
            try:
                self._put_in()
            except BaseException:  # packing takes memory and time
                self.__exit__()
                raise
        return self

    def _put_in(self) -> None:
        if self.compiled is not None:
            self.compiled.begin()
        if self.graphs is not None:
            self.graphs.begin([*self.layers, *self.others])
        if self.prepacked is not None:
            for module, forward in self.prepacked.forwards(self.model, *self.others):
                self.shadow(module.__dict__, "forward", forward)
        if self.compiled is None:  # torch.compile looks for modules
            for parent, name, child in shortcuts([*self.layers, *self.others]):
                self.shadow(parent.__dict__, name, child)
        gates = [Gate(self, index, layer) for index, layer in enumerate(self.layers)]
        self.shadow(self.base.__dict__, self.layers_name, gates)
        self.dtype = self.model.dtype
        self.bare = not any(map(_is_hung_on, self.path))
        for module in (self.base, self.model):
            if "forward" not in module.__dict__:  # else device hooks have one of their own
                self.shadow(module.__dict__, "forward", self._lean(module))
        if self.final_norm is not None:
            norm = self._norm(self.final_norm.forward)
            self.shadow(self.final_norm.__dict__, "forward", norm)
        lm_head = self.model.get_output_embeddings()
        assert lm_head is not None  # a model without is refused
        self.shadow(lm_head.__dict__, "forward", self._read(lm_head.forward))
        for module in self._rotary:
            self.shadow(module.__dict__, "forward", self._tabled(module.forward))

    def __exit__(self, *error: object) -> None:
        """Take the gates out, whatever happened."""
        self.entered -= 1
        try:
            if self.graphs is not None and self.entered == 0:
                self.graphs.end()
            while self._shadows and self.entered == 0:
                self.unshadow()
        finally:
            self.lock.release()

    def open_masks(self, active: ActivePass) -> None:
        """Have the model's own mask tables hide nothing until `close_masks`: a pass brings all."""
        self._tables = self.own_masks
        if active.own is not None:
            self._tables = [*self._tables, *causal_tables(active.own.layer)]
        for module in self._tables:  # which assume that keys end at the query
            keys = active.masks[None].shape[-1]
            everything = torch.ones_like(module.get_buffer("bias")[..., :1, :1])
            self.shadow(module._buffers, "bias", everything.expand(-1, -1, keys, keys))

    def close_masks(self) -> None:
        """Put the model's own mask tables back."""
        for _ in self._tables:
            self.unshadow()

    @contextmanager
    def skipping(self, layer: nn.Module, skipped: Sequence[Skipped]) -> Iterator[None]:
        """While active, these sublayers of a layer add nothing in this thread's passes."""
        names = {child: name for name, child in layer.named_children()}
        for stand_in in skipped:
            module = stand_in.module
            self.shadow(module.__dict__, "forward", self._either(stand_in, module.forward))
            self.shadow(layer.__dict__, names[module], module)  # goes before its shortcut
        try:
            yield
        finally:
            for _ in skipped:
                self.unshadow()
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
            attributes.pop(name, None)  # a module that was put there since has taken it away
        else:
            attributes[name] = held

    @property
    def gated(self) -> bool:
        """Whether the calling thread is inside a pass."""
        return self.active is not None and self.owner == threading.get_ident()

    def _lean(self, module: nn.Module) -> Callable[..., Any]:
        whole, lean = module.forward, partial(lean_forward(type(module).forward), module)
        return lambda *args, **kwargs: (lean if self.gated else whole)(*args, **kwargs)

    def _norm(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The final norm: what a head has in its place, or nothing where nobody reads it."""

        def norm(hidden_states: Tensor) -> Tensor:
            active = self.active
            if active is None or self.owner != threading.get_ident():
                return forward(hidden_states)
            began, own = time.perf_counter(), active.own
            # NanoChat norms its embeddings by the same module, before there is a result.
            if active.result is None:
                output = forward(hidden_states)
            elif own is not None and own.leave is not None:
                output = own.leave(hidden_states)
            else:
                output = forward(hidden_states) if active.normed else hidden_states
            active.head_seconds += time.perf_counter() - began
            return output

        return norm

    def _read(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The LM head, or what a head reads, and by what."""

        def read(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            active = self.active
            if active is None or self.owner != threading.get_ident():
                return forward(hidden_states, *args, **kwargs)
            began, own = time.perf_counter(), active.own
            if own is not None and own.at is not None:
                hidden_states = own.at(hidden_states)
            if own is None or own.readout is None:
                output = forward(hidden_states, *args, **kwargs)
            else:
                output = own.readout(hidden_states)
            active.head_seconds += time.perf_counter() - began
            return output

        return read

    def _tabled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        # Made anew each time gates go in: in between the model may have been cast.
        tables = RotaryTables(forward)

        def tabled(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            active = self.active
            if active is not None and self.owner == threading.get_ident():
                window = active.window
                if window is not None and window.even and window.positions is position_ids:
                    return tables.view(x, window, *args, **kwargs)
            return forward(x, position_ids, *args, **kwargs)

        return tabled


def _is_hung_on(module: nn.Module) -> bool:
    return is_watched(module) or "forward" in module.__dict__
