"""A `dflash` head in the layout of the speculators library, which vLLM loads."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from selfspec.apps.export.eagle3 import (
    absent_biases,
    draft_vocabulary,
    layer_config,
    lm_head_rows,
    published_state,
    speculators_facts,
    write_head,
)
from selfspec.apps.export.guides import guide, new_folder
from selfspec.config import JsonObject, Options
from selfspec.decoder import Decoder
from selfspec.heads import CARD_NAME, DFlashHead

_NAMES = {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash2"}
_ARCHITECTURES = {"dflash2": "DFlash2DraftModel"}
# Options that the layout has no key for, and the value that it takes for granted.
_GIVEN = {"embedding": 0, "embedding_scale": 1.0, "output_multiplier": 1.0, "softcap": None}


@dataclass(frozen=True)
class ExportedDFlash:
    """What was written.

    Attributes:
        target: the checkpoint that the head drafts for: a hub id or a folder.
        algorithm: `dflash`, `dspark` or `dflash2`, in the words of speculators.
        parameters: parameters in the file.
        vocabulary: tokens that it drafts.
        feature_layers: the target's hidden states that it reads, by the number of layers below.
        num_draft_tokens: drafts of a round.
    """

    target: str
    algorithm: str
    parameters: int
    vocabulary: int
    feature_layers: tuple[int, ...]
    num_draft_tokens: int


@torch.no_grad()
def export_dflash(
    decoder: Decoder, head: DFlashHead, folder: str | Path, *, target: str
) -> ExportedDFlash:
    """Write a head in the layout of speculators.

    Args:
        decoder: the target.
        head: the head.
        folder: created as a whole, or not at all if there is an error.
        target: hub id or folder of the target, for the launch lines.

    Raises:
        FileExistsError: `folder` exists and is not empty.
        ValueError: the layout cannot hold the head.
    """
    algorithm = _algorithm(decoder, head)
    tensors = dflash_tensors(decoder, head)
    assert head.longest is not None
    exported = ExportedDFlash(
        target=target,
        algorithm=algorithm,
        parameters=sum(t.numel() for t in tensors.values() if t.is_floating_point()),
        vocabulary=decoder.vocab_size if head.vocab_ids is None else len(head.vocab_ids),
        feature_layers=head.feature_layers,
        num_draft_tokens=head.longest,
    )
    with new_folder(folder) as scratch:
        write_head(scratch, _config(decoder, head, tensors, exported), tensors)
        (scratch / CARD_NAME).write_text(_guide(exported, str(folder)), encoding="utf-8")
    return exported


def _algorithm(decoder: Decoder, head: DFlashHead) -> str:
    """The name of the head's architecture in speculators; ValueError if there is none."""
    options = head.options
    strange = [name for name, value in _GIVEN.items() if options[name] != value]
    sliding = [window is not None for window in options["windows"]]
    if any(sliding) and not options["window_from_anchor"]:
        strange.append("window_from_anchor")
    alike = [any(options["causal"]) and slides for slides in sliding]
    if any(options["causal"]) and list(options["causal"]) != alike:
        strange.append("causal")
    spark = options["markov"] > 0 or options["confidence"]
    convolved, selects = options["conv_kernel_size"] > 0, options["selector_rank"] > 0
    if convolved != selects or (spark and selects):
        strange += ["conv_kernel_size", "selector_rank"]
    if head.readout is not None and head.vocab_ids is None:
        strange.append("vocabulary")
    if selects and head.vocab_ids is not None:
        raise ValueError("a DFlash2 head over a part of the vocabulary cannot be exported")
    if strange:
        raise ValueError(
            f"speculators has no such DFlash head: {strange[0]}={options[strange[0]]!r}; use the "
            "files that it was read from"
        )
    return "dspark" if spark else "dflash2" if selects else "dflash"


def dflash_tensors(decoder: Decoder, head: DFlashHead) -> dict[str, Tensor]:
    """The head's tensors by their names in speculators."""
    renamed = {"layer.": "layers.", "readout.": "lm_head.", "confidence.": "confidence_head.proj."}
    tensors: dict[str, Tensor] = {}
    for name, tensor in published_state(head):
        start = next((old for old in renamed if name.startswith(old)), "")
        tensors[renamed.get(start, "") + name.removeprefix(start)] = tensor
    if head.vocab_ids is not None:
        if head.readout is None:
            tensors["lm_head.weight"] = lm_head_rows(decoder, head.vocab_ids)
        tensors |= draft_vocabulary(decoder, head.vocab_ids)
    layers = [f"layers.{index}" for index in range(head.options["num_hidden_layers"])]
    tensors |= absent_biases(layers, head.options["layer"]["biases"], tensors)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _config(
    decoder: Decoder, head: DFlashHead, tensors: dict[str, Tensor], exported: ExportedDFlash
) -> JsonObject:
    options, algorithm = head.options, exported.algorithm
    layer = layer_config(decoder, options, str(tensors["fc.weight"].dtype))
    return {
        "architectures": [_ARCHITECTURES.get(algorithm, f"{_NAMES[algorithm]}Speculator")],
        **speculators_facts(decoder, algorithm, exported.num_draft_tokens, exported.target),
        "transformer_layer_config": {**layer, **_sliding(options)},
        "torch_dtype": layer["torch_dtype"],
        "draft_vocab_size": exported.vocabulary,
        "block_size": head.block_size,
        "aux_hidden_state_layer_ids": list(head.feature_layers),
        "mask_token_id": options["mask_token"],
        "sample_from_anchor": options["sample_from_anchor"],
        # vLLM 0.32 takes False to be about all layers, so it is left out where no layer slides.
        **({"sliding_window_non_causal": not any(options["causal"])} if options["windows"] else {}),
        **_additions(algorithm, options),
    }


def _sliding(options: Options) -> JsonObject:
    windows = options["windows"] or [None] * options["num_hidden_layers"]
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    window = next((window for window in windows if window is not None), None)
    use = window is not None
    return {"layer_types": kinds, "sliding_window": window, "use_sliding_window": use}


def _additions(algorithm: str, options: Options) -> JsonObject:
    """The keys of DSpark or DFlash2."""
    if algorithm == "dspark":
        return {
            "markov_rank": options["markov"],
            "markov_head_type": options["markov_type"],
            "enable_confidence_head": options["confidence"],
            "confidence_head_with_markov": options["confidence_with_markov"],
        }
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    return {name: options[name] for name in names} if algorithm == "dflash2" else {}


def _guide(exported: ExportedDFlash, folder: str) -> str:
    method = "dspark" if exported.algorithm == "dspark" else "dflash"
    k = exported.num_draft_tokens
    return guide(
        "dflash",
        folder=folder,
        vllm={"method": method, "model": folder, "num_speculative_tokens": k},
        name_of=_NAMES[exported.algorithm],
        layers=", ".join(map(str, exported.feature_layers)),
        **asdict(exported),
    )
