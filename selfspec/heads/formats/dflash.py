"""DFlash, DSpark and DFlash2 heads: the layouts of speculators, z-lab, DeepSpec and transformers.

All name the tensors almost alike; their configs differ. Ids of layers have two conventions: in
speculators' an id is the number of layers below, as in `feature_layers`; in the others it is the
index of the layer whose output is read, one less, and -1 is the embedding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from selfspec.config import JsonObject
from selfspec.decoder import Decoder
from selfspec.heads.dflash import DFlashHead
from selfspec.heads.formats.eagle import check_readout
from selfspec.heads.formats.files import (
    PublishedHead,
    fill,
    is_embedding_of,
    token_order,
)
from selfspec.heads.llama_layer import ATTENTION_MAPS

SPECULATORS = ("dflash", "dspark", "dflash2")
_NATIVE = "muse_glimmer_assistant"  # transformers' own
_ARCHITECTURES = re.compile(r"(?P<base>\w*?)(DFlash2?(Draft)?|DSpark)Model")
_MASK_TOKENS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
_MASK_EMBEDDING = "mask_embedding.pt"
# Keys of `dflash_config` that say nothing, or whose value is read below.
_KNOWN = {
    "mask_token_id",
    "target_layer_ids",
    "layer_ids",
    "block_size",
    "causal",
    "use_swa",
    "swa_window_size",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
}
_IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq|t2d|verifier_.*")
_RENAMED = (
    (re.compile(r"^(model\.)*"), ""),
    (re.compile(r"^encoder\.fc\."), "fc."),
    (re.compile(r"^encoder\.output_norm_enc\."), "hidden_norm."),
    (re.compile(r"^(layers\.|midlayer\.)"), "layer."),
    (re.compile(r"^lm_head\."), "readout."),
    (re.compile(r"^confidence_head\.proj\."), "confidence."),
)


def matches(published: PublishedHead) -> bool:
    """Whether the config is one of such a head."""
    config = published.config
    if "speculators_model_type" in config:
        return config["speculators_model_type"] in SPECULATORS
    architectures = config.get("architectures") or []
    named = any(_ARCHITECTURES.fullmatch(str(name)) for name in architectures)
    return named or "dflash_config" in config or config.get("model_type") == _NATIVE


def read(decoder: Decoder, published: PublishedHead) -> DFlashHead:
    """Make the head.

    Raises:
        ValueError: it does not fit the target, or is of an architecture that is not covered.
    """
    names = _names(published.tensors)
    tensors = {own: published.tensors[name] for name, own in names.items()}
    in_speculators = "speculators_model_type" in published.config
    facts = _of_speculators(published) if in_speculators else _of_others(published)
    options = {**facts, **_of_tensors(decoder, published, tensors, facts)}
    check_readout(decoder, published, tensors, published.config)
    try:
        head = DFlashHead.build(decoder, 0, **options)
    except ValueError as error:
        raise ValueError(f"config.json in {published.folder}: {error}") from None
    if "d2t" in tensors:
        published = _trim(decoder, published, head, names)
    unused = {"d2t"}
    unused |= set() if options["embedding"] else {"embed_tokens.weight"}
    unused |= set() if options["vocabulary"] else {"readout.weight"}
    fill(head, published, {name: own for name, own in names.items() if own not in unused})
    return head


def _trim(
    decoder: Decoder, published: PublishedHead, head: DFlashHead, names: Mapping[str, str]
) -> PublishedHead:
    """Let the head draft the tokens that `d2t` lists; their rows are put in rising order."""
    tensors = dict(published.tensors)
    name_of = {own: name for name, own in names.items()}
    offsets = tensors[name_of["d2t"]]
    ids = offsets + torch.arange(len(offsets))
    tokens, order = token_order(f"d2t of {published.where}", ids, decoder)
    for own in ("readout.weight", "markov_head.markov_w2.weight"):
        rows = tensors.get(name_of.get(own, ""))
        if rows is None and own == "readout.weight":
            raise ValueError(f"{published.where} has a d2t, but lacks its lm_head.weight")
        if rows is not None and len(rows) == len(order):
            tensors[name_of[own]] = rows[order]
    if len(tokens) < decoder.vocab_size:
        head.trim(decoder, tokens)
    return replace(published, tensors=tensors)


def _names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """For each published tensor that says something, its name in our heads."""
    found: dict[str, str] = {}
    for name in tensors:
        own = name
        for pattern, instead in _RENAMED:
            own = pattern.sub(instead, own)
        if not _IGNORED.fullmatch(own):
            found[name] = own
    return found


# Configs


def _of_speculators(published: PublishedHead) -> JsonObject:
    """The options that a config of speculators states; absent keys have its defaults."""
    config = published.config
    algorithm = config["speculators_model_type"]
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError(
            f"config.json in {published.folder} lacks transformer_layer_config, the config of the "
            "head's layers"
        )
    spark = algorithm == "dspark"
    both_ways = config.get("sliding_window_non_causal", algorithm == "dflash2")
    sliding = _sliding(published, layer)
    return {
        "layer": layer,
        "feature_layers": _ids(published, config, "aux_hidden_state_layer_ids"),
        "block_size": config.get("block_size", 8),
        "mask_token": config.get("mask_token_id"),
        "sample_from_anchor": bool(config.get("sample_from_anchor", spark)),
        "window_from_anchor": True,
        **_windows(
            published,
            sliding,
            [slides and not both_ways for slides in sliding],
            layer.get("sliding_window"),
        ),
        "selector_top_k": config.get("selector_top_k", 16),
    }


def _of_others(published: PublishedHead) -> JsonObject:
    """The options that a config of z-lab, DeepSpec or transformers states."""
    config = published.config
    _check_architecture(published)
    nested = config.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise ValueError(f"dflash_config in {published.folder} must hold keys, got {nested!r}")
    strange = sorted(name for name in nested.keys() - _KNOWN if nested[name])
    if strange:
        raise ValueError(
            f"dflash_config in {published.folder} has {strange[0]}, which selfspec does not compute"
        )
    merged = {**config, **nested}
    native = config.get("model_type") == _NATIVE
    spark = any("DSpark" in str(name) for name in config.get("architectures") or [])
    theta = {"rope_theta": 500_000.0} if native and "rope_parameters" not in config else {}
    return {
        "layer": {**theta, **config},
        "feature_layers": _layers_below(published, nested),
        "block_size": merged.get("block_size", 16),
        "mask_token": next((merged[key] for key in _MASK_TOKENS if key in merged), None),
        "sample_from_anchor": bool(config.get("sample_from_anchor", spark)),
        **_attention(published, nested, native),
        "embedding_scale": merged.get("input_embedding_scale") or 1.0,
        "output_multiplier": merged.get("output_multiplier") or 1.0,
        "softcap": merged.get("final_logit_softcapping"),
        "selector_top_k": merged.get("selector_top_k", 16),
    }


def _check_architecture(published: PublishedHead) -> None:
    """Raise ValueError for layers of another architecture than Qwen3's, and for other masks."""
    for name in published.config.get("architectures") or []:
        found = _ARCHITECTURES.fullmatch(str(name))
        if found is not None and found["base"] not in ("", "Qwen3"):
            raise ValueError(
                f"the head in {published.folder} is a {name}; selfspec reads those with layers of "
                "Qwen3's architecture"
            )
    if (published.folder / _MASK_EMBEDDING).is_file():
        raise ValueError(
            f"the head in {published.folder} has a mask embedding of its own in {_MASK_EMBEDDING}, "
            "a pickle, which selfspec does not load"
        )


def _layers_below(published: PublishedHead, nested: JsonObject) -> list[int] | None:
    """The hidden states that the head reads, by the number of layers below each."""
    config = published.config
    # Looked for in the same order as in vLLM.
    for source, key, more in (
        (config, "eagle_aux_hidden_state_layer_ids", 0),
        (nested, "target_layer_ids", 1),
        (config, "dspark_target_layer_ids", 1),
        (config, "target_layer_ids", 1),
        (nested, "layer_ids", 0),
    ):
        ids = _ids(published, source, key)
        if ids:
            return [index + more for index in ids]
    return None


def _ids(published: PublishedHead, source: JsonObject, key: str) -> list[int] | None:
    """The whole numbers under a key; `None` if it is absent."""
    found = source.get(key)
    if found is None:
        return None
    if not isinstance(found, list) or not all(type(index) is int for index in found):
        raise ValueError(
            f"{key} of the head in {published.folder} must be a list of layers, got {found!r}"
        )
    return found


def _attention(published: PublishedHead, nested: JsonObject, native: bool) -> JsonObject:
    """Options of the layers' attention, as z-lab's code and vLLM read them.

    `use_swa` makes every layer slide if the config names none that does. `is_causal`, or else
    `causal`, says whether the rows of a block see only those before them. Without either, they do
    in layers that the config names as sliding.

    Args:
        published: the head.
        nested: its `dflash_config`.
        native: whether the config is one of transformers, whose blocks are never causal.
    """
    config = published.config
    sliding = _sliding(published, config)
    forced = bool(nested.get("use_swa")) and not any(sliding)
    sliding = [slides or forced for slides in sliding]
    causal = [slides and not forced and not native for slides in sliding]
    said = config.get("is_causal", nested.get("causal"))
    if said is not None and not native:
        causal = [bool(said)] * len(sliding)
    window = nested.get("swa_window_size") or config.get("sliding_window")
    return _windows(published, sliding, causal, window, inclusive=native)


def _sliding(published: PublishedHead, layer: JsonObject) -> list[bool]:
    """Whether each layer attends to a sliding window: by `layer_types`, or else as Qwen3's does."""
    kinds, count = layer.get("layer_types"), _count(published)
    if kinds is None:
        first = layer.get("max_window_layers", 28) if layer.get("use_sliding_window") else count
        return [index >= first for index in range(count)]
    if not isinstance(kinds, list):
        raise ValueError(f"layer_types in {published.folder} must be a list, got {kinds!r}")
    sliding = [kind == "sliding_attention" for kind in kinds]
    if any(sliding) and len(kinds) < count:
        raise ValueError(
            f"layer_types in {published.folder} names {len(kinds)} layers, its tensors are of "
            f"{count}"
        )
    return sliding[:count] if any(sliding) else [False] * count


def _windows(
    published: PublishedHead,
    sliding: Sequence[bool],
    causal: Sequence[bool],
    window: object,
    inclusive: bool = False,
) -> JsonObject:
    """Options of the layers that attend to a sliding window, or in which rows of a block differ.

    Args:
        published: the head.
        sliding: whether a layer attends to a window.
        causal: whether a row of a block in it sees only those before it.
        window: its width.
        inclusive: whether a window of w reaches w tokens back, not w - 1.
    """
    if not any(sliding):
        return {"causal": list(causal)} if any(causal) else {}
    if not isinstance(window, int) or window < 1:
        raise ValueError(
            f"the config in {published.folder} has sliding layers, but sliding_window is {window!r}"
        )
    return {
        "windows": [window + inclusive if slides else None for slides in sliding],
        "causal": list(causal),
    }


# Tensors


def _count(published: PublishedHead) -> int:
    """Number of layers that there are tensors of."""
    numbered = (re.match(r"layer\.(\d+)\.", own) for own in _names(published.tensors).values())
    return max((int(found[1]) + 1 for found in numbered if found), default=0)


def _of_tensors(
    decoder: Decoder,
    published: PublishedHead,
    tensors: Mapping[str, Tensor],
    facts: JsonObject,
) -> JsonObject:
    """The options that the tensors tell.

    Raises:
        ValueError: the config lacks a key, or contradicts them or the target.
    """
    where = f"the head in {published.folder}"
    if "fc.weight" not in tensors or tensors["fc.weight"].ndim != 2:
        raise ValueError(f"{where} lacks a tensor: fc.weight, of two dimensions")
    for key, meaning in (("feature_layers", "ids of the hidden states"), ("mask_token", "mask id")):
        if facts[key] is None:
            raise ValueError(f"the config in {published.folder} lacks the {meaning} that it reads")
    count = _count(published)
    vocabulary = facts["layer"].get("vocab_size", decoder.vocab_size)
    if vocabulary != decoder.vocab_size:
        raise ValueError(
            f"{where} was made for a vocabulary of {vocabulary} tokens, the target has "
            f"{decoder.vocab_size}; load the target it was made for"
        )
    width, streams = tensors["fc.weight"].shape[0], len(facts["feature_layers"])
    if width != decoder.config.hidden_size:
        raise ValueError(
            f"{where} was made for a target of hidden size {width}, this one has "
            f"{decoder.config.hidden_size}; load the target it was made for"
        )
    if tensors["fc.weight"].shape[1] != streams * width:
        raise ValueError(
            f"fc.weight of {where} has shape {list(tensors['fc.weight'].shape)}; with the "
            f"{streams} hidden states that its config names it would be {[width, streams * width]}"
        )
    rows = {name: tensors.get(f"{name}.weight") for name in ("embed_tokens", "readout")}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    sizes = _sizes(published, shapes, count)
    for key, size in sizes.items():
        told = facts["layer"].get(key)
        if told not in (None, size):
            raise ValueError(f"{where} has tensors of {key} {size}, its config says {told!r}")
    biases = [name for name in ATTENTION_MAPS if f"layer.0.{name}.bias" in tensors]
    return {
        "layer": {**_plain(facts["layer"]), **sizes, "biases": biases},
        "num_hidden_layers": count,
        "embedding": _own_rows(decoder, rows["embed_tokens"], head=False),
        "vocabulary": _own_rows(decoder, rows["readout"], head=True),
        **_of_corrections(shapes, width),
    }


def _sizes(
    published: PublishedHead, shapes: Mapping[str, tuple[int, ...]], count: int
) -> dict[str, int]:
    """The sizes of the layers, by their tensors."""
    first = "layer.0."
    names = ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "self_attn.q_norm")
    found = [shapes.get(f"{first}{name}.weight", ()) for name in names]
    if [len(shape) for shape in found] != [2, 2, 2, 1]:
        wanted = ", ".join(f"layers.0.{name}.weight" for name in names)
        raise ValueError(
            f"the head in {published.folder} lacks a tensor, or one has another shape: {wanted} "
            f"are {list(map(list, found))}"
        )
    (queries, width), (keys, _), (inner, _), (head_dim,) = found
    return {
        "num_hidden_layers": count,
        "hidden_size": width,
        "num_attention_heads": queries // head_dim,
        "num_key_value_heads": keys // head_dim,
        "head_dim": head_dim,
        "intermediate_size": inner,
    }


def _of_corrections(shapes: Mapping[str, tuple[int, ...]], width: int) -> JsonObject:
    """The options of what DSpark and DFlash2 add, from the shapes of the tensors."""
    kinds = {"markov_head.gate_proj.weight": "gated", "markov_head.joint_proj.weight": "rnn"}

    def size(name: str, dim: int) -> int:
        shape = shapes.get(name, ())
        return shape[dim] if dim < len(shape) else 0

    confident = size("confidence.weight", 1)
    additions = size("layer.0.attention_conv.kernel_projection.weight", 0)
    taps = size("layer.0.attention_conv.base_kernel", 1)
    return {
        "markov": size("markov_head.markov_w1.weight", 1),
        "markov_type": next((kinds[name] for name in kinds if name in shapes), "vanilla"),
        "confidence": confident > 0,
        "confidence_with_markov": confident > width,
        "conv_kernel_size": taps,
        "conv_group_size": 2 * taps * width // additions if additions else 16,
        "selector_rank": size("candidate_selector.predecessor_codebook", 1),
    }


def _plain(layer: JsonObject) -> JsonObject:
    """The config of the layers without what describes the whole head."""
    others = ("architectures", "layer_types", "sliding_window", "use_sliding_window")
    return {key: value for key, value in layer.items() if key not in others}


def _own_rows(decoder: Decoder, rows: Tensor | None, head: bool) -> int:
    """Rows of an embedding or an LM head that is not the target's; 0 if there is none."""
    if rows is None:
        return 0
    whole = decoder.causal_lm.get_output_embeddings() if head else None
    return 0 if is_embedding_of(decoder, rows, whole) else len(rows)
