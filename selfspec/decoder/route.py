"""The short way through a model whose body does nothing but hand tokens from layer to layer.

Most bodies look tokens up, pass the result through their layers one by one, and hand each of them
the same few things. What else their code does, in every pass, finds out what a pass knows anyway. A
`Route` is what is left: the same calls of the same modules with the same arguments, and nothing in
between. A `Survey` finds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor, nn

from selfspec.decoder.direct import direct
from selfspec.decoder.gate import Gate
from selfspec.decoder.gates import Gates
from selfspec.decoder.inputs import MASK
from selfspec.decoder.passes import ActivePass

HIDDEN = object()  # what the first layer starts from, among the values of a pass

Values = dict[Hashable, Any]  # of a pass, by keys that modules' arguments are known by
_Bound = tuple[tuple[Any, ...], dict[str, Any]]  # what a module is called with


class Arguments(NamedTuple):
    """Keys of the values that a module is called with."""

    args: tuple[Hashable, ...]
    kwargs: tuple[tuple[str, Hashable], ...]

    def binder(self) -> Callable[[Values], _Bound]:
        """What finds the values."""
        names = [name for name, _ in self.kwargs]
        args, named = _finder(self.args), _finder([key for _, key in self.kwargs])
        return lambda values: (args(values), dict(zip(names, named(values), strict=True)))


def _finder(keys: Sequence[Hashable]) -> Callable[[Values], tuple[Any, ...]]:
    """What looks these keys up."""
    if len(keys) > 1:
        return itemgetter(*keys)
    return lambda values: tuple([values[key] for key in keys])


class Step(NamedTuple):
    """A call of a module beside the layers: of the embedding, of a rotary table."""

    key: int
    call: Callable[..., Any]
    bind: Callable[[Values], _Bound]

    def run(self, values: Values) -> None:
        """Call it, and add what it returns."""
        args, kwargs = self.bind(values)
        values[self.key] = self.call(*args, **kwargs)


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
        self._gates: list[Gate] = getattr(gates.base, gates.layers_name)
        self._layers = list(map(direct, gates.layers))
        self._compiled = gates.compiled
        self._first, self._into, self._beside = first, into, beside
        self._tail = list(map(direct, tail))
        # What a layer is called with, and its window: few kinds, each worked out once a pass.
        of_layers = list(zip(layers, gates.windows, strict=True))
        kinds = list(dict.fromkeys(of_layers))
        self._kinds = [(arguments.binder(), window) for arguments, window in kinds]
        self._kind_of = list(map(kinds.index, of_layers))
        self._constants = constants

    def run(self, active: ActivePass, inputs: Mapping[str, Any]) -> Tensor:
        """What the model's own code would return.

        Args:
            active: the pass.
            inputs: what the body would be called with.
        """
        values: Values = {**self._constants, **inputs}
        hidden = active.hidden
        if hidden is None:
            for step in self._into:
                step.run(values)
            hidden = values[self._first]
        values[HIDDEN] = hidden
        for step in self._beside:
            step.run(values)
        bound: list[_Bound] = []
        for bind, window in self._kinds:
            if active.masks:
                values[MASK] = active.masks[window]
            bound.append(bind(values))
        start, stop = active.span
        if active.skips is None:
            last = stop if active.own is None else stop - 1
            if start < last:
                hidden = self._through(active, hidden, start, last, bound)
            start = last
        for index, gate in enumerate(self._gates[start:stop], start):
            if index in active.keep:
                active.kept[index] = hidden
            if not gate.is_skipped(active):
                args, kwargs = bound[self._kind_of[index]]
                hidden = first_of(gate.run(active, hidden, args, kwargs))
        active.result = active.kept[stop] = hidden
        for call in self._tail:
            hidden = call(hidden)
        return hidden

    def _through(
        self, active: ActivePass, hidden: Tensor, start: int, stop: int, bound: list[_Bound]
    ) -> Tensor:
        """Layers that run as they are, timed as one: asking a clock takes time, too."""
        keep, kind_of, compiled = active.keep, self._kind_of, self._compiled
        began = time.perf_counter()
        for index, call in enumerate(self._layers[start:stop], start):
            if index in keep:
                active.kept[index] = hidden
            args, kwargs = bound[kind_of[index]]
            if compiled is None:
                hidden = first_of(call(hidden, *args, **kwargs))
            else:
                hidden = first_of(compiled(self._gates[index].layer, index, hidden, args, kwargs))
        active.layer_seconds += time.perf_counter() - began
        return hidden


def first_of(output: Any) -> Tensor:
    """The hidden states of what a layer returns."""
    return output[0] if isinstance(output, tuple) else output
