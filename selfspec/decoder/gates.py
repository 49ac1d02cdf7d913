"""Gates in place of decoder layers turn a model's own forward into a pass over a span.

While gates are active, the model's body iterates over them instead of its layers. A gate records
what its layer is called with and hands the hidden states on; the last one has the layers of the
span run (`run.py`). Only instance attributes are replaced (`Shadows`), some by forwards that act
otherwise in passes (`forwards.py`); putting them back restores the model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.config import Kernels, Options
from selfspec.decoder import forwards
from selfspec.decoder.devices import device_of
from selfspec.decoder.direct import StandIn, parents_of, shortcuts, uncompiled
from selfspec.decoder.families import (
    PLAIN_ATTENTIONS,
    attention_of,
    causal_tables,
    refuse_attention,
    text_parts,
)
from selfspec.decoder.kernels.compiled import CompiledLayers
from selfspec.decoder.kernels.few_tokens import transposed_forwards
from selfspec.decoder.kernels.graphs import GraphedLayers
from selfspec.decoder.kernels.lean import lean_forwards
from selfspec.decoder.kernels.lean_layer import LeanLayer
from selfspec.decoder.kernels.low_precision import LowPrecisionLinears, Part
from selfspec.decoder.kernels.prepacked import PrepackedLinears, joins_heads
from selfspec.decoder.mixers import Mixers
from selfspec.decoder.passes import (
    MASK,
    ActivePass,
    Approximation,
    BodyDone,
    BodyError,
    CurrentPass,
    LayerCall,
)
from selfspec.decoder.rotary import is_static, length_rotaries
from selfspec.decoder.sublayers import Skipped, Sublayers

ValueT = TypeVar("ValueT")
_NOTHING = object()


class Shadows:
    """Attributes that are replaced for a while, and put back as they were."""

    def __init__(self) -> None:
        self._held: list[tuple[dict[str, Any], str, object]] = []

    def put(self, attributes: dict[str, ValueT], name: str, value: ValueT) -> None:
        """Replace an attribute until `undo`."""
        # It may be replaced already: by device hooks, or by an outer call of another wrapper.
        self._held.append((attributes, name, attributes.get(name, _NOTHING)))
        attributes[name] = value

    def put_all(self, attributes: dict[str, object], values: Options) -> int:
        """Replace several attributes; returns their number."""
        for name, value in values.items():
            self.put(attributes, name, value)
        return len(values)

    def undo(self, count: int) -> None:
        """Put back the last `count` attributes."""
        for _ in range(count):
            attributes, name, held = self._held[-1]
            if held is _NOTHING:
                attributes.pop(name, None)  # a module that was put there since has taken it away
            else:
                attributes[name] = held
            self._held.pop()  # only now: Ctrl-C may come at any line

    def undo_all(self) -> None:
        """Put back all."""
        try:
            self.undo(len(self._held))
        finally:
            self.undo(len(self._held))  # what Ctrl-C left


class Gate:
    """Stands in for a decoder layer while its gates are in: records what it is called with."""

    def __init__(self, gates: Gates, index: int, layer: nn.Module):
        self.gates = gates
        self.index = index
        self.layer = layer
        self.window = gates.windows[index]

    def __getattr__(self, name: str) -> Any:
        """What the layer has: the body may ask it for its type."""
        return getattr(self.layer, name)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse copies, which would have gates and no layers."""
        raise RuntimeError("copy or pickle a model between calls of `generate`")

    def __call__(self, hidden_states: Tensor, *args: object, **kwargs: object) -> object:
        """Record the call and hand its input on; the last gate runs the layers of the span."""
        gates, index = self.gates, self.index
        active = gates.current.mine
        if active is None:
            # Plain use of the model, from a streamer or from another thread.
            return self.layer(hidden_states, *args, **kwargs)
        if active.one_by_one:
            return gates.returned(self._run_now(active, hidden_states, args, kwargs))
        if index != active.count or (index and hidden_states is not active.handed):
            raise BodyError
        active.count, active.handed = index + 1, hidden_states
        if active.span.start <= index < active.span.stop:
            self._record(active, args, kwargs)
        if index == gates.depth - 1:
            hidden_states = gates.run(active, hidden_states)
        return gates.returned(hidden_states)

    def _record(self, active: ActivePass, args: tuple[object, ...], kwargs: Options) -> None:
        if active.masks:
            args, kwargs = self._masked(active, args, kwargs)
        active.calls.append(LayerCall(self.index, self.layer, args, kwargs))

    def _run_now(
        self,
        active: ActivePass,
        hidden_states: Tensor,
        args: tuple[object, ...],
        kwargs: Options,
    ) -> Tensor:
        """Run the layer alone, where the body may do more than hand its output on."""
        body_watch = active.body_watch
        if body_watch is not None:
            body_watch.receive(self.index, hidden_states)
        if self.index > active.span.stop:
            return hidden_states
        if active.span.start <= self.index < active.span.stop:
            self._record(active, args, kwargs)
        hidden_states = self.gates.run(active, hidden_states)
        return hidden_states if body_watch is None else body_watch.give(hidden_states)

    def _masked(
        self, active: ActivePass, args: tuple[object, ...], kwargs: Options
    ) -> tuple[tuple[object, ...], Options]:
        """The layer's arguments with the slots' mask for its window."""
        mask, full = active.masks[self.window], active.masks[None]
        if active.add_masks:
            return args, {**kwargs, MASK: _added(kwargs.get(MASK), mask)}
        if mask is full:
            return args, kwargs
        args = tuple(mask if arg is full else arg for arg in args)
        return args, {name: mask if arg is full else arg for name, arg in kwargs.items()}


def _added(own: Tensor | None, mask: Tensor) -> Tensor:
    """The family's own mask, which carries its position bias, with the slots' mask on top."""
    if own is None or own.dtype == torch.bool:
        return mask
    return torch.where(mask < 0, mask, own.to(mask.dtype))


def _final_norm(base: nn.Module, layers: nn.ModuleList) -> nn.Module | None:
    """The first norm behind the layers, as modules stand in the body, or the last one before them.

    Norms of embeddings may stand before the final one (BLOOM) and behind it (Gemma 4).
    """
    children = [*base.children()]
    behind = children[children.index(layers) :]
    norms = [m for m in (*behind, *children[::-1]) if "norm" in type(m).__name__.lower()]
    return norms[0] if norms else None


# A model may have several wrappers; only one at a time may put its gates in.
_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


class Gates:
    """The gates of one model: put in by `with gates:`, for one thread at a time.

    Args:
        model: the model.
        base: its body, which owns the layers.
        layers_name: their name in it.
        layers: the decoder layers.
        windows: sliding window of each, or `None`.
        run: runs the recorded calls of a pass, given the hidden states that the body hands over;
            a method of whoever keeps the gates.
        kernels: how layers are computed.

    Attributes:
        depth: number of layers.
        hands_on: whether the body only hands hidden states from layer to layer, so that its layers
            can run together; `None` before the first pass over all layers.
        current: the pass in progress, and the thread whose passes are gated.
        shadows: what is replaced while gates are in.
        returned_values: size of the tuples that layers return; 0 if they return tensors, `None`
            before the first one has run.
        final_norm: the norm between the last layer and the LM head, if there is one.
        sublayers: the sublayers that passes may skip.
        mixers: the recurrent mixers.
        parents: modules that have the body as a child, and its name there.
        entered: number of open `with gates:` blocks.
        calls_directly: whether modules without hooks are called without checking for them.
        compiled: calls compiled layers; `None` with other kernels.
        graphs: runs layers as CUDA graphs; `None` with other kernels.
        prepacked: packs linear layers; `None` with other kernels.
        low_precision: low-precision copies of linear layers.
        approximation: what passes do otherwise now, while a drafter drafts; else `None`.
        masks_one: whether passes over one token get a mask although they need none (`joins_heads`).
        others: modules of heads that run in passes.
        dtype: the model's dtype, kept here because finding it takes time.
        has_own_forward: whether the model's `forward` is not the one that transformers wrote.
        original_length: the length beyond which rotary embeddings change with the largest position
            of a pass; `None` where they do not.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        base: nn.Module,
        layers_name: str,
        layers: nn.ModuleList,
        windows: Sequence[int | None],
        run: Callable[[ActivePass, Tensor], Tensor],
        kernels: Kernels = "direct",
    ):
        self.model, self.base, self.layers = model, base, layers
        # Who owns the method owns the gates: without a cycle, models are freed when dropped.
        self._run = WeakMethod(run)
        self.depth = len(layers)
        self.layers_name, self.windows = layers_name, windows
        self.current, self.shadows = CurrentPass(), Shadows()
        self.returned_values: int | None = None
        self.hands_on: bool | None = None
        self.sublayers = Sublayers(layers)
        self._length_rotary, self.original_length = length_rotaries(base)
        self.own_masks, self._attention = causal_tables(layers), attention_of(model)
        self.mixers = Mixers(layers)
        self.final_norm = _final_norm(base, layers)
        self.parents = [*parents_of(model, base)]
        self.lock = _LOCKS.setdefault(model, threading.RLock())
        self.entered = 0
        self.compiled = CompiledLayers(model) if kernels == "compiled" else None
        self.graphs = GraphedLayers(type(model).__name__) if kernels == "graphs" else None
        for special in (self.compiled, self.graphs):
            if special is not None and self.own_masks:
                special.give_up("attention masks that are tables of its own")
            if special is not None and self.mixers.found:
                special.give_up("recurrent layers")
        self.calls_directly = kernels != "eager"
        packs = kernels == "prepacked"
        self.prepacked = PrepackedLinears(type(model).__name__) if packs else None
        self.low_precision = LowPrecisionLinears(self.current)
        self.approximation: Approximation | None = None
        self.masks_one = False
        self.others: list[nn.Module] = []
        self.dtype = model.dtype
        self._devices = model.device, model.device
        self.has_own_forward = False

    def __enter__(self) -> Gates:
        """Put the gates in; another thread that enters waits."""
        self.lock.acquire()
        self.current.owner = threading.get_ident()
        self.entered += 1
        if self.entered == 1:
            try:
                with torch.autocast("cpu", enabled=False):  # weights are packed as they are
                    self._put_in()
            except BaseException:  # packing takes memory and time
                self.__exit__()
                raise
        return self

    def _put_in(self) -> None:
        refuse_attention(self.model)
        self._check_parts()
        self._leave_states()
        current, put = self.current, self.shadows.put
        self.has_own_forward = forwards.has_own_forward(self.model)
        if self.compiled is not None:
            self.compiled.begin()
        if self.graphs is not None:
            self.graphs.begin([*self.layers, *self.others])
        if self.prepacked is not None:
            for module, forward in self.prepacked.forwards(*text_parts(self.model), *self.others):
                put(module.__dict__, "forward", forward)
            self.masks_one = joins_heads(self.model)
        if self.calls_directly and self.compiled is None:
            for module, forward in transposed_forwards(*text_parts(self.model), *self.others):
                put(module.__dict__, "forward", forward)
        if self.low_precision.wanted:
            for module, forward in self.low_precision.forwards(self.parts()):
                put(module.__dict__, "forward", forward)
        if self.prepacked is not None:
            roots = [*text_parts(self.model), *self.others]
            for module, forward in lean_forwards(roots, self.low_precision.reads_layers):
                put(module.__dict__, "forward", forward)
        for mixer, index in self.mixers.found:
            hooked = "_old_forward" in mixer.__dict__  # by accelerate, whose hook calls it
            name = "_old_forward" if hooked else "forward"
            own = getattr(mixer, name)
            mixed = forwards.mixed(current, self.mixers, mixer, index, own)
            put(mixer.__dict__, name, mixed)
        if self.calls_directly and self.compiled is None:  # torch.compile looks for modules
            for parent, name, child in shortcuts([*self.layers, *self.others]):
                put(parent.__dict__, name, child)
        gates = [Gate(self, index, layer) for index, layer in enumerate(self.layers)]
        put(self.base.__dict__, self.layers_name, gates)
        self.dtype = self.model.dtype
        self._devices = _devices(self)
        for module in (self.base, self.model):
            if self.calls_directly and self._may_be_lean(module):
                put(module.__dict__, "forward", forwards.lean(current, module))
        for parent, name in self.parents:
            put(parent.__dict__, name, StandIn(self.base, self.body))
        if self.final_norm is not None:
            norm = forwards.norm_if_used(current, self.final_norm.forward)
            put(self.final_norm.__dict__, "forward", norm)
        read = forwards.read_at_ends(current, self.lm_head.forward)
        put(self.lm_head.__dict__, "forward", read)
        for module in filter(is_static, self.base.children()):
            put(module.__dict__, "forward", forwards.from_tables(current, module.forward))
        for module in self._length_rotary:
            assert self.original_length is not None
            rotate = forwards.by_length(current, module, self.original_length)
            put(module.__dict__, "forward", rotate)

    def _may_be_lean(self, module: nn.Module) -> bool:
        """Whether only transformers' code makes and reads the output of a body or a causal LM."""
        readers = [parent for parent, _ in self.parents] if module is self.base else []
        # Device hooks have a forward of their own.
        return "forward" not in module.__dict__ and not any(
            forwards.has_own_forward(part) for part in (module, *readers)
        )

    def _check_parts(self) -> None:
        """Raise ValueError if others have taken the place of what was wrapped and checked."""
        layers = self.base._modules.get(self.layers_name)
        same = {
            "layers": layers is self.layers and len(self.layers) == self.depth,
            "body": [*parents_of(self.model, self.base)] == self.parents,
            "attention": attention_of(self.model) in (*PLAIN_ATTENTIONS, self._attention),
            "rotary embedding": length_rotaries(self.base)[0] == self._length_rotary,
        }
        for part in (name for name, is_same in same.items() if not is_same):
            raise ValueError(
                f"the {part} of {type(self.model).__name__} changed after it was wrapped; wrap it "
                "again with SelfSpecModel(...)"
            )

    def parts(self) -> dict[Part, list[nn.Module]]:
        """What drafting reads: the layers, the modules of heads, and the LM head."""
        return {"layers": [*self.layers], "heads": self.others, "lm_head": [self.lm_head]}

    @contextmanager
    def approximating(self, approximation: Approximation) -> Iterator[None]:
        """While active, this thread's passes are approximate."""
        self.low_precision.use(approximation)
        self.approximation = approximation
        try:
            yield
        finally:
            self.approximation = None
            self.low_precision.use(None)

    def _leave_states(self) -> None:
        """Leave out gradient checkpointing, and compiled code that would contain gates.

        With checkpointing layers drop the cache; there are no gradients here that it could save.
        A compiler cannot read gates. Layers stay compiled if there is nothing of ours in them.
        """
        modules = [*self.model.modules()]
        if not torch.is_grad_enabled():
            others = (part for own in self.others for part in own.modules())
            for module in (*modules, *others):
                if module.__dict__.get("gradient_checkpointing"):
                    self.shadows.put(module.__dict__, "gradient_checkpointing", False)
        compiled = [module for module in modules if uncompiled(module)]
        if not compiled:  # as nearly always: the rest takes time in every call
            return
        mixed = {index for _, index in self.mixers.found}
        plain = {
            part
            for index, layer in enumerate(self.layers)
            if index not in mixed
            for part in layer.modules()
        }
        for module in compiled:
            if module not in plain:
                self.shadows.put_all(module.__dict__, uncompiled(module))

    def body(self, *args: object, **kwargs: object) -> Any:
        """Call the body, hooks included; a pass keeps its output."""
        output = self.base(*args, **kwargs)
        active = self.current.mine
        if active is not None:
            active.body_output = output[0]
            if active.body_only:
                raise BodyDone
        return output

    def __exit__(self, *error: object) -> None:
        """Take the gates out, whatever happened."""
        self.entered -= 1
        try:
            if self.graphs is not None and self.entered == 0:
                self.graphs.end()
            if self.entered == 0:
                self.shadows.undo_all()
        finally:
            self.lock.release()

    @contextmanager
    def opening_masks(self, active: ActivePass) -> Iterator[None]:
        """Disable the model's own mask tables for a while; the pass has masks for all."""
        tables = self.own_masks
        if active.own is not None:
            tables = [*tables, *causal_tables(active.own.layer)]
        for module in tables:  # the tables assume that the last key is the query's own
            keys = active.masks[None].shape[-1]
            everything = torch.ones_like(module.get_buffer("bias")[..., :1, :1])
            self.shadows.put(module._buffers, "bias", everything.expand(-1, -1, keys, keys))
        try:
            yield
        finally:
            self.shadows.undo(len(tables))

    def run(self, active: ActivePass, hidden_states: Tensor) -> Tensor:
        """Run the recorded calls of a pass."""
        run = self._run()
        assert run is not None
        return run(active, hidden_states)

    @property
    def lm_head(self) -> nn.Module:
        """The module that turns final-norm outputs into logits."""
        lm_head = self.model.get_output_embeddings()
        assert lm_head is not None  # a model without is refused
        return lm_head

    def devices(self) -> tuple[torch.device, torch.device]:
        """Devices of the LM head, and of the embeddings, where logits come out."""
        return self._devices if self.are_in else _devices(self)

    @property
    def are_in(self) -> bool:
        """Whether the calling thread has put them in."""
        return self.entered > 0 and self.current.owner == threading.get_ident()

    @contextmanager
    def skipping(self, layer: nn.Module, skipped: Sequence[Skipped]) -> Iterator[None]:
        """Skip these sublayers of a layer in this thread's passes."""
        names = {child: name for name, child in layer.named_children()}
        shadows, whole = self.shadows, layer.__dict__.get("forward")
        count = 2 * len(skipped)
        if isinstance(whole, LeanLayer):
            shadows.put(layer.__dict__, "forward", whole.in_parts)
            count += 1
        for module in (layer, *(stand_in.module for stand_in in skipped)):
            count += shadows.put_all(module.__dict__, uncompiled(module))
        for stand_in in skipped:
            module = stand_in.module
            shadows.put(module.__dict__, "forward", forwards.skipped(self.current, stand_in))
            shadows.put(layer.__dict__, names[module], module)  # goes before its shortcut
        try:
            yield
        finally:
            shadows.undo(count)

    def returned(self, hidden_states: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        """The return value of a layer that passes `hidden_states` through unchanged."""
        count = self.returned_values
        return (hidden_states, *[None] * (count - 1)) if count else hidden_states


def _devices(gates: Gates) -> tuple[torch.device, torch.device]:
    return device_of(gates.lm_head), device_of(gates.model.get_input_embeddings())
