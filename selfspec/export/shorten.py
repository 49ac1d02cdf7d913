"""The config of a model that has only some of another's layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig

# Lists of layers, by their numbers.
_NUMBERS = ("mlp_only_layers", "moe_layers")


def shortened(config: PreTrainedConfig, places: Sequence[int]) -> PreTrainedConfig:
    """The config of the model whose layers are those at `places` of `config`'s.

    Whatever a config says of each layer (its kind of attention, whether it has positions or
    experts) is cut to these.
    """
    short = copy.deepcopy(config)
    text = short.get_text_config(decoder=True)
    depth = text.num_hidden_layers
    fields = _per_layer(text.to_dict(), depth, places)
    for name, value in {"num_hidden_layers": len(places), **fields}.items():
        setattr(text, name, value)
    # Read as from a file: what a config works out of its fields is worked out anew.
    return type(short).from_dict(short.to_dict())


def _per_layer(fields: dict[str, Any], depth: int, places: Sequence[int]) -> dict[str, Any]:
    """Fields that say something of each layer, for the layers that stay."""
    cut: dict[str, Any] = {}
    for name, value in fields.items():
        if not isinstance(value, (list, tuple)):
            continue
        if name in _NUMBERS:
            cut[name] = [new for new, old in enumerate(places) if old in value]
        elif len(value) == depth and "token" not in name and name != "architectures":
            cut[name] = [value[place] for place in places]
    if "attention_types" in fields:  # GPT-Neo writes its list run by run
        cut["attention_types"] = [[[kind], 1] for kind in cut["attention_layers"]]
    return cut
