"""The layouts of the Medusa repository and of vLLM's Medusa heads."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from selfspec.decoder import Decoder
from selfspec.heads.formats.files import PublishedHead, fill
from selfspec.heads.medusa import MedusaHead

_PREFIX = re.compile(r"^medusa_heads?\.")
_BLOCK = re.compile(r"^(?:blocks\.)?(\d+)\.(?:layers\.)?(\d+)(?:\.linear)?\.(weight|bias)$")
_READOUT = re.compile(r"^lm_heads\.(\d+)\.weight$")


def matches(published: PublishedHead) -> bool:
    """Whether the config is one of Medusa."""
    config = published.config
    named = config.get("model_type") == "medusa" or "medusa_num_heads" in config
    return named or config.get("architectures") == ["MedusaModel"]


def read(decoder: Decoder, published: PublishedHead) -> MedusaHead:
    """Make the head.

    Raises:
        ValueError: it does not fit the target.
    """
    config, tensors = published.config, published.tensors
    heads = int(config.get("medusa_num_heads", config.get("num_heads", 0)))
    layers = int(config.get("medusa_num_layers", config.get("num_hidden_layers", 1)))
    names = _names(tensors, layers)
    shapes = {own: tensors[name].shape for name, own in names.items()}
    first = shapes.get("blocks.0.layers.0.weight")
    if first is None or not heads:
        raise ValueError(
            f"the head in {published.folder} lacks a tensor: the first block of {heads} heads"
        )
    if first[0] != decoder.config.hidden_size:
        raise ValueError(
            f"the head in {published.folder} was made for a target of hidden size {first[0]}, this "
            f"one has {decoder.config.hidden_size}; load the target it was made for"
        )
    shared = bool(config.get("original_lm_head", False))  # one LM head for all positions
    rows = shapes.get("readouts.0.weight")
    head = MedusaHead.build(
        decoder,
        0,
        heads=heads,
        layers=layers,
        bias="blocks.0.layers.0.bias" in shapes,
        vocabulary=0 if rows is None or shared else rows[0],
    )
    if "token_map" in tensors:
        head.trim(decoder, tensors["token_map"].long())
    if shared:
        names = {name: own for name, own in names.items() if not own.startswith("readouts.")}
    fill(head, published, names)
    return head


def _names(tensors: Mapping[str, Tensor], layers: int) -> dict[str, str]:
    """For each published tensor, its name in our heads."""
    found: dict[str, str] = {}
    for name in tensors:
        if name == "token_map":
            continue
        own = _PREFIX.sub("", name)
        block, readout = _BLOCK.match(own), _READOUT.match(own)
        if block is not None and int(block[2]) < layers:
            found[name] = f"blocks.{block[1]}.layers.{block[2]}.{block[3]}"
        elif block is not None and int(block[2]) == layers:
            found[name] = f"readouts.{block[1]}.weight"
        elif readout is not None:
            found[name] = f"readouts.{readout[1]}.weight"
        else:
            found[name] = own
    return found
