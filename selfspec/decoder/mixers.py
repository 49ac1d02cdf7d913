"""Recurrent mixers, run from the state after the committed tokens.

A mixer reads the states of its convolutions and of its recurrence from its cache, and passes the
latter to a kernel of transformers (or of a package such as fla). In a pass, its cache is the
`RecurrentLayer` of the slots. The mixer's forward runs with changed globals, in which the kernels
are replaced by wrappers. A wrapper runs the kernel from the state of that layer, and the layer
stores the kernel's inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from selfspec.config import Options
from selfspec.decoder.cache import Inputs, KernelCall, RecurrentLayer
from selfspec.decoder.direct import Forward, with_globals
from selfspec.decoder.passes import CACHES, MASK, ActivePass


class Recurrence(NamedTuple):
    """How a kernel is called.

    Attributes:
        inputs: its arguments with an entry for each token, by position or name.
        state: the argument that takes the state; `None` if it starts from an empty one only.
        time: dimension of the tokens in inputs and output; `None` if it takes one token. Such a
            kernel overwrites the state; other kernels return the output and the new state.
    """

    inputs: tuple[int | str, ...]
    state: int | str | None
    time: int | None


_DELTA_RULE = Recurrence((0, 1, 2, "g", "beta"), "initial_state", time=1)
_ONE_TOKEN = Recurrence((1, 2, 4, 5, "z"), 0, time=None)

# By their names in transformers' modelling files.
KERNELS = {
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "torch_recurrent_gated_delta_rule": _DELTA_RULE,
    "mamba2_chunk_scan": Recurrence((0, 1, 3, 4), "initial_states", time=1),
    "mamba2_selective_state_update": _ONE_TOKEN,
    "mamba_selective_scan": Recurrence((0, 1, 3, 4, "z"), None, time=2),
    "mamba_selective_state_update": _ONE_TOKEN,
}


def is_mixer(module: nn.Module) -> bool:
    """Whether a module has a recurrent state."""
    return not _names(type(module)).isdisjoint({"get_conv_state", "get_linear_cache"})


def unknown_mixers(layers: nn.Module) -> set[str]:
    """Classes of mixers whose recurrence cannot be run, because their kernel is not known."""
    kinds = {type(module) for module in layers.modules()}
    return {kind.__name__ for kind in kinds if _is_unknown(_names(kind))}


def _is_unknown(names: set[str]) -> bool:
    # Zamba calls its kernel once for each of its heads.
    known = not KERNELS.keys().isdisjoint(names) and "n_mamba_heads" not in names
    return "get_recurrent_state" in names and not known


def _names(kind: type[nn.Module]) -> set[str]:
    """Globals and attributes that the forward of a class of modules uses."""
    forward = inspect.unwrap(kind.forward)
    return set(forward.__code__.co_names) if isinstance(forward, FunctionType) else set()


def _refuse_several(layers: nn.ModuleList, indices: Sequence[int]) -> None:
    """Raise ValueError if the index of a layer is there twice."""
    twice = [index for index in indices if indices.count(index) > 1]
    if twice:
        raise ValueError(
            f"a {type(layers[twice[0]]).__name__} has {indices.count(twice[0])} recurrent modules; "
            "selfspec rolls back one state per layer"
        )


class Mixers:
    """The recurrent mixers of a model's layers.

    Args:
        layers: the decoder layers.

    Attributes:
        found: each mixer, with the index of its layer.

    Raises:
        ValueError: a layer has several.
    """

    def __init__(self, layers: nn.ModuleList):
        parts = [(module, i) for i, layer in enumerate(layers) for module in layer.modules()]
        self.found = [(module, index) for module, index in parts if is_mixer(module)]
        _refuse_several(layers, [index for _, index in self.found])
        self._forwards = {
            kind: with_globals(kind.forward, self._kernels)
            for kind in {type(mixer) for mixer, _ in self.found}
        }
        # MiniMax's lightning attention calls no kernel: its whole forward is treated as one.
        self._lightning = {kind for kind in self._forwards if "get_linear_cache" in _names(kind)}
        self._layer: RecurrentLayer | None = None  # of the mixer that is running

    def run(
        self,
        mixer: nn.Module,
        index: int,
        active: ActivePass,
        args: tuple[Any, ...],
        kwargs: Options,
    ) -> Any:
        """Run the mixer of layer `index` in a pass, from the state of its slots."""
        named = next(name for name in CACHES if name in kwargs)
        slots, forward = kwargs[named], partial(self._forwards[type(mixer)], mixer)
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        others |= {MASK: None, named: None}
        if active.window is None:
            return _run_packed(partial(forward, **others), hidden, active.documents)
        layer: RecurrentLayer = slots.recurrent[index]
        window, committed = active.window, slots.lengths
        layer.begin(window.starts[0] - committed[0], window.width, slots.will_commit)
        if type(mixer) in self._lightning:
            run = partial(_run_lightning, forward, others, named)
            return layer.run(KernelCall(run, {"hidden_states": hidden}, time=1)), None
        self._layer = layer
        try:
            return forward(hidden, **{**others, named: layer})
        finally:
            self._layer = None

    def _kernels(self, named: Options) -> dict[str, Forward]:
        """Replacements for the kernels among a module's globals."""
        return {
            name: partial(self._call, KERNELS[name], named[name], named)
            for name in KERNELS.keys() & named.keys()
        }

    def _call(
        self, kernel: Recurrence, own: Forward, named: Options, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a kernel from the layer's state."""
        layer = self._layer
        if layer is None:  # packed documents, each of which starts from an empty state
            return own(*args, **kwargs)
        given = {**dict(enumerate(args)), **kwargs}
        if not layer.is_committing:
            # The model decodes with the one-token kernels, which do not clamp dt.
            given.pop("dt_limit", None)
        inputs = {name: given[name] for name in kernel.inputs if given.get(name) is not None}
        if not layer.is_committing and kernel.time == 1 and given[0].device.type == "cpu":
            given["chunk_size"] = given[0].shape[1]  # avoids padding a few tokens to a whole chunk
        one_token = named.get("mamba_selective_state_update", own)
        run = partial(_run_kernel, kernel, own, given, one_token)
        output = layer.run(KernelCall(run, inputs, kernel.time))
        return output if kernel.time is None else (output, layer.get_recurrent_state(0))


def _run_kernel(
    kernel: Recurrence,
    own: Forward,
    given: dict[int | str, Any],
    one_token: Forward,
    state: Tensor | None,
    inputs: Inputs,
) -> tuple[Tensor, Tensor]:
    """Output and new state of a kernel, called with `given` but another state and other inputs."""
    given = {**given, **inputs}
    if kernel.state is not None:
        given[kernel.state] = state
    elif state is not None:
        return _scan_on(one_token, given, state.clone())
    args = [given[name] for name in sorted(name for name in given if isinstance(name, int))]
    output = own(*args, **{name: x for name, x in given.items() if isinstance(name, str)})
    return (output, given[0]) if kernel.time is None else output  # overwritten: the new state


def _scan_on(
    one_token: Forward, given: Mapping[int | str, Any], state: Tensor
) -> tuple[Tensor, Tensor]:
    """Selective scan from a state, token by token: the fast kernel takes no initial state."""
    hidden, dt, A, B, C = (given[index] for index in range(5))
    gate, bias, softplus = given.get("z"), given.get("delta_bias"), given.get("delta_softplus")
    outputs = [
        one_token(
            state,
            hidden[..., t],
            dt[..., t],
            A,
            B[..., t],
            C[..., t],
            given.get("D"),
            z=None if gate is None else gate[..., t],
            dt_bias=bias,
            dt_softplus=bool(softplus),
        )
        for t in range(hidden.shape[-1])
    ]
    return torch.stack(outputs, dim=-1), state


class _LightningCache:
    """The state of one lightning attention, with the methods that MiniMax calls on its cache."""

    def __init__(self, state: Any):
        self.state = state

    def get_linear_cache(self, layer_idx: int) -> Any:
        return self.state

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        self.state = state


def _run_lightning(
    forward: Forward, others: Options, named: str, state: Tensor | None, inputs: Inputs
) -> tuple[Tensor, Tensor]:
    """Output and new state of a lightning attention, whose whole mixer is the kernel."""
    cache = _LightningCache(state)
    output, _ = forward(**{**others, named: cache, **inputs})
    return output, cache.state


def _run_packed(forward: Forward, hidden: Tensor, lengths: Sequence[int] | None) -> Any:
    """Run a mixer over packed documents of these lengths, each from an empty state."""
    if lengths is None:  # each row is one document
        return forward(hidden)
    documents: list[Tensor] = list(hidden.flatten(0, 1).split(list(lengths)))
    output = forward(pad_sequence(documents, batch_first=True))  # padding comes after the tokens
    padded, *rest = output if isinstance(output, tuple) else (output,)
    tokens = torch.cat([row[:length] for row, length in zip(padded, lengths, strict=True)])
    mixed = tokens.view(*hidden.shape[:2], -1)
    return (mixed, *rest) if rest else mixed
