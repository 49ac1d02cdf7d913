"""The short way through a model whose body does nothing but hand tokens from layer to layer.

Most bodies look tokens up, pass the result through their layers one by one, and hand each of them
the same few things. What else their code does, in every pass, finds out what a pass knows anyway. A
`Route` is what is left: the same calls of the same modules with the same arguments, and nothing in
between. A `Survey` finds it.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from selfspec.decoder.direct import callee_of
from selfspec.decoder.gate import Gate
from selfspec.decoder.gates import Gates
from selfspec.decoder.inputs import MASK
from selfspec.decoder.kernels.graphs import Bound, Stretch
from selfspec.decoder.passes import ActivePass

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
