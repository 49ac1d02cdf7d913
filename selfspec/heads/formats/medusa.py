"""The layouts of the Medusa repository and of vLLM's Medusa heads."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor

from selfspec.decoder import Decoder
from selfspec.heads.formats.files import PublishedHead, fill, token_order
from selfspec.heads.medusa import MedusaHead

_PREFIX = re.compile(r"^(model\.)*(medusa_heads?\.)?")
_BLOCK = re.compile(
    r"^(?P<vllm>blocks\.)?(?P<head>\d+)\.(?:(?:medusa_)?layers\.)?(?P<layer>\d+)"
    r"(?P<linear>\.linear)?\.(?P<part>weight|bias)$"
)
_READOUT = re.compile(r"^(?:lm_heads\.(\d+)|(\d+)\.lm_head)\.weight$")


def matches(published: PublishedHead) -> bool:
    """Whether the config or the tensors are those of Medusa."""
    return _is_named(published) or any(
        block["vllm"] or block["linear"]
        for name in published.tensors
        if (block := _BLOCK.match(_PREFIX.sub("", name)))
    )


def _is_named(published: PublishedHead) -> bool:
    config = published.config
    named = config.get("model_type") == "medusa" or "medusa_num_heads" in config
    return named or config.get("architectures") == ["MedusaModel"]


def read(decoder: Decoder, published: PublishedHead) -> MedusaHead:
    """Make the head. Its tensors say how many positions it drafts, and with how many layers.

    Raises:
        ValueError: it does not fit the target.
    """
    tensors = dict(published.tensors)
    published = replace(published, tensors=tensors)
    names = _names(tensors)
    shapes = {own: tensors[name].shape for name, own in names.items()}
    heads = _count(published.where, r"blocks\.(\d+)\.layers\.", shapes)
    layers = _count(published.where, r"blocks\.\d+\.layers\.(\d+)", shapes)
    first = shapes.get("blocks.0.layers.0.weight")
    if first is None or len(first) != 2:
        raise ValueError(f"{published.where} lacks a tensor: the weight of its first block")
    if first[0] != decoder.config.hidden_size:
        raise ValueError(
            f"{published.where} was made for a target of hidden size {first[0]}, this "
            f"one has {decoder.config.hidden_size}; load the target it was made for"
        )
    _warn_of_other_counts(published, heads, layers)
    shared = bool(published.config.get("original_lm_head", False))  # one LM head for all positions
    tokens = None
    if "token_map" in tensors:
        where = f"token_map of {published.where}"
        tokens, order = token_order(where, tensors["token_map"], decoder)
        for name in (name for name, own in names.items() if own.startswith("readouts.")):
            # The rows of these tokens, or of all, as vLLM reads them.
            chosen = {len(order): order, decoder.vocab_size: tokens}.get(len(tensors[name]))
            tensors[name] = tensors[name] if chosen is None else tensors[name][chosen]
    rows = next((tensors[n].shape for n, own in names.items() if own == "readouts.0.weight"), None)
    head = MedusaHead.build(
        decoder,
        0,
        heads=heads,
        layers=layers,
        bias=any(own.startswith("blocks.") and own.endswith(".bias") for own in shapes),
        vocabulary=0 if rows is None or shared else rows[0],
    )
    if tokens is not None:
        head.trim(decoder, tokens)
    if shared:
        copies = ("readouts.", "lm_head.")
        names = {name: own for name, own in names.items() if not own.startswith(copies)}
    fill(head, published, names)
    return head


def _count(where: str, pattern: str, names: Iterable[str]) -> int:
    """How many indices the names have; ValueError unless they are 0, 1, 2 and so on."""
    found = sorted({int(match[1]) for name in names if (match := re.match(pattern, name))})
    absent = next((i for i, index in enumerate(found) if i != index), None)
    if absent is not None:
        raise ValueError(f"{where} lacks a tensor: its blocks have the indices {found}")
    return len(found)


def _warn_of_other_counts(published: PublishedHead, heads: int, layers: int) -> None:
    """Warn of counts in the config that are not those of the file, which are used.

    The heads are independent of each other. Configs of published Medusa heads say 2 where the files
    hold 5, and Medusa's own loader does not read them either.
    """
    config = published.config
    counts = {"medusa_num_heads": heads, "medusa_num_layers": layers}
    if not published.inside and not counts.keys() & config.keys():
        counts = {"num_heads": heads, "num_hidden_layers": layers}  # vLLM's names
    for key, count in counts.items():
        if config.get(key) not in (None, count):
            warnings.warn(
                f"config.json in {published.folder} says {key} = {config[key]!r}, its tensors say "
                f"{count}, which is used",
                stacklevel=2,
            )


def _names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """For each published tensor, its name in our heads."""
    parsed = {name: _PREFIX.sub("", name) for name in tensors if name != "token_map"}
    blocks = {name: block for name, own in parsed.items() if (block := _BLOCK.match(own))}
    # In Medusa's layout the LM head is the last of a head's modules, the one without `.linear`.
    last = {block["head"]: 0 for block in blocks.values()}
    for block in blocks.values():
        last[block["head"]] = max(last[block["head"]], int(block["layer"]))
    found: dict[str, str] = {}
    for name, own in parsed.items():
        block, readout = blocks.get(name), _READOUT.match(own)
        if readout is not None:
            found[name] = f"readouts.{readout[1] or readout[2]}.weight"
        elif block is None:
            found[name] = own
        elif block["vllm"] or block["linear"] or int(block["layer"]) < last[block["head"]]:
            found[name] = f"blocks.{block['head']}.layers.{block['layer']}.{block['part']}"
        else:
            found[name] = f"readouts.{block['head']}.{block['part']}"
    return found
