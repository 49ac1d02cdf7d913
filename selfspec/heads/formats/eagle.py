"""The layout of the EAGLE repository: a Llama-like `config.json` beside the head's tensors.

EAGLE-3 heads differ from those of EAGLE and EAGLE-2 by the norm of the features. Ids of layers have
two conventions. At the top of a config, where vLLM and speculators put them, an id is the number of
layers below, as in `feature_layers`. Inside `eagle_config`, where SpecForge, SGLang and
TensorRT-LLM put them, it is the index of the layer whose output is read, one less; but some files
have the other ids there. SGLang tells them apart by the first one: it is 1 if they are indices,
because the usual layers are those after 2 layers, half of them, and all but three.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from selfspec.config import JsonObject
from selfspec.decoder import Decoder
from selfspec.heads.base import ExitHead
from selfspec.heads.eagle import EagleHead
from selfspec.heads.eagle3 import Eagle3Head
from selfspec.heads.formats.files import PublishedHead, fill, is_embedding_of, token_order
from selfspec.heads.llama_layer import ATTENTION_MAPS, MLP_MAPS, layer_config

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq|t2d|verifier_.*")
_PREFIX = re.compile(r"^(model\.)*")
_READOUT = re.compile(r"^(eagle_)?lm_head\.")
_LAYER = re.compile(r"^(midlayer|layers\.0)\.")
_FURTHER = re.compile(r"^layers\.(\d+)\.")
_MASK_TOKENS = ("mask_token_id", "ptd_token_id", "pard_token")


def matches(published: PublishedHead) -> bool:
    """Whether the tensors are those of an EAGLE head."""
    return any(_PREFIX.sub("", name) == "fc.weight" for name in published.tensors)


def read(decoder: Decoder, published: PublishedHead) -> ExitHead:
    """Make the head."""
    names = _names(published.tensors)
    layer, config = _layer_source(published, names), published.config
    if any(own == "layer.hidden_norm.weight" for own in names.values()):
        nested = config.get("eagle_config") or {}
        if not isinstance(nested, dict):
            raise ValueError(f"eagle_config in {published.folder} must hold keys, got {nested!r}")
        nested = dict(nested)
        outputs, below = nested.pop(LAYER_IDS, None), nested.pop("layer_ids", None)
        if outputs:
            shift = int(_layer_ids(published, outputs)[0] == 1)
            nested[LAYER_IDS] = [index + shift for index in outputs]
        elif below:  # vLLM's other name for what stands at the top
            nested[LAYER_IDS] = below
        return read_eagle3(decoder, published, layer, {**nested, **layer, **config})
    return _read_eagle(decoder, published, layer, names)


def read_eagle3(
    decoder: Decoder,
    published: PublishedHead,
    layer: JsonObject,
    flags: JsonObject,
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
    config = _layer_config(published, layer, by_own)
    _check_target(decoder, published, layer, by_own, flags.get("target_hidden_size"))
    check_readout(decoder, published, by_own, flags)
    output_normed = bool(flags.get("norm_output", False))
    rows, readout = by_own.get("embed_tokens.weight"), by_own.get("readout.weight")
    options: JsonObject = {
        "layer": config,
        "norm_before_residual": bool(flags.get("norm_before_residual", False)),
        "norm_before_fc": "input_norm.weight" in by_own or bool(flags.get("norm_before_fc")),
        "fc_norm": "fc_norm.0.weight" in by_own or bool(flags.get("fc_norm")),
        "norm_output": output_normed,
        "embedding": _own_rows(decoder, rows),
        "raw_embedding": True,
        "vocabulary": 0 if readout is None else len(readout),
    }
    ids = flags.get(LAYER_IDS)
    if ids:
        options["feature_layers"] = sorted(set(_layer_ids(published, ids)))
    options["num_hidden_layers"] = _depth(by_own)
    if "mask.hidden" in by_own:
        options |= {"parallel": True, "mask_token": _mask_token(published, flags)}
        name = next(name for name, own in names.items() if own == "mask.hidden")
        flat = {**tensors, name: by_own["mask.hidden"].flatten()}
        published = replace(published, tensors=flat)
    try:
        head = Eagle3Head.build(decoder, 0, **options)
    except ValueError as error:
        raise ValueError(f"config.json in {published.folder}: {error}") from None
    if "d2t" in by_own and readout is not None:
        published = _trim(decoder, published, head, names)
    unused = {"d2t"} | (set() if head.embed_tokens is not None else {"embed_tokens.weight"})
    used = {name: own for name, own in names.items() if own not in unused}
    if output_normed:  # then the norm is part of the layer
        used = {n: "layer.norm.weight" if o == "norm.weight" else o for n, o in used.items()}
    fill(head, published, used)
    return head


def _read_eagle(
    decoder: Decoder, published: PublishedHead, layer: JsonObject, names: dict[str, str]
) -> EagleHead:
    tensors = {own: published.tensors[name] for name, own in names.items()}
    config = _layer_config(published, layer, tensors)
    _check_target(decoder, published, layer, tensors, None)
    head = EagleHead.build(
        decoder,
        0,
        layer=config,
        bias="fc.bias" in tensors,
        embedding=_own_rows(decoder, tensors.get("embed_tokens.weight")),
        raw_embedding=True,
    )
    # The LM head is the target's; some files have a copy of it.
    unused = {"readout.weight"} | (set() if head.embed_tokens else {"embed_tokens.weight"})
    fill(head, published, {name: own for name, own in names.items() if own not in unused})
    return head


def _trim(
    decoder: Decoder, published: PublishedHead, head: Eagle3Head, names: Mapping[str, str]
) -> PublishedHead:
    """Let the head draft the tokens that `d2t` lists; their rows are put in rising order."""
    tensors = dict(published.tensors)
    name_of = {own: name for name, own in names.items()}
    offsets, readout = tensors[name_of["d2t"]], name_of["readout.weight"]
    ids = offsets + torch.arange(len(offsets))
    tokens, order = token_order(f"d2t of {published.where}", ids, decoder)
    tensors[readout] = tensors[readout][order]
    if len(tokens) < decoder.vocab_size:
        head.trim(decoder, tokens)
    return replace(published, tensors=tensors)


def _own_rows(decoder: Decoder, rows: Tensor | None) -> int:
    """Rows of the head's own embedding; 0 if it has none, or a copy of the target's."""
    return 0 if rows is None or is_embedding_of(decoder, rows) else len(rows)


def _layer_ids(published: PublishedHead, ids: object) -> list[int]:
    if isinstance(ids, list) and all(type(index) is int for index in ids):
        return ids
    raise ValueError(f"{LAYER_IDS} of {published.where} must be a list of whole numbers, got {ids}")


def _names(tensors: Iterable[str]) -> dict[str, str]:
    """For each published tensor that says something, its name in our heads."""
    found: dict[str, str] = {}
    for name in tensors:
        own = _LAYER.sub("layer.", _PREFIX.sub("", name))
        own = _FURTHER.sub(lambda found: f"layer.rest.{int(found[1]) - 1}.", own)
        own = "mask.hidden" if own == "mask_hidden" else own
        if not _IGNORED.fullmatch(own):
            found[name] = _READOUT.sub("readout.", own)
    return found


def _depth(names: Iterable[str]) -> int:
    """Number of layers, by the names of their tensors in our heads."""
    further = (re.match(r"layer\.rest\.(\d+)\.", name) for name in names)
    return max((int(found[1]) + 2 for found in further if found), default=1)


def _mask_token(published: PublishedHead, flags: JsonObject) -> int:
    """The token in place of drafts that are not made yet, of a head with a `mask_hidden`.

    Raises:
        ValueError: the config does not name one.
    """
    named = [flags[key] for key in _MASK_TOKENS if flags.get(key) is not None]
    if not named or type(named[0]) is not int:
        raise ValueError(
            f"the head in {published.folder} has a mask_hidden, so it drafts in one pass, but its "
            f"config names no mask token: {' or '.join(_MASK_TOKENS)} must be a token id, got "
            f"{named[0] if named else None!r}"
        )
    return named[0]


# The config of the layer, and what the tensors say


def _layer_source(published: PublishedHead, names: Mapping[str, str]) -> JsonObject:
    """The part of config.json that describes the layer: its top, or what stands under some key.

    vLLM's converted EAGLE heads have it under `model`.

    Raises:
        ValueError: several parts describe a layer, or none that is as wide as the tensors.
    """
    norm = next((n for n, own in names.items() if own.endswith("attention_layernorm.weight")), None)
    width = None if norm is None else len(published.tensors[norm])
    found = {at: part for at, part in _parts(published.config) if "num_attention_heads" in part}
    nested = {at: part for at, part in found.items() if at}
    if not nested or ("" in found and not published.inside):
        return published.config
    fitting = {at: part for at, part in nested.items() if part.get("hidden_size", width) == width}
    if len(fitting) == 1:
        return next(iter(fitting.values()))
    if "" in found:
        return published.config
    raise ValueError(
        f"config.json in {published.folder} describes layers under {sorted(nested)}, of which "
        f"{sorted(fitting) or 'none'} have the hidden size of the head's tensors, {width}"
    )


def _parts(config: JsonObject, at: str = "") -> Iterator[tuple[str, JsonObject]]:
    """A config and all objects inside it, with the names that lead there."""
    yield at, config
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _parts(value, f"{at}.{key}" if at else key)


def _layer_config(
    published: PublishedHead, said: JsonObject, tensors: Mapping[str, Tensor]
) -> JsonObject:
    """The layer's config, with the sizes and biases that its tensors have.

    Raises:
        ValueError: a tensor is missing, the config contradicts the tensors, or does not say what
            they cannot.
    """
    sizes = _sizes(published, said, tensors)
    whole_file = not published.inside  # else the config is the target's, whose layers may differ
    for key, size in sizes.items():
        if whole_file and said.get(key) not in (None, size):
            raise ValueError(
                f"config.json in {published.folder} says {key} = {said[key]!r}, the tensors of the "
                f"head's layer say {size}; one of the files is of another head"
            )
    if whole_file:
        _check_layers(published, said, tensors)
    if "sliding_attention" in (said.get("layer_types") or []) and whole_file:
        raise ValueError(
            f"the layer of {published.where} attends to a sliding window; selfspec reads full"
        )
    maps = (*ATTENTION_MAPS, *MLP_MAPS)
    given = {
        **said,
        **sizes,
        "model_type": "qwen3" if "layer.self_attn.q_norm.weight" in tensors else "llama",
        "biases": [name for name in maps if f"layer.{name}.bias" in tensors],
    }
    try:
        return layer_config(given)
    except ValueError as error:
        raise ValueError(f"config.json in {published.folder}: {error}") from None


def _sizes(
    published: PublishedHead, said: JsonObject, tensors: Mapping[str, Tensor]
) -> dict[str, int]:
    """Sizes of the layer by the rows of its maps; the config says how wide a head is."""

    def rows(name: str) -> int:
        tensor = tensors.get(f"layer.{name}.weight")
        if tensor is None:
            raise ValueError(f"{published.where} lacks a tensor: {name}.weight of its layer")
        if not tensor.ndim or not len(tensor):
            raise ValueError(f"{name}.weight of {published.where} is empty")
        return len(tensor)

    queries, keys = rows("self_attn.q_proj"), rows("self_attn.k_proj")
    heads, dim = said.get("num_attention_heads"), said.get("head_dim")
    if "layer.self_attn.q_norm.weight" in tensors:
        dim = rows("self_attn.q_norm")
    elif dim is None and type(heads) is int and heads > 0:
        dim = queries // heads
    if dim is None:
        raise ValueError(
            f"config.json in {published.folder} has no num_attention_heads and no head_dim, at its "
            "top or under a key, so that the attention of the head cannot be made"
        )
    if type(dim) is not int or dim < 1 or queries % dim or keys % dim:
        raise ValueError(
            f"config.json in {published.folder} says num_attention_heads = {heads!r} and head_dim "
            f"= {said.get('head_dim')!r}, the head's q_proj and k_proj have {queries} and {keys} "
            "rows, which do not fit"
        )
    return {
        "hidden_size": rows("self_attn.o_proj"),
        "intermediate_size": rows("mlp.gate_proj"),
        "head_dim": dim,
        "num_attention_heads": queries // dim,
        "num_key_value_heads": keys // dim,
    }


def _check_layers(
    published: PublishedHead, said: JsonObject, tensors: Mapping[str, Tensor]
) -> None:
    """Raise ValueError unless the tensors are of as many layers as the config says."""
    held, announced = _depth(tensors), said.get("num_hidden_layers")
    if held > 1 and "layer.hidden_norm.weight" not in tensors:
        raise ValueError(
            f"{published.where} has {held} layers; selfspec reads EAGLE heads of one layer"
        )
    if announced not in (None, held):
        raise ValueError(
            f"{published.where} has {announced} layers by num_hidden_layers in its config.json, "
            f"and tensors of {held}; the file is incomplete, or the config is of another head"
        )


def _check_target(
    decoder: Decoder,
    published: PublishedHead,
    layer: JsonObject,
    tensors: Mapping[str, Tensor],
    target_width: int | None,
) -> None:
    """Raise ValueError, naming the size, for a head of another target."""
    where = published.where
    width = target_width or len(tensors["layer.self_attn.o_proj.weight"])
    if width != decoder.config.hidden_size:
        raise ValueError(
            f"{where} was made for a target of hidden size {width}, this one has "
            f"{decoder.config.hidden_size}; load the target it was made for"
        )
    rows = tensors.get("embed_tokens.weight")
    vocabulary = layer.get("vocab_size") or decoder.vocab_size
    if vocabulary != decoder.vocab_size or (rows is not None and len(rows) != vocabulary):
        has = "" if rows is None else f" and embeds {len(rows)}"
        raise ValueError(
            f"{where} was made for a vocabulary of {vocabulary} tokens{has}, the target has "
            f"{decoder.vocab_size} tokens; load the target it was made for"
        )


def check_readout(
    decoder: Decoder,
    published: PublishedHead,
    tensors: Mapping[str, Tensor],
    flags: JsonObject,
) -> None:
    """Raise ValueError unless a reduced vocabulary has its LM head and the list of its tokens."""
    drafts, mapping = flags.get("draft_vocab_size"), tensors.get("d2t")
    readout = tensors.get("readout.weight")
    held = None if readout is None or not readout.ndim else len(readout)
    listed = (drafts or held) if mapping is None else len(mapping)
    absent = [name for name, t in (("lm_head.weight", readout), ("d2t", mapping)) if t is None]
    if listed not in (None, decoder.vocab_size) and absent and held != decoder.vocab_size:
        raise ValueError(
            f"{published.where} drafts {listed} of {decoder.vocab_size} tokens, but its file lacks "
            f"{' and '.join(absent)}"
        )
    if drafts is not None and held is not None and drafts != held:
        raise ValueError(
            f"config.json in {published.folder} says draft_vocab_size = {drafts!r}, lm_head.weight "
            f"of the head has {held} rows"
        )
    if mapping is not None and held not in (None, len(mapping)):
        raise ValueError(
            f"d2t of {published.where} lists {len(mapping)} tokens, its lm_head.weight has {held} "
            "rows"
        )
