"""The config and the tensors of a published head, and how they become one of our heads."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from selfspec.decoder import Decoder
from selfspec.heads.base import ExitHead
from selfspec.heads.files import read_object, read_tensors, replacing

PUBLISHED_CONFIG = "config.json"
PUBLISHED_FILES = (PUBLISHED_CONFIG, SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, "*.safetensors")


@dataclass
class PublishedHead:
    """A head as it was published.

    Attributes:
        folder: where it was found.
        config: what its `config.json` holds.
        tensors: its tensors by their published names.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]


def read_folder(folder: Path) -> PublishedHead:
    """Read a folder of `config.json` and safetensors.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or the weights are stored as a pickle only.
    """
    config = read_object(folder / PUBLISHED_CONFIG)
    return PublishedHead(folder, config, _read_tensors(folder))


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    if (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        index = json.loads((folder / SAFE_WEIGHTS_INDEX_NAME).read_text(encoding="utf-8"))
        names = sorted(set(index["weight_map"].values()))
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        pickles = _pickles(folder)
        if pickles:
            raise ValueError(
                f"{pickles[0]} is a pickle, which selfspec does not load; convert it once with: "
                f"selfspec import heads {folder} OUT"
            )
        raise FileNotFoundError(f"no {SAFE_WEIGHTS_NAME} in {folder} beside its config.json")
    tensors: dict[str, Tensor] = {}
    for name in names:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"no {name} in {folder}, which {SAFE_WEIGHTS_INDEX_NAME} names")
        tensors |= read_tensors(folder / name)
    return tensors


def convert(folder: Path, out: Path) -> Path:
    """Copy a head whose weights are a pickle, with its weights as safetensors.

    The pickle is loaded with `weights_only=True`, which runs no code of the file.

    Returns:
        The weights file.

    Raises:
        FileNotFoundError: there is no config, or no pickle beside it.
        ValueError: the pickle holds anything but tensors by name.
    """
    pickles = _pickles(folder)
    if not (folder / PUBLISHED_CONFIG).is_file() or not pickles:
        raise FileNotFoundError(
            f"{folder} must hold {PUBLISHED_CONFIG} and weights in a .bin or .pt file; it holds "
            f"{sorted(path.name for path in folder.iterdir()) if folder.is_dir() else 'nothing'}"
        )
    tensors: dict[str, Tensor] = {}
    for path in pickles:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{path} is no file of plain tensors: {reason}") from None
        if not isinstance(loaded, dict) or not all(isinstance(v, Tensor) for v in loaded.values()):
            raise ValueError(f"{path} must hold tensors by name, got a {type(loaded).__name__}")
        tensors |= loaded
    out.mkdir(parents=True, exist_ok=True)
    # Tensors that share memory cannot be stored; clones can.
    copies = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    weights, config = out / SAFE_WEIGHTS_NAME, out / PUBLISHED_CONFIG
    with replacing(weights) as new_weights, replacing(config) as new_config:
        save_file(copies, new_weights, metadata={"format": "pt"})
        shutil.copyfile(folder / PUBLISHED_CONFIG, new_config)
    return weights


def _pickles(folder: Path) -> list[Path]:
    """Files that may hold pickled weights."""
    return sorted(path for pattern in ("*.bin", "*.pt") for path in folder.glob(pattern))


def fill(head: ExitHead, published: PublishedHead, names: Mapping[str, str]) -> None:
    """Load a head's weights.

    Args:
        head: the head to fill.
        published: the tensors.
        names: for each published tensor to use, its name in `head`.

    Raises:
        ValueError: a tensor is missing, has another shape, or belongs to nothing in the head.
    """
    where, wanted = f"the head in {published.folder}", head.state_dict()
    strange = [name for name, own in names.items() if own not in wanted]
    if strange:
        raise ValueError(f"{where} has a tensor that {head.kind} heads lack: {strange[0]}")
    published_as = {own: name for name, own in names.items()}
    weights: dict[str, Tensor] = {}
    for own, like in wanted.items():
        if own not in published_as:
            if own == "vocab_ids":
                weights[own] = like
                continue
            raise ValueError(f"{where} lacks a tensor: the one for {own} of {head.kind} heads")
        tensor = published.tensors[published_as[own]]
        if tensor.shape != like.shape:
            raise ValueError(
                f"{published_as[own]} of {where} has shape {list(tensor.shape)}, expected "
                f"{list(like.shape)} from its config and the target"
            )
        weights[own] = tensor
    head.load_state_dict(weights)


def is_embedding_of(decoder: Decoder, rows: Tensor) -> bool:
    """Whether these are the target's own embeddings, up to rounding to half precision."""
    own = getattr(decoder.causal_lm.get_input_embeddings(), "weight", None)
    if not isinstance(own, Tensor) or own.shape != rows.shape or own.is_meta:
        return False
    chosen = torch.linspace(0, len(rows) - 1, min(len(rows), 256)).long()
    mine = own.detach()[chosen.to(own.device)].float().cpu()
    return torch.allclose(mine, rows[chosen].float(), rtol=2**-7, atol=1e-6)


def draft_vocabulary(published: PublishedHead, offsets: Tensor, decoder: Decoder) -> Tensor | None:
    """Token ids of a draft vocabulary stored as offsets (`d2t`); `None` if it is the whole one.

    Raises:
        ValueError: the ids do not rise, or are no tokens of the target.
    """
    ids = torch.arange(len(offsets)) + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= decoder.vocab_size or bool((ids.diff() <= 0).any()):
        raise ValueError(
            f"d2t of the head in {published.folder} maps {len(ids)} draft tokens to "
            f"{int(ids.min())}..{int(ids.max())}, which must rise within "
            f"[0, {decoder.vocab_size - 1}]"
        )
    return None if len(ids) == decoder.vocab_size else ids
