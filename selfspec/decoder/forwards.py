"""What runs in place of modules' own forwards while gates are in.

Only in a pass of selfspec's, in its thread, do they do anything else than the modules' own.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from functools import cache, partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from selfspec.decoder.direct import Forward, from_transformers, lean_forward, undecorated
from selfspec.decoder.mixers import Mixers
from selfspec.decoder.passes import CurrentPass
from selfspec.decoder.rotary import LengthRotary, RotaryTables
from selfspec.decoder.sublayers import Skipped


class LeanForward:
    """Marks a `forward` that gates have put in."""

    def __init__(self, forward: Forward, whole: Forward):
        update_wrapper(self, whole)  # transformers compares `generate`'s arguments with it
        self._forward = forward

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call it."""
        return self._forward(*args, **kwargs)


def has_own_forward(module: nn.Module) -> bool:
    """Whether the `forward` of a model or a body does something that transformers' does not."""
    put_in, of_class = module.__dict__.get("forward"), type(module).forward
    if isinstance(put_in, partial) and put_in.func.__module__ == "accelerate.hooks":
        put_in = module.__dict__.get("_old_forward")  # device hooks move inputs, and call it
    known = put_in is None or isinstance(put_in, LeanForward)
    if known or getattr(put_in, "__func__", None) is of_class:
        return not from_transformers(undecorated(of_class))
    return True


def lean(current: CurrentPass, module: nn.Module) -> LeanForward:
    """The forward of a body or a causal LM, without decorators in passes.

    Hooks may do with its output whatever a `ModelOutput` allows, so with hooks it is the whole one.
    """
    whole, bare = module.forward, partial(lean_forward(type(module).forward), module)
    # One of the decorators that a lean forward leaves out may take this argument.
    drops = not _takes(type(module).forward, "return_dict")

    def forward(*args: object, **kwargs: object) -> object:
        if not current.gated or module._forward_hooks or torch_module._global_forward_hooks:
            return whole(*args, **kwargs)
        if drops:
            kwargs.pop("return_dict", None)
        return bare(*args, **kwargs)

    return LeanForward(forward, whole)


@cache
def _takes(forward: Forward, name: str) -> bool:
    return name in inspect.signature(forward).parameters


def norm_if_used(
    current: CurrentPass, forward: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """The final norm's forward, or nothing in passes that do not use its output."""

    def norm(hidden_states: Tensor) -> Tensor:
        active = current.mine
        # NanoChat applies the same module to its embeddings, before the layers run.
        if active is None or active.result is None:
            return forward(hidden_states)
        if not active.normed:
            return hidden_states
        began = time.perf_counter()
        output = forward(hidden_states)
        active.head_seconds += time.perf_counter() - began
        return output

    return norm


def read_at_ends(current: CurrentPass, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The LM head's forward, at the positions that the pass asks for."""

    def read(hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        active = current.mine
        if active is None:
            return forward(hidden_states, *args, **kwargs)
        began = time.perf_counter()
        if active.ends is not None:
            hidden_states = at_ends(hidden_states, active.ends)
        output = forward(hidden_states, *args, **kwargs)
        active.head_seconds += time.perf_counter() - began
        return output

    return read


def at_ends(states: Tensor, ends: Tensor) -> Tensor:
    """`[rows, 1, any]` the states of each row at its index in `ends`."""
    device = states.device
    return states[torch.arange(len(ends), device=device), ends.to(device)][:, None]


def from_tables(current: CurrentPass, forward: Forward) -> Forward:
    """A static rotary embedding's forward, which takes views of tables in passes."""
    # Rebuilt each time: the model may have been cast in between.
    tables = RotaryTables(forward)

    def tabled(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> object:
        active = current.mine
        window = None if active is None else active.window
        if window is not None and window.even and window.positions is position_ids:
            return tables.view(x, window, *args, **kwargs)
        return forward(x, position_ids, *args, **kwargs)

    return tabled


def by_length(current: CurrentPass, module: nn.Module, original: int) -> Forward:
    """The forward of a rotary embedding that changes beyond the length `original`."""
    forward, rotary = module.forward, LengthRotary(module, original)

    def by_length(x: Tensor, position_ids: Tensor, *args: object, **kwargs: object) -> object:
        active = current.mine
        window = None if active is None else active.window
        if window is not None and window.switch is not None:
            return rotary(x, position_ids, window.switch, *args, **kwargs)
        return forward(x, position_ids, *args, **kwargs)

    return by_length


def mixed(
    current: CurrentPass, mixers: Mixers, mixer: nn.Module, index: int, own: Forward
) -> Forward:
    """A recurrent mixer's forward `own`, with the states of the pass's slots."""

    def mixed(*args: object, **kwargs: object) -> object:
        active = current.mine
        if active is None:
            return own(*args, **kwargs)
        return mixers.run(mixer, index, active, args, kwargs)

    return mixed


def skipped(current: CurrentPass, stand_in: Skipped) -> Forward:
    """A sublayer's forward, which passes skip."""
    own = stand_in.module.forward

    def either(*args: object, **kwargs: object) -> object:
        return stand_in(own, args, kwargs) if current.gated else own(*args, **kwargs)

    return either
