"""The short path through a model whose body only hands hidden states from layer to layer.

Most bodies embed the tokens, call their layers one by one with the same few arguments, and apply a
norm. A `Survey` watches one pass through the model's own code and notes, by identity, where each
argument of each layer came from. If everything is explained, a `Route` makes the same calls with
the same arguments and nothing in between. A `Snapshot` of the model tells whether a route still
holds in the next call.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from operator import is_
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from selfspec.decoder.direct import callee_of
from selfspec.decoder.gates import Gate, Gates
from selfspec.decoder.kernels.graphs import Bound, Stretch
from selfspec.decoder.passes import MASK, ActivePass

HIDDEN = object()  # what the first layer starts from, among the values of a pass

Values = dict[Hashable, Any]  # of a pass, by keys that modules' arguments are known by


class Arguments(NamedTuple):
    """Keys of the values that a module is called with, in order and by name."""

    args: tuple[Hashable, ...]
    names: tuple[str, ...]
    keys: tuple[Hashable, ...]

    def bind(self, values: Values) -> Bound:
        """Find the values."""
        value_of = values.__getitem__  # a comprehension would be one call more
        return tuple(map(value_of, self.args)), dict(
            zip(self.names, map(value_of, self.keys), strict=True)
        )


class Step:
    """A call of a module beside the layers: of the embedding, of a rotary table.

    Args:
        key: of what it returns.
        module: the module.
        arguments: what it is called with.
    """

    def __init__(self, key: int, module: nn.Module, arguments: Arguments):
        self.key, self.module, self.arguments = key, module, arguments
        self.begin()

    def begin(self) -> None:
        """Find out how the module is to be called."""
        self.callee = callee_of(self.module)


def _take(steps: Sequence[Step], values: Values) -> None:
    """Make these calls, and add what they return."""
    # Bound as `Arguments.bind` does: to call it takes as long as to bind, ten times a round.
    value_of = values.__getitem__
    for step in steps:
        args, names, keys = step.arguments
        named = dict(zip(names, map(value_of, keys), strict=True))
        hooks, pre_hooks, module, forward = step.callee
        call = module if hooks or pre_hooks else forward
        values[step.key] = call(*map(value_of, args), **named)


class Route:
    """What a pass through a model's own code comes down to.

    Args:
        gates: the model's gates, which are in.
        first: the key of what the first layer starts from.
        into: the calls that lead there.
        beside: the calls that lead to other arguments of layers.
        layers: what each layer is called with.
        constants: arguments that are always the same.
        tail: what follows on the last layer.
    """

    def __init__(
        self,
        gates: Gates,
        first: Hashable,
        into: list[Step],
        beside: list[Step],
        layers: list[Arguments],
        constants: Values,
        tail: list[nn.Module],
    ):
        self._of, self._compiled, self._tail = gates, gates.compiled, tail
        self._first, self._into, self._beside = first, into, beside
        # What a layer is called with, and its window: few kinds, each worked out once a pass.
        of_layers = list(zip(layers, gates.windows, strict=True))
        kinds = list(dict.fromkeys(of_layers))
        self._kinds, self._kind_of = kinds, list(map(kinds.index, of_layers))
        self._constants = constants
        self.begin()

    def begin(self) -> None:
        """Find out how modules are to be called, now that the gates are in."""
        self._gates: list[Gate] = getattr(self._of.base, self._of.layers_name)
        self._layers = list(map(callee_of, self._of.layers))
        self._tail_calls = list(map(callee_of, self._tail))
        for step in (*self._into, *self._beside):
            step.begin()

    def run(self, active: ActivePass, inputs: Mapping[str, Any]) -> Tensor:
        """What the model's own code would return.

        Args:
            active: the pass.
            inputs: what the body would be called with.
        """
        values: Values = {**self._constants, **inputs}
        hidden = active.hidden
        if hidden is None:
            _take(self._into, values)
            hidden = values[self._first]
        values[HIDDEN] = hidden
        _take(self._beside, values)
        bound: list[Bound] = []
        for arguments, window in self._kinds:
            if active.masks:
                values[MASK] = active.masks[window]
            bound.append(arguments.bind(values))
        start, stop = active.span
        if active.skips is None:
            last = stop if active.own is None else stop - 1
            if start < last:
                hidden = self._through(active, hidden, start, last, bound)
            start = last
        for index in range(start, stop):  # a head's own layer, or all where some are skipped
            if index in active.keep:
                active.kept[index] = hidden
            gate = self._gates[index]
            if active.skips is None or not gate.is_skipped(active.skips):
                args, kwargs = bound[self._kind_of[index]]
                hidden = first_of(gate.run(active, hidden, args, kwargs))
        active.result = active.kept[stop] = hidden
        for hooks, pre_hooks, module, forward in self._tail_calls:
            hidden = (module if hooks or pre_hooks else forward)(hidden)
        return hidden

    def _through(
        self, active: ActivePass, hidden: Tensor, start: int, stop: int, bound: list[Bound]
    ) -> Tensor:
        """Layers that run as they are, timed as one: asking a clock takes time, too."""
        keep, kind_of, compiled = active.keep, self._kind_of, self._compiled
        began = time.perf_counter()
        if self._of.graphs is not None:
            layers = [gate.layer for gate in self._gates[start:stop]]
            stretch = Stretch(layers, start, bound, kind_of[start:stop], keep)
            output = self._of.graphs.run(active, stretch, hidden)
            if output is not None:
                active.layer_seconds += time.perf_counter() - began
                return output
        for index in range(start, stop):
            if index in keep:
                active.kept[index] = hidden
            args, kwargs = bound[kind_of[index]]
            hooks, pre_hooks, layer, forward = self._layers[index]
            if compiled is None:
                output = (layer if hooks or pre_hooks else forward)(hidden, *args, **kwargs)
            else:
                output = compiled(self._gates[index].layer, index, hidden, args, kwargs)
            hidden = output[0] if isinstance(output, tuple) else output
        active.layer_seconds += time.perf_counter() - began
        return hidden


def first_of(output: Any) -> Tensor:
    """The hidden states of what a layer returns."""
    return output[0] if isinstance(output, tuple) else output


# Finds the route through a model's own code, if there is one.


class _Seen(NamedTuple):
    """A call that was watched.

    Attributes:
        left: what shows whether code wrote into the states that it returned: their version, or a
            copy in inference mode, where they have none.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    left: Tensor | int | None


class Survey:
    """Watches a pass through the model's own code.

    Args:
        gates: the model's gates, which are in.
        inputs: what the body is called with.
    """

    def __init__(self, gates: Gates, inputs: Mapping[str, Any]):
        self._gates, self._inputs = gates, inputs
        self._layers: list[_Seen] = []
        self._others: list[_Seen] = []
        self._before = 0  # of these, how many were called before the last layer

    def __enter__(self) -> Survey:
        """Watch."""
        model, base = self._gates.model, self._gates.base
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        apart = [m for m in base.children() if m is not self._gates.layers]
        watched = dict.fromkeys(m for m in (*ends, *apart) if m is not None)
        self._hooks = [
            module.register_forward_hook(self._note, with_kwargs=True) for module in watched
        ]
        self._gates.survey = self
        return self

    def __exit__(self, *error: object) -> None:
        """Leave no trace."""
        self._gates.survey = None
        for hook in self._hooks:
            hook.remove()

    def _note(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if self._gates.gated:
            self._others.append(_Seen(module, args, kwargs, output, _mark(output)))

    def layer(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """A layer was called with `args`, its hidden states first, or skipped."""
        self._layers.append(_Seen(layer, args, kwargs, output, _mark(output)))
        self._before = len(self._others)

    def route(self, result: Tensor) -> Route | None:
        """How to `result`, what the pass returned; `None` where something is unexplained."""
        calls, gates = self._layers, self._gates
        if gates.active is None or gates.active.add_masks:  # each layer has a bias of its own
            return None
        if [seen.module for seen in calls] != list(gates.layers):
            return None
        if any(_has_changed(seen) for seen in (*calls, *self._others)):
            return None
        for before, seen in itertools.pairwise(calls):
            if not seen.args or seen.args[0] is not first_of(before.output):
                return None
        tail = self._tail(first_of(calls[-1].output), result)
        if tail is None or not calls[0].args:
            return None
        first = calls[0].args[0]
        into = _Origins(self._inputs, self._others)
        beside = _Origins(self._inputs, self._others, first)
        try:
            begin = into.key(first)
            layers = [beside.arguments(seen.args[1:], seen.kwargs) for seen in calls]
        except LookupError:
            return None
        constants = into.constants | beside.constants
        return Route(gates, begin, into.steps, beside.steps, layers, constants, tail)

    def _tail(self, last: Tensor, result: Tensor) -> list[nn.Module] | None:
        """The modules between the last layer's output and the result."""
        tail: list[nn.Module] = []
        for seen in self._others[self._before :]:
            # An LM head reads a slice of its body's output: all of it, as another object.
            if len(seen.args) != 1 or seen.kwargs or not _is_same(seen.args[0], last):
                return None
            tail.append(seen.module)
            last = seen.output
        return tail if last is result else None


class _Origins:
    """Where what layers are called with comes from.

    Args:
        inputs: what the body was called with.
        calls: of modules beside the layers.
        first: what the first layer starts from, where that may be an argument.

    Attributes:
        steps: the calls that are needed, in order.
        constants: arguments that are the same in every pass.
    """

    def __init__(self, inputs: Mapping[str, Any], calls: list[_Seen], first: Any = None):
        self._inputs, self._calls, self._first = inputs, calls, first
        self.steps: list[Step] = []
        self.constants: Values = {}

    def arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], before: int | None = None
    ) -> Arguments:
        """The keys of what a module was called with, before the call of that number.

        Raises:
            LookupError: something comes from nowhere.
        """
        in_order = tuple(self.key(value, before) for value in args)
        named = tuple(self.key(value, before) for value in kwargs.values())
        return Arguments(in_order, tuple(kwargs), named)

    def key(self, value: Any, before: int | None = None) -> Hashable:
        """The key of a value; the call that made it is added to the steps.

        Raises:
            LookupError: it comes from nowhere.
        """
        if value is None or isinstance(value, bool | str):
            constant = type(value), value
            self.constants[constant] = value
            return constant
        if value is self._first:
            return HIDDEN
        for name, given in self._inputs.items():
            if value is given:
                return name
        for index, seen in enumerate(self._calls[:before]):
            if value is seen.output:
                if all(step.key != index for step in self.steps):
                    arguments = self.arguments(seen.args, seen.kwargs, index)
                    self.steps.append(Step(index, seen.module, arguments))
                return index
        raise LookupError


def _mark(output: Any) -> Tensor | int | None:
    states = first_of(output)
    if not isinstance(states, Tensor):
        return None
    return states.clone() if states.is_inference() else states._version


def _has_changed(seen: _Seen) -> bool:
    if seen.left is None:
        return True
    states = first_of(seen.output)
    if isinstance(seen.left, int):
        return states._version != seen.left
    return not torch.equal(states, seen.left)


def _is_same(one: Any, other: Tensor) -> bool:
    """Whether these are the same numbers in the same memory."""
    return isinstance(one, Tensor) and (one is other or _place(one) == _place(other))


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Which memory a tensor is a view of, and how."""
    memory = tensor.untyped_storage()._cdata  # `is_set_to`, but for tensors without memory, too
    return memory, tensor.storage_offset(), tensor.shape, tensor.stride()


# What a model's own code goes by: while that stays the same, so does what a survey found.

_PLAIN = (bool, int, float, str, type(None))
# What any module has to itself, and what gates put there.
_INNER = vars(nn.Module()).keys() - {"training"} | {"forward"}


class Snapshot:
    """What shows of the forwards of some modules, and of what they can ask about.

    Their code and what it names (globals and methods), all attributes, children, parameters and
    buffers of the modules, the config. Plain values, and those inside lists and dictionaries, are
    compared as such, everything else by identity. Not what lies deeper: functions that the named
    ones call, attributes of other objects.

    Args:
        modules: whose forwards.
        parts: other modules that have to be the same.
    """

    def __init__(self, modules: Sequence[nn.Module], parts: Sequence[nn.Module | None] = ()):
        self._values: list[Any] = []
        self._objects: list[Any] = [*parts]
        self._inside: set[int] = set()
        for module in modules:
            self._take_module(module)

    def __eq__(self, other: object) -> bool:
        """Whether nothing has changed in between."""
        if not isinstance(other, Snapshot) or self._values != other._values:
            return False
        return len(self._objects) == len(other._objects) and all(
            map(is_, self._objects, other._objects)
        )

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def _take_module(self, module: nn.Module) -> None:
        kind, children = type(module), module._modules
        for held in (children, module._parameters, module._buffers):
            self._values += held
            self._objects += held.values()
        hidden = _INNER | children.keys()  # gates stand before children
        self._take({name: value for name, value in vars(module).items() if name not in hidden})
        forward = inspect.unwrap(kind.forward)
        self._objects += [module, kind, kind.forward, forward]
        if not isinstance(forward, FunctionType):
            return
        self._objects.append(forward.__code__)
        for name in _names(forward.__code__):
            found = [part for part in kind.__mro__ if name in part.__dict__]
            self._objects += [part.__dict__[name] for part in found[:1]]
            self._objects.append(forward.__globals__.get(name))

    def _take(self, value: Any) -> None:
        if isinstance(value, _PLAIN):
            self._values.append(value)
            return
        config = isinstance(value, PreTrainedConfig)
        if config or not isinstance(value, list | tuple | dict):
            self._objects.append(value)
        if id(value) in self._inside:  # it holds itself
            return
        self._inside.add(id(value))
        if config or isinstance(value, dict):
            held = vars(value) if config else value
            self._take(list(map(str, held)))
            self._take(list(held.values()))
        elif isinstance(value, list | tuple):
            self._values.append(len(value))
            for part in value:
                self._take(part)
        self._inside.discard(id(value))


@cache
def _names(code: CodeType) -> frozenset[str]:
    """What the code, and functions inside it, ask for by name."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return frozenset(code.co_names).union(*map(_names, inner))
