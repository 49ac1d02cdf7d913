"""Rotary embeddings in passes: computed once for all positions, or by a pass's largest position.

Where frequencies are constant, tables hold all positions and a pass takes a view. LongRoPE and
dynamic NTK choose their frequencies by the largest position of a pass; each token then gets those
that it has in plain decoding.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.decoder.cache import GROWTH, SlicedViews, Switch, Window
from selfspec.decoder.direct import Forward

# Rotary types with constant frequencies. Others depend on the longest position of the pass.
_STATIC = {"default", "linear", "llama3", "yarn"}


def _rope_types(module: nn.Module) -> dict[str | None, str | None]:
    """Rotary types of a rotary embedding by the kind of layers; `None` for all of them."""
    kind = vars(module).get("rope_type")  # asking a module for what it lacks takes long
    return kind if isinstance(kind, dict) else {None: kind}


def is_static(module: nn.Module) -> bool:
    """Whether `module` is a rotary embedding with constant frequencies."""
    return set(_rope_types(module).values()) <= _STATIC


class RotaryTables:
    """Tables of a static rotary embedding, for rows that all write the same slots.

    Args:
        forward: the embedding's own.
    """

    def __init__(self, forward: Forward):
        self._forward = forward
        self._tables: dict[tuple[object, ...], SlicedViews] = {}

    def view(
        self, x: Tensor, window: Window, layer_type: str | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """What `forward` returns for the window's positions.

        Args:
            x: a tensor with the wanted dtype and device.
            window: the slots of the pass, uniform.
            layer_type: the kind of layers, where an embedding serves several.
        """
        key = len(window.starts), layer_type, x.dtype, x.device
        tables = self._tables.get(key)
        if tables is None or tables.length < window.end:
            tables = self._tables[key] = self._make(x, window, layer_type)
        views = tables.view(window.starts[0], window.width)
        if len(views) == 1:
            return views[0]
        return views

    def _make(self, x: Tensor, window: Window, layer_type: str | None) -> SlicedViews:
        more = () if layer_type is None else (layer_type,)
        # A table outlives its first pass, which may run in inference mode.
        with torch.inference_mode(False):
            positions = torch.arange(max(2 * window.end, GROWTH), device=x.device)
            made = self._forward(x, positions[None], *more)
        tables = (made,) if isinstance(made, Tensor) else made
        rows = len(window.starts)
        return SlicedViews(*(table.expand(rows, *table.shape[1:]) for table in tables), dim=1)


# Rotary embeddings that choose their frequencies by the largest position of a pass.


def _original_lengths(module: nn.Module) -> set[int]:
    """The lengths beyond which a rotary embedding takes other frequencies."""
    lengths: set[int] = set()
    for layer_type, kind in _rope_types(module).items():
        if kind == "longrope":
            parameters = module.config.rope_parameters  # pyright: ignore
            parameters = parameters if layer_type is None else parameters[layer_type]  # pyright: ignore
            lengths.add(parameters["original_max_position_embeddings"])  # pyright: ignore
        elif kind is not None and "dynamic" in kind:
            lengths.add(module.original_max_seq_len)  # pyright: ignore
    return lengths


def length_rotaries(base: nn.Module) -> tuple[list[nn.Module], int | None]:
    """Rotary embeddings whose frequencies depend on the largest position of a pass.

    Returns:
        The embeddings, and the length beyond which they change; `None` without such embeddings.

    Raises:
        ValueError: they change at different lengths.
    """
    found = {module: _original_lengths(module) for module in base.modules()}
    lengths = sorted(set().union(*found.values()))
    if len(lengths) > 1:
        raise ValueError(
            f"{type(base).__name__} has rotary embeddings that change beyond different lengths "
            f"({', '.join(map(str, lengths))} tokens), which selfspec does not run"
        )
    return [module for module, own in found.items() if own], next(iter(lengths), None)


class LengthRotary:
    """Gives each token the frequencies that it has in plain decoding, whatever its pass holds.

    Args:
        module: a rotary embedding of `length_rotaries`.
        original: the length beyond which it changes.
    """

    def __init__(self, module: nn.Module, original: int):
        # It remembers the longest pass, so the model's own is left alone.
        self._own = copy.copy(module)
        self._own._buffers = {name: _clone(value) for name, value in module._buffers.items()}
        self._original = original
        # LongRoPE has two sets of frequencies, dynamic NTK one for each length.
        self._two = "longrope" in _rope_types(module).values()

    def __call__(
        self, x: Tensor, positions: Tensor, switch: Switch, *args: object, **kwargs: object
    ) -> Tensor | tuple[Tensor, ...]:
        """What the embedding returns for `positions` `[rows, width]`."""
        # How far the plain pass of a token goes beyond the original length, from -1: it does not.
        first, last = (max(end, -1) for end in (switch.first, switch.last))
        if self._two:
            first, last = min(first, 0), min(last, 0)
        made = self._run(x, positions, self._original + first, *args, **kwargs)
        for step in range(first + 1, last + 1):
            beyond = positions - torch.tensor(switch.at, device=positions.device)[:, None]
            here = self._run(x, positions, self._original + step, *args, **kwargs)
            made = _where((beyond >= step)[..., None], here, made)
        return made

    def _run(
        self, x: Tensor, positions: Tensor, largest: int, *args: object, **kwargs: object
    ) -> Tensor | tuple[Tensor, ...]:
        """What it returns for positions up to `largest` in a pass that reaches it."""
        forward = partial(type(self._own).forward, self._own, x)
        if not self._two:
            forward(torch.zeros_like(positions[:1, :1]), *args, **kwargs)  # forgets longer passes
        if not self._two or largest < self._original:
            positions = positions.clamp(max=largest)
        wider = torch.nn.functional.pad(positions, (0, 1), value=largest)
        made = forward(wider, *args, **kwargs)
        return made[:, :-1] if isinstance(made, Tensor) else tuple(part[:, :-1] for part in made)


def _clone(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.clone()


def _where(chosen: Tensor, one: Any, other: Any) -> Tensor | tuple[Tensor, ...]:
    if isinstance(one, Tensor):
        return torch.where(chosen, one, other)
    return tuple(torch.where(chosen, a, b) for a, b in zip(one, other, strict=True))
