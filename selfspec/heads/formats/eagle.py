"""The layout of the EAGLE repository: a Llama-like `config.json` beside the head's tensors.

EAGLE-3 heads differ from those of EAGLE and EAGLE-2 by the norm of the features. Ids of layers have
two conventions. At the top of a config, where vLLM and speculators put them, an id is the number of
layers below, as in `feature_layers`. Inside `eagle_config`, where SpecForge, SGLang and
TensorRT-LLM put them, it is the index of the layer whose output is read, one less.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from selfspec.decoder import Decoder
from selfspec.heads.base import ExitHead
from selfspec.heads.eagle import EagleHead
from selfspec.heads.eagle3 import Eagle3Head
from selfspec.heads.formats.files import (
    PublishedHead,
    draft_vocabulary,
    fill,
    is_embedding_of,
)

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq|t2d|verifier_.*")
_PREFIX = re.compile(r"^(module\.)?(model\.)?")
_LAYER = re.compile(r"^(midlayer|layers\.0)\.")


def matches(published: PublishedHead) -> bool:
    """Whether the tensors are those of an EAGLE head."""
    return any(_PREFIX.sub("", name) == "fc.weight" for name in published.tensors)


def read(decoder: Decoder, published: PublishedHead) -> ExitHead:
    """Make the head."""
    names = _names(published.tensors)
    if any(own == "layer.hidden_norm.weight" for own in names.values()):
        config = published.config
        nested = dict(config.get("eagle_config") or {})
        outputs = nested.pop(LAYER_IDS, None)
        if outputs:
            nested[LAYER_IDS] = [index + 1 for index in outputs]
        return read_eagle3(decoder, published, config, {**nested, **config})
    return _read_eagle(decoder, published, names)


def read_eagle3(
    decoder: Decoder,
    published: PublishedHead,
    layer: Mapping[str, Any],
    flags: Mapping[str, Any],
) -> Eagle3Head:
    """Make an EAGLE-3 head.

    Args:
        decoder: the target.
        published: the head.
        layer: config of its layer.
        flags: the keys of the architecture, such as `norm_before_residual`.

    Raises:
        ValueError: the head does not fit the target, or is of an architecture that is not covered.
    """
    names, tensors = _names(published.tensors), published.tensors
    by_own = {own: tensors[name] for name, own in names.items()}
    _check_sizes(decoder, published, layer, flags)
    output_normed = bool(flags.get("norm_output", False))
    options: dict[str, Any] = {
        "layer": _layer_keys(layer, by_own),
        "norm_before_residual": bool(flags.get("norm_before_residual", False)),
        "norm_before_fc": bool(flags.get("norm_before_fc", False)),
        "fc_norm": bool(flags.get("fc_norm", False)),
        "norm_output": output_normed,
    }
    ids = flags.get(LAYER_IDS)
    if ids:
        options["feature_layers"] = sorted(set(ids))
    rows = by_own.get("embed_tokens.weight")
    if rows is not None and not is_embedding_of(decoder, rows):
        options["embedding"] = len(rows)
    readout = by_own.get("readout.weight")
    options["vocabulary"] = 0 if readout is None else len(readout)
    head = Eagle3Head.build(decoder, 0, **options)
    if "d2t" in by_own:
        vocabulary = draft_vocabulary(published, by_own["d2t"], decoder)
        if vocabulary is not None:
            head.trim(decoder, vocabulary)
    unused = {"d2t"} | (set() if head.embed_tokens is not None else {"embed_tokens.weight"})
    used = {name: own for name, own in names.items() if own not in unused}
    if output_normed:  # then the norm is part of the layer
        used = {n: "layer.norm.weight" if o == "norm.weight" else o for n, o in used.items()}
    fill(head, published, used)
    return head


def _read_eagle(decoder: Decoder, published: PublishedHead, names: dict[str, str]) -> EagleHead:
    tensors = {own: published.tensors[name] for name, own in names.items()}
    _check_sizes(decoder, published, published.config, {})
    rows = tensors.get("embed_tokens.weight")
    own_rows = rows is not None and not is_embedding_of(decoder, rows)
    head = EagleHead.build(
        decoder,
        0,
        layer=_layer_keys(published.config, tensors),
        bias="fc.bias" in tensors,
        embedding=len(rows) if rows is not None and own_rows else 0,
    )
    # The LM head is the target's; some files have a copy of it.
    unused = {"readout.weight"} | (set() if own_rows else {"embed_tokens.weight"})
    fill(head, published, {name: own for name, own in names.items() if own not in unused})
    return head


def _names(tensors: Iterable[str]) -> dict[str, str]:
    """For each published tensor that says something, its name in our heads."""
    found: dict[str, str] = {}
    for name in tensors:
        own = _LAYER.sub("layer.", _PREFIX.sub("", name))
        if not _IGNORED.fullmatch(own):
            found[name] = own.replace("lm_head.", "readout.")
    return found


def _layer_keys(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The layer's config; what its tensors say goes before the name of the architecture."""
    kind = "qwen3" if "layer.self_attn.q_norm.weight" in tensors else "llama"
    biased = "layer.self_attn.q_proj.bias" in tensors
    keys = {key: value for key, value in config.items() if key != "architectures"}
    return {**keys, "model_type": kind, "attention_bias": biased}


def _check_sizes(
    decoder: Decoder,
    published: PublishedHead,
    layer: Mapping[str, Any],
    flags: Mapping[str, Any],
) -> None:
    """Raise ValueError, naming the size, for a head of another target or another architecture."""
    where = f"the head in {published.folder}"
    width = flags.get("target_hidden_size") or layer.get("hidden_size")
    if width != decoder.config.hidden_size:
        raise ValueError(
            f"{where} was made for a target of hidden size {width}, this one has "
            f"{decoder.config.hidden_size}; load the target it was made for"
        )
    vocabulary = layer.get("vocab_size", decoder.vocab_size)
    if vocabulary != decoder.vocab_size:
        raise ValueError(
            f"{where} was made for a vocabulary of {vocabulary} tokens, the target has "
            f"{decoder.vocab_size}; load the target it was made for"
        )
    count = layer.get("num_hidden_layers", 1)
    if count != 1:
        raise ValueError(f"{where} has {count} layers; selfspec reads heads of one layer")
    if "sliding_attention" in (layer.get("layer_types") or []):
        raise ValueError(f"the layer of {where} attends to a sliding window; selfspec reads full")
