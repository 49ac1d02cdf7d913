"""The attention and the MLP of a decoder layer, and how they are skipped."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.config import Options
from selfspec.decoder.direct import Forward
from selfspec.decoder.passes import Skips

_NAMES = {
    "attention": re.compile(r"(self_)?att(n|ention)"),
    "mlp": re.compile(r"(shared_)?mlp|ffn|feed_forward|(block_sparse_)?moe"),
}
_CLASSES = {
    "attention": re.compile(r"Attention$"),
    "mlp": re.compile(r"(MLP|FFN|FeedForward|MoE|Moe|MoeBlock)$"),
}


class Skipped:
    """Replaces the `forward` of a sublayer while it is skipped.

    Args:
        module: the sublayer.
        others: number of values it returns beside the hidden states; `None` until it has run.
    """

    def __init__(self, module: nn.Module, others: int | None = None):
        self.module, self._others = module, others
        self._names = list(inspect.signature(type(module).forward).parameters)[1:]

    def __call__(self, own: Forward, args: tuple[object, ...], kwargs: Options) -> Any:
        """Return what `own` would return if it added nothing."""
        if self._others is None:
            # Families differ in what attention or experts return, so the sublayer runs once. The
            # KV that it writes lies after the committed tokens and is overwritten later.
            output = own(*args, **kwargs)
            self._others = len(output) - 1 if isinstance(output, tuple) else 0
        given: Options = {**dict(zip(self._names, args, strict=False)), **kwargs}
        residual: Tensor | None = given.get("residual")
        # A module around the sublayer may take all as `**kwargs`, so that its name is not known.
        first: Any = next(iter(given.values()))
        hidden: Tensor = given.get(self._names[0], first)
        added = torch.zeros_like(hidden) if residual is None else residual
        return (added, *[None] * self._others) if self._others else added


class SkippedHalf(Skipped):
    """The first linear layer of an MLP without a module of its own (OPT)."""

    def __call__(self, own: Forward, args: tuple[object, ...], kwargs: Options) -> Any:
        """Return the input, which gives the second layer's zeros their width."""
        return args[0]


class Sublayers:
    """The sublayers of every layer.

    Args:
        layers: the decoder layers.
    """

    def __init__(self, layers: nn.ModuleList):
        self._layers = layers
        self._found: dict[tuple[int, str], list[Skipped]] = {}

    def skipped(self, index: int, skips: Skips) -> list[Skipped]:
        """Replacements for the skipped sublayers of a layer that is skipped in part."""
        stand_ins: list[Skipped] = []
        for kind, chosen in (("attention", skips.attention), ("mlp", skips.mlp)):
            if index in chosen:
                stand_ins += self._find(index, kind)
        return stand_ins

    def check(self, skips: Skips) -> None:
        """Raise ValueError unless every skipped sublayer exists and something is left to run."""
        depth = len(self._layers)
        for kind, chosen in (("attention", skips.attention), ("mlp", skips.mlp)):
            strange = sorted(index for index in chosen if not 0 <= index < depth)
            if strange:
                raise ValueError(
                    f"skip.{kind} must name layers in [0, {depth - 1}], got {strange}; "
                    f"the model has {depth} layers"
                )
        if len(skips.layers) == depth:
            raise ValueError(
                f"the skip set leaves nothing of the model's {depth} layers; "
                "keep at least one attention or MLP"
            )
        for index in (skips.attention | skips.mlp) - skips.layers:
            kind = "attention" if index in skips.attention else "mlp"
            if not self._find(index, kind):
                layer = self._layers[index]
                children = ", ".join(name for name, _ in layer.named_children())
                raise ValueError(
                    f"cannot tell the {kind} of layer {index}, a {type(layer).__name__}, among its "
                    f"children ({children}); skip whole layers, named in both skip.attention and "
                    "skip.mlp"
                )

    def _find(self, index: int, kind: str) -> list[Skipped]:
        layer, found = self._layers[index], self._found.get((index, kind))
        if found is None or not {stand_in.module for stand_in in found} <= {*layer.children()}:
            found = self._found[index, kind] = _find(layer, kind)
        return found


def _find(layer: nn.Module, kind: str) -> list[Skipped]:
    children = dict(layer.named_children())
    found = [
        Skipped(child)
        for name, child in children.items()
        if _NAMES[kind].fullmatch(name) or _CLASSES[kind].search(type(child).__name__)
    ]
    if not found and kind == "mlp" and {"fc1", "fc2"} <= children.keys():
        return [SkippedHalf(children["fc1"]), Skipped(children["fc2"], others=0)]
    return found
