"""Exit heads on disk, and the fingerprint of the target that they were fitted to.

`selfspec.json` describes the heads, `exit_heads.safetensors` holds their weights. Both are replaced
only after both have been written.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import Field
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from selfspec.config import JsonObject, StrictConfig, parse
from selfspec.decoder import Decoder, is_quantized, weights
from selfspec.decoder.checkpoints import HEADS_CONFIG
from selfspec.heads.base import ExitHead, build_head, check_distinct
from selfspec.heads.calibrator import Calibrator
from selfspec.heads.files import CheckpointFiles, make_folder, read_object, read_tensors, replacing
from selfspec.heads.formats import load_published
from selfspec.heads.formats.files import PUBLISHED_CONFIG

WEIGHTS_NAME = "exit_heads.safetensors"
_FORMAT = 1


class _HeadEntry(StrictConfig):
    kind: str
    exit_layer: int
    options: JsonObject = Field(default_factory=dict)
    trimmed: bool = False
    calibrated: list[str] = Field(default_factory=list)
    facts: JsonObject = Field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """Prefix of the head's tensors in the weights file."""
        return f"{self.kind}_{self.exit_layer}."


class _HeadsFile(StrictConfig):
    format_version: int
    target: JsonObject
    heads: list[_HeadEntry]


def save_heads(
    heads: Sequence[ExitHead],
    decoder: Decoder,
    folder: str | Path,
    dtype: torch.dtype | None = None,
) -> None:
    """Write heads and the fingerprint of their target to `folder`.

    If `folder` also holds the target's `model.safetensors`, its index is written too. Serving
    engines load every safetensors file of a folder that has no index, the heads included.

    Args:
        heads: what to save.
        decoder: the target.
        folder: created if it does not exist.
        dtype: dtype to store weights in; `None` keeps theirs. Calibrators are never rounded.

    Raises:
        TypeError: `heads` is no list of heads.
        ValueError: there are no heads, two have one kind and exit layer, or `folder` is a file.
    """
    if not heads:
        raise ValueError("there are no heads to save; fit some, or load them with heads=...")
    check_distinct(heads)
    folder = Path(folder)
    make_folder(folder)
    entries = [_entry(head) for head in heads]
    weights = {
        entry.prefix + name: _stored(name, tensor, dtype)
        for entry, head in zip(entries, heads, strict=True)
        for name, tensor in head.state_dict().items()
    }
    file = _HeadsFile(format_version=_FORMAT, target=fingerprint(decoder), heads=entries)
    text = json.dumps(file.model_dump(), indent=2) + "\n"
    with replacing(folder / WEIGHTS_NAME) as tensors, replacing(folder / HEADS_CONFIG) as config:
        save_file(weights, tensors, metadata={"format": "pt"})
        config.write_text(text, encoding="utf-8")
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        _write_index(folder)


def _write_index(folder: Path) -> None:
    """Write an index, in transformers' format, of the weights in `model.safetensors`."""
    weights = folder / SAFE_WEIGHTS_NAME
    with safe_open(weights, "pt") as file:
        weight_map = {name: weights.name for name in sorted(file.keys())}
    index = json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2)
    with replacing(folder / SAFE_WEIGHTS_INDEX_NAME) as scratch:
        scratch.write_text(index + "\n", encoding="utf-8")


def _stored(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    tensor = tensor.detach().contiguous().cpu()
    keep = dtype is None or not tensor.is_floating_point() or "calibrators." in name
    return tensor if keep else tensor.to(dtype)


def _entry(head: ExitHead) -> _HeadEntry:
    return _HeadEntry(
        kind=head.kind,
        exit_layer=head.exit_layer,
        options=head.options,
        trimmed=head.vocab_ids is not None,
        calibrated=list(head.calibrators),
        facts=head.facts,
    )


def load_heads(
    decoder: Decoder, folder: str | Path, checkpoint: CheckpointFiles | None = None
) -> list[ExitHead]:
    """Read the heads in `folder` and check that they fit `decoder`.

    Besides its own format it reads the published ones that docs/heads.md lists.

    Args:
        decoder: the target.
        folder: where the heads are.
        checkpoint: the target's files, for a target on the meta device. Its fingerprint is taken
            from them, and the heads get weights of their own; what they share has none.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, of an unknown format, or the heads belong to another target.
    """
    folder = Path(folder)
    if not (folder / HEADS_CONFIG).is_file() and (folder / PUBLISHED_CONFIG).is_file():
        return [load_published(decoder, folder)]
    file = _read_config(folder / HEADS_CONFIG)
    check_fingerprint(decoder, file.target, str(folder), checkpoint)
    weights = _read_weights(folder / WEIGHTS_NAME)
    heads = [_load_head(decoder, entry, weights, folder) for entry in file.heads]
    check_distinct(heads)
    return heads


def _load_head(
    decoder: Decoder, entry: _HeadEntry, weights: dict[str, Tensor], folder: Path
) -> ExitHead:
    own = {
        name.removeprefix(entry.prefix): tensor
        for name, tensor in weights.items()
        if name.startswith(entry.prefix)
    }
    try:
        head = build_head(decoder, entry.kind, entry.exit_layer, entry.options)
        if entry.trimmed:
            head.trim(decoder, own["vocab_ids"])
        for mode in entry.calibrated:
            head.calibrators[mode] = Calibrator()
        head.load_state_dict(own, assign=decoder.device.type == "meta")
    except (RuntimeError, KeyError, ValueError) as error:
        raise ValueError(
            f"{folder / WEIGHTS_NAME} does not fit {folder / HEADS_CONFIG}: {error}"
        ) from None
    head.facts = dict(entry.facts)
    return head.eval().requires_grad_(False)


def _read_config(path: Path) -> _HeadsFile:
    if not path.is_file():
        raise FileNotFoundError(
            f"no {HEADS_CONFIG} in {path.parent}; {_where_heads_are(path.parent)}"
        )
    file = parse(_HeadsFile, read_object(path), str(path))
    if file.format_version != _FORMAT:
        raise ValueError(
            f"{path} has format_version {file.format_version}, this version reads {_FORMAT}; "
            "update selfspec or save the heads again"
        )
    return file


def _where_heads_are(folder: Path) -> str:
    """The remedy for a folder without heads: a folder of heads inside it, such as a fit has."""
    names = (HEADS_CONFIG, PUBLISHED_CONFIG)
    inner = [str(path.parent) for name in names for path in sorted(folder.glob(f"*/{name}"))]
    if inner:
        return f"did you mean {inner[0]}?"
    return "selfspec fit and selfspec.heads.save_heads write it"


def _read_weights(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"no {WEIGHTS_NAME} in {path.parent} beside its {HEADS_CONFIG}")
    return read_tensors(path)


# The fingerprint of a target

_EMBEDDING_SAMPLES = 16
# Rounding to bfloat16 or float16 changes a value by less than one of these.
_RELATIVE, _ABSOLUTE = 2**-7, 1e-6
_WEIGHTS_DIFFER = "the weights differ"


def fingerprint(decoder: Decoder, checkpoint: CheckpointFiles | None = None) -> JsonObject:
    """Facts that must agree between the target a head was fitted to and the one it drafts for.

    `weights` holds a few values of the embedding and one value of every floating-point parameter
    of the layers. They tell checkpoints apart in any dtype and with adapters; of a quantized model
    only what is not quantized is compared.
    """
    return {
        "model_type": decoder.config.model_type,
        "num_hidden_layers": decoder.depth,
        "hidden_size": decoder.config.hidden_size,
        "vocab_size": decoder.vocab_size,
        "weights": _samples(decoder, checkpoint),
    }


def check_fingerprint(
    decoder: Decoder,
    fitted: JsonObject,
    source: str,
    checkpoint: CheckpointFiles | None = None,
) -> None:
    """Raise ValueError, naming what differs, unless `fitted` describes `decoder`.

    Weights near the recorded ones give a warning: the same checkpoint in another precision, or
    fine-tuned. Outputs stay exact, since the target verifies every draft.
    """
    own = fingerprint(decoder, checkpoint)
    if not (found := differences(own, fitted)):
        return
    if found[0].startswith(_WEIGHTS_DIFFER) and _near(own["weights"], fitted["weights"]):
        warnings.warn(
            f"the heads in {source} were fitted to slightly other weights ({found[0]}): the same "
            "checkpoint in another precision, or fine-tuned; outputs stay exact, but fewer drafts "
            "may be accepted",
            stacklevel=2,
        )
        return
    raise ValueError(
        f"the heads in {source} were fitted to another target: {'; '.join(found)}; "
        "load the target they were fitted to, or fit heads to this one"
    )


def differences(own: JsonObject, recorded: JsonObject) -> list[str]:
    """The differences between a target's fingerprint and a recorded one; empty if they agree."""
    found = [
        f"{key} is {own[key]!r} here and {recorded.get(key)!r} there"
        for key in own
        if key != "weights" and own[key] != recorded.get(key)
    ]
    return found or _different_weights(own["weights"], recorded.get("weights", {}))


def _different_weights(own: dict[str, list[float]], fitted: dict[str, list[float]]) -> list[str]:
    if "embedding" not in fitted:
        return ["its weights were not recorded"]
    different = [
        name
        for name in sorted(own.keys() & fitted.keys())
        if not all(
            math.isclose(a, b, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
            for a, b in zip(own[name], fitted[name], strict=True)
        )
    ]
    return [f"{_WEIGHTS_DIFFER} (first in {different[0]})"] if different else []


def _near(own: dict[str, list[float]], fitted: dict[str, list[float]]) -> bool:
    """Whether half of the values, or more, agree within a half of the larger one.

    Rounding to 4 bits moves the median value by a sixth; of values that have nothing to do with
    each other, half have different signs.
    """
    shared = sorted(own.keys() & fitted.keys())
    pairs = [pair for name in shared for pair in zip(own[name], fitted[name], strict=True)]
    near = sum(math.isclose(a, b, rel_tol=0.5, abs_tol=_ABSOLUTE) for a, b in pairs)
    return near * 2 >= len(pairs)


@torch.no_grad()
def _samples(decoder: Decoder, checkpoint: CheckpointFiles | None) -> dict[str, list[float]]:
    if checkpoint is not None:
        return _samples_of_files(decoder, checkpoint)
    _, embedding = next(weights(decoder.causal_lm.get_input_embeddings()))
    samples = {"embedding": _values(embedding, _EMBEDDING_SAMPLES)}
    for name, tensor in weights(decoder.layers):
        if "lora_" not in name and not is_quantized(tensor):
            samples[name.replace(".base_layer", "")] = _values(tensor, 1)
    return samples


def _samples_of_files(decoder: Decoder, checkpoint: CheckpointFiles) -> dict[str, list[float]]:
    """What `_samples` gives for the tensors that have the same name in file and model."""
    names = {id(parameter): name for name, parameter in decoder.causal_lm.named_parameters()}
    own = {"embedding": next(decoder.causal_lm.get_input_embeddings().parameters())}
    own |= dict(decoder.layers.named_parameters())
    samples: dict[str, list[float]] = {}
    for name, parameter in own.items():
        if names[id(parameter)] in checkpoint.files:
            count = _EMBEDDING_SAMPLES if name == "embedding" else 1
            indices = _spread(parameter.numel(), count).tolist()
            values = checkpoint.values(names[id(parameter)], indices)
            samples[name] = [_rounded(value) for value in values]
    return samples


def _values(tensor: Tensor, count: int) -> list[float]:
    flat = tensor.detach().reshape(-1)
    at = _spread(flat.numel(), count).to(flat.device)
    return [_rounded(value) for value in flat[at].float().tolist()]


def _spread(size: int, count: int) -> Tensor:
    """`[count]` indices below `size`, evenly spread."""
    return torch.arange(1, count + 1) * (size - 1) // (count + 1)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
