"""The config and the tensors of a published head, and how they become one of our heads."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from selfspec.config import JsonObject
from selfspec.decoder import Decoder
from selfspec.heads.base import ExitHead
from selfspec.heads.files import CheckpointFiles, read_object, replacing

PUBLISHED_CONFIG = "config.json"
PUBLISHED_FILES = (PUBLISHED_CONFIG, SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, "*.safetensors")


@dataclass
class PublishedHead:
    """A head as it was published.

    Attributes:
        folder: where it was found.
        config: what its `config.json` holds.
        tensors: its tensors by their published names.
        files: for each of them, the name of its file.
        inside: prefix of its tensors in the checkpoint of its target; empty for a head with files
            of its own. The config is then the target's.
    """

    folder: Path
    config: JsonObject
    tensors: dict[str, Tensor]
    files: dict[str, str]
    inside: str = ""

    @property
    def where(self) -> str:
        """How messages name it."""
        return f"the head in {self.folder}"


def read_folder(folder: Path) -> PublishedHead:
    """Read a folder of `config.json` and safetensors, which may be the checkpoint of a target.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or the weights are stored as a pickle only.
    """
    config = read_object(folder / PUBLISHED_CONFIG)
    checkpoint = CheckpointFiles(folder)
    if not checkpoint.files:
        _refuse_no_files(folder, checkpoint.unreadable)
    wrapper = _wrapper(checkpoint.files)
    if wrapper:
        return replace(read_checkpoint(checkpoint, folder, config, wrapper), inside="")
    return read_checkpoint(checkpoint, folder, config, prefix_inside(checkpoint.files))


# What trainers and `torch.compile` put before the names of a whole model.
_WRAPPERS = re.compile(r"((_orig_mod|module|base_model|draft_model)\.)*")


def _wrapper(names: Collection[str]) -> str:
    """The prefix of all names that says nothing of the head; empty if there is none."""
    found = {match[0] for name in names if (match := _WRAPPERS.match(name))}
    return found.pop() if len(found) == 1 else ""


def read_checkpoint(
    checkpoint: CheckpointFiles, folder: Path, config: JsonObject, inside: str
) -> PublishedHead:
    """Read the tensors under a prefix, which is left out of their names.

    Keys of the config that are null are left out, too: others, or defaults, have the value.
    """
    names = [name for name in checkpoint.files if name.startswith(inside)]
    tensors = checkpoint.read(names)
    return PublishedHead(
        folder,
        _without_nulls(config),
        {name.removeprefix(inside): tensors[name] for name in names},
        {name.removeprefix(inside): checkpoint.files[name] for name in names},
        inside,
    )


def _without_nulls(config: Mapping[str, object]) -> JsonObject:
    return {
        key: _without_nulls(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if value is not None
    }


_MEDUSA = re.compile(r"(?P<prefix>(.*\.)?medusa_heads?\.)\d+\.")
_EAGLE = re.compile(r"(?P<prefix>.*\.)fc\.weight")
_OWN_FILE = re.compile(r"(model\.)*")  # prefixes of heads with files of their own
_EAGLE_LAYERS = ("layers.0.self_attn.q_proj.weight", "midlayer.self_attn.q_proj.weight")


def prefix_inside(names: Collection[str]) -> str:
    """The prefix of a Medusa or EAGLE head among the tensors of its target; empty if none is there.

    Medusa-2 checkpoints have `medusa_head.`, those that ModelOpt trains `eagle_module.`
    """
    for name in names:
        found = _MEDUSA.match(name) or _EAGLE.fullmatch(name)
        prefix = "" if found is None else found["prefix"]
        among_others = prefix and not all(other.startswith(prefix) for other in names)
        if not among_others or _OWN_FILE.fullmatch(prefix):
            continue
        # Multi-token prediction layers have an `fc` too, and norms before it.
        layer = any(prefix + tail in names for tail in _EAGLE_LAYERS)
        if "medusa" in prefix or (layer and f"{prefix}pre_fc_norm_hidden.weight" not in names):
            return prefix
    return ""


def _refuse_no_files(folder: Path, unreadable: Sequence[str]) -> None:
    pickles = _pickles(folder)
    if unreadable:
        raise ValueError(unreadable[0])
    if pickles:
        raise ValueError(
            f"{pickles[0]} is a pickle, which selfspec does not load; convert it once with: "
            f"selfspec import heads {folder} OUT"
        )
    raise FileNotFoundError(f"no {SAFE_WEIGHTS_NAME} in {folder} beside its config.json")


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
            f"{folder} must hold {PUBLISHED_CONFIG} and a .bin, .pt or .pth file; it holds "
            f"{sorted(path.name for path in folder.iterdir()) if folder.is_dir() else 'nothing'}"
        )
    tensors: dict[str, Tensor] = {}
    for path in pickles:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged pickle may lead to any
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ValueError(f"{path} is not a file of plain tensors: {reason}") from None
        if not isinstance(loaded, dict) or not all(map(_is_plain, loaded.values())):
            raise ValueError(
                f"{path} must hold plain tensors by name, got a {type(loaded).__name__}"
            )
        tensors |= loaded
    out.mkdir(parents=True, exist_ok=True)
    # Tensors that share memory cannot be stored; clones can.
    copies = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    weights, config = out / SAFE_WEIGHTS_NAME, out / PUBLISHED_CONFIG
    with replacing(weights) as new_weights, replacing(config) as new_config:
        save_file(copies, new_weights, metadata={"format": "pt"})
        shutil.copyfile(folder / PUBLISHED_CONFIG, new_config)
    return weights


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized


# What trainers put beside weights.
_NO_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state.*)\.(bin|pt|pth)")


def _pickles(folder: Path) -> list[Path]:
    """Files that may hold pickled weights."""
    found = (path for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    return sorted(path for path in found if not _NO_WEIGHTS.fullmatch(path.name))


def fill(head: ExitHead, published: PublishedHead, names: Mapping[str, str]) -> None:
    """Load a head's weights.

    Args:
        head: the head to fill.
        published: the tensors.
        names: for each published tensor to use, its name in `head`. Those of a file that holds
            nothing of the head, such as a trainer's state, are left out.

    Raises:
        ValueError: a tensor is missing, has another shape, is packed, or belongs to nothing in the
            head.
    """
    where, wanted = published.where, head.state_dict()
    used = {published.files[name] for name, own in names.items() if own in wanted}
    names = {name: own for name, own in names.items() if published.files[name] in used}
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
        check_stored(f"{published_as[own]} of {where}", tensor)
        if tensor.shape != like.shape:
            raise ValueError(
                f"{published_as[own]} of {where} has shape {list(tensor.shape)}, expected "
                f"{list(like.shape)} from its config and the target"
            )
        weights[own] = tensor
    head.load_state_dict(weights)


def check_stored(what: str, tensor: Tensor) -> None:
    """Raise ValueError for weights that a quantizer has packed, or stored in 8 bits."""
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(
            f"{what} is stored as {kind}; selfspec reads float64, float32, bfloat16 and float16"
        )


def is_embedding_of(decoder: Decoder, rows: Tensor, module: nn.Module | None = None) -> bool:
    """Whether these are the target's own embeddings, up to rounding to half precision.

    Args:
        decoder: the target.
        rows: `[vocab, hidden]`.
        module: a module of the target to compare with, in place of its embedding.
    """
    own = getattr(module or decoder.causal_lm.get_input_embeddings(), "weight", None)
    if not isinstance(own, Tensor) or own.shape != rows.shape or own.is_meta:
        return False
    parts = zip(own.detach().split(4096), rows.split(4096), strict=True)  # to save memory
    return all(
        torch.allclose(mine.float().cpu(), part.float().cpu(), rtol=2**-7, atol=1e-6)
        for mine, part in parts
    )


def token_order(where: str, ids: Tensor, decoder: Decoder) -> tuple[Tensor, Tensor]:
    """The tokens of a draft vocabulary in rising order, and the rows that they have in the file.

    Raises:
        ValueError: the ids are not tokens of the target, or name one twice.
    """
    if ids.ndim != 1 or not len(ids) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(
            f"the token ids of {where} must be whole numbers in one dimension, got shape "
            f"{list(ids.shape)} of {ids.dtype}"
        )
    tokens, rows = ids.long().sort()
    least, most = int(tokens[0]), int(tokens[-1])
    if least < 0 or most >= decoder.vocab_size or bool((tokens.diff() == 0).any()):
        raise ValueError(
            f"{where} maps {len(ids)} draft tokens to {least}..{most}, which must be different "
            f"tokens within [0, {decoder.vocab_size - 1}]"
        )
    return tokens, rows
