"""Rotary tables for all positions at once, of which a pass takes a view.

A body works its cosines and sines out anew in every pass; over few tokens that costs more than its
mask does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.decoder.cache import Pieces, Window

# Kinds whose frequencies stay what they are. Others depend on the longest position of the pass.
_STATIC = {"default", "linear", "llama3", "yarn"}
_GROWTH = 256  # least positions of a table


def is_static(module: nn.Module) -> bool:
    """Whether `module` is a rotary embedding in which a position always has the same angles."""
    kind = getattr(module, "rope_type", None)
    kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
    return kinds <= _STATIC


class RotaryTables:
    """What a static rotary embedding returns, for rows that all write the same slots.

    Args:
        forward: the embedding's own.
    """

    def __init__(self, forward: Callable[..., Any]):
        self._forward = forward
        self._tables: dict[tuple[Any, ...], Pieces] = {}

    def view(self, x: Tensor, window: Window, layer_type: str | None = None) -> Any:
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

    def _make(self, x: Tensor, window: Window, layer_type: str | None) -> Pieces:
        more = () if layer_type is None else (layer_type,)
        # A table outlives the pass that needs it first, which may have been one of inference mode.
        with torch.inference_mode(False):
            positions = torch.arange(max(2 * window.end, _GROWTH), device=x.device)
            made = self._forward(x, positions[None], *more)
        tables = (made,) if isinstance(made, Tensor) else made
        rows = len(window.starts)
        return Pieces(*(table.expand(rows, *table.shape[1:]) for table in tables), dim=1)
