"""The first layers of a target and an exit head, as one stock model of the same architecture."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.decoder import Decoder
from selfspec.decoder.support import layer_windows
from selfspec.export.readout import folded_readout
from selfspec.export.shorten import shortened
from selfspec.heads import ExitHead

FOLDABLE = ("block", "lora", "lens", "shared")
"""Kinds of heads that fold, the best drafters first."""


def check_foldable(head: ExitHead, fitted: Sequence[ExitHead] = ()) -> None:
    """Raise ValueError, naming the nearest of the `fitted` heads that folds, unless `head` does."""
    if head.kind in FOLDABLE:
        return
    others = [other for other in fitted if other.kind in FOLDABLE]
    others.sort(key=lambda h: (abs(h.exit_layer - head.exit_layer), FOLDABLE.index(h.kind)))
    kind, exit_layer = "shared", max(1, head.exit_layer)
    if others:
        kind, exit_layer = others[0].kind, others[0].exit_layer
    raise ValueError(
        f"a {head.kind} head does not fold into a stock checkpoint, which has no place for what "
        f"it reads of the target's own passes; the nearest that does is {kind!r} at exit_layer "
        f"{exit_layer} (--head {kind} --exit-layer {exit_layer})"
    )


@torch.no_grad()
def fold(decoder: Decoder, head: ExitHead) -> PreTrainedModel:
    """A model of the target's own class that says what an exit says.

    It has the layers below the exit, the head's own layer above them if there is one, the head's
    norm as its final norm, and an LM head that contains a lens's or an adapter's correction. Over
    a trimmed vocabulary its likeliest token is the head's.

    Args:
        decoder: the target.
        head: the exit head, fitted to it.

    Returns:
        A model to be saved: its weights are the target's own tensors where they are the same, and
        buffers that a checkpoint does not hold are not there.

    Raises:
        ValueError: the head's kind does not fold; the target is quantized or carries adapters; no
            model of its class has such layers.
    """
    check_foldable(head)
    _check_plain(decoder)
    places = [*range(head.exit_layer), *([] if head.layer is None else [head.place])]
    readout = folded_readout(decoder, head)
    config = shortened(decoder.causal_lm.config, places)
    text = config.get_text_config(decoder=True)
    if readout:
        config.tie_word_embeddings = text.tie_word_embeddings = False
    config.dtype = decoder.dtype
    _check_windows(decoder, head, layer_windows(text, len(places)), places)
    with torch.device("meta"):
        draft = type(decoder.causal_lm)(config)
    _fill(draft, _weights(decoder, head, readout), head)
    draft.generation_config = copy.deepcopy(decoder.causal_lm.generation_config)
    return draft.eval()


def _check_plain(decoder: Decoder) -> None:
    """Raise ValueError unless the target's weights are plain tensors under their own names."""
    model = decoder.causal_lm
    name = type(model).__name__
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(f"the {name} is quantized; fold the checkpoint it was made from")
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError(f"the {name} carries adapters; merge them first (merge_and_unload)")


def _check_windows(
    decoder: Decoder, head: ExitHead, windows: list[int | None], places: list[int]
) -> None:
    wanted = [decoder.windows[place] for place in places]
    if windows != wanted:
        raise ValueError(
            f"a {type(decoder.causal_lm).__name__} of {len(places)} layers would have attention "
            f"windows {windows}, and the {head.kind} head needs {wanted}; choose another exit_layer"
        )


def _weights(decoder: Decoder, head: ExitHead, readout: dict[str, Tensor]) -> dict[str, Tensor]:
    """The draft's weights by their names in a checkpoint of the target's class."""
    model = decoder.causal_lm
    names = {module: f"{name}." for name, module in model.named_modules()}
    layers, lm_head = names[decoder.layers], names[decoder.lm_head]
    weights = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith(layers) or _number(name, layers) < head.exit_layer
    }
    if head.layer is not None:
        prefix = f"{layers}{head.exit_layer}."
        weights |= _as_stored(head.layer, decoder.layers[head.place], prefix)
    norm: nn.Module | None = getattr(head, "norm", None)
    if norm is not None and decoder.final_norm is not None:
        weights |= _as_stored(norm, decoder.final_norm, names[decoder.final_norm])
    return weights | {lm_head + name: tensor for name, tensor in readout.items()}


def _as_stored(module: nn.Module, like: nn.Module, prefix: str) -> dict[str, Tensor]:
    """The weights of a head's part in the dtypes of the target's part that it is a copy of."""
    dtypes = {name: tensor.dtype for name, tensor in like.state_dict().items()}
    return {prefix + name: t.to(dtypes[name]) for name, t in module.state_dict().items()}


def _number(name: str, prefix: str) -> int:
    return int(name.removeprefix(prefix).split(".", 1)[0])


def _fill(draft: PreTrainedModel, weights: dict[str, Tensor], head: ExitHead) -> None:
    try:
        draft.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        if head.layer is None:
            raise
        raise ValueError(
            f"layer {head.exit_layer} of a {type(draft).__name__} is built unlike layer "
            f"{head.place}, whose copy the {head.kind} head is; fit the head with "
            f"place={head.exit_layer}"
        ) from error
    draft.tie_weights()
