"""Finds the route through a model's own code, if there is one.

A `Survey` watches one pass and notes, by identity, where every argument of every layer came from.
If nothing is left unexplained, there is a `Route`.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from selfspec.decoder.gates import Gates
from selfspec.decoder.route import HIDDEN, Arguments, Route, Step, Values, first_of


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
    """Whether these are the same numbers in the same place."""
    return isinstance(one, Tensor) and (one is other or _place(one) == _place(other))


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Which memory a tensor is a view of, and how."""
    memory = tensor.untyped_storage()._cdata  # `is_set_to`, but for tensors without memory, too
    return memory, tensor.storage_offset(), tensor.shape, tensor.stride()
