"""The layout of the speculators library (`RedHatAI/*-speculator.eagle3`)."""

from __future__ import annotations

from selfspec.decoder import Decoder
from selfspec.heads.eagle3 import Eagle3Head
from selfspec.heads.formats.dflash import SPECULATORS
from selfspec.heads.formats.eagle import read_eagle3
from selfspec.heads.formats.files import PublishedHead

_EAGLE3 = ("eagle3", "peagle")


def matches(published: PublishedHead) -> bool:
    """Whether the config is one of speculators."""
    return "speculators_model_type" in published.config


def read(decoder: Decoder, published: PublishedHead) -> Eagle3Head:
    """Make the head.

    Raises:
        ValueError: it is of an algorithm that is not covered, or does not fit the target.
    """
    config = published.config
    algorithm = config["speculators_model_type"]
    if algorithm not in _EAGLE3:
        raise ValueError(
            f"the head in {published.folder} is of the speculators type {algorithm!r}; selfspec "
            f"reads {', '.join(map(repr, (*_EAGLE3, *SPECULATORS)))}"
        )
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError(
            f"config.json in {published.folder} lacks transformer_layer_config, the config of the "
            "head's layer"
        )
    # Like vLLM: where the key is missing, the file is of a version that normed before.
    flags = {"norm_before_residual": True, **config}
    if algorithm == "peagle" and "mask_hidden" not in published.tensors:
        raise ValueError(f"the head in {published.folder} is a P-EAGLE one, but lacks mask_hidden")
    return read_eagle3(decoder, published, layer, flags)
