"""Heads that others have published, in the formats in which they are found.

One module reads one format: it says whether a folder is of that format, and makes heads of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from selfspec.decoder import Decoder
from selfspec.heads.base import ExitHead
from selfspec.heads.files import CheckpointFiles
from selfspec.heads.formats import dflash, eagle, medusa, speculators
from selfspec.heads.formats.files import PublishedHead, prefix_inside, read_checkpoint, read_folder
from selfspec.heads.formats.mtp import FoundMtp, find_mtp, read_mtp

# Asked in this order.
_READERS: tuple[tuple[Callable[[PublishedHead], bool], Callable[..., ExitHead]], ...] = (
    (dflash.matches, dflash.read),
    (speculators.matches, speculators.read),
    (medusa.matches, medusa.read),
    (eagle.matches, eagle.read),
)
# What a file that does not hold what it should leads to, deep inside.
_DAMAGE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    TypeError,
)
# Keys by which configs of checkpoints announce multi-token prediction layers.
_ANNOUNCED = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


def load_published(decoder: Decoder, folder: Path) -> ExitHead:
    """The head in a folder of a published format.

    The folder may be the checkpoint of a target that holds its head.

    Raises:
        FileNotFoundError: there is no config, or no safetensors file.
        ValueError: the format is unknown, a file is damaged, or the head does not fit the target.
    """
    checkpoint = CheckpointFiles(folder)
    mtp = find_mtp(checkpoint, decoder.depth)
    if mtp is None:
        return _load(decoder, read_folder(folder))
    try:
        return read_mtp(decoder, mtp, checkpoint)
    except (OSError, ValueError, *_DAMAGE) as error:
        raise ValueError(f"{_named(mtp)} of {folder} cannot be used: {_reason(error)}") from error


def _named(mtp: FoundMtp) -> str:
    return f"the multi-token prediction layer {mtp.root}*"


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _load(decoder: Decoder, published: PublishedHead) -> ExitHead:
    try:
        for matches, read in _READERS:
            if matches(published):
                head = read(decoder, published)
                head.check(decoder)
                return head.eval().requires_grad_(False)
    except _DAMAGE as error:
        raise ValueError(
            f"{published.where} is damaged, or of a layout that selfspec does not know "
            f"({type(error).__name__}: {_reason(error)})"
        ) from error
    raise ValueError(
        f"{published.folder} holds no head of a known format: its config names "
        f"{published.config.get('architectures')}; selfspec reads heads of its own, EAGLE, "
        "EAGLE-3, P-EAGLE, DFlash, DSpark, DFlash2 and Medusa"
    )


# Heads inside the checkpoint of their target


def ships_head(path: str | Path, depth: int) -> bool:
    """Whether a checkpoint holds a multi-token prediction layer, or a Medusa or EAGLE head."""
    checkpoint = CheckpointFiles(path)
    return bool(find_mtp(checkpoint, depth) or prefix_inside(checkpoint.files))


def load_shipped(decoder: Decoder, path: str | Path, **options: object) -> ExitHead | None:
    """The head that a checkpoint of the target holds; `None` if it has none and announces none.

    Args:
        decoder: the target.
        path: a folder or a hub id.
        options: options of `from_pretrained`, of which those of the hub are used.

    Raises:
        ValueError: there is one that cannot be used, or only a config that announces it. The
            message says what was found.
    """
    what, checkpoint = f"a drafting head of {path}", None
    try:
        checkpoint = CheckpointFiles(path, **options)
        mtp, inside = find_mtp(checkpoint, decoder.depth), prefix_inside(checkpoint.files)
        if mtp is not None:
            what = f"{_named(mtp)} of {path}"
            return read_mtp(decoder, mtp, checkpoint)
        if inside:
            what = f"the head {inside}* inside {path}"
            config = decoder.causal_lm.config.to_dict()
            return _load(decoder, read_checkpoint(checkpoint, Path(path), config, inside))
        what = f"the multi-token prediction layer of {path}"
        return _refuse_absent(decoder, checkpoint)
    except (OSError, ValueError, *_DAMAGE) as error:
        raise ValueError(
            f"{what} is not used: {_reason(error)}; plain drafts are used instead"
        ) from error


def _refuse_absent(decoder: Decoder, checkpoint: CheckpointFiles) -> None:
    """Raise ValueError if the config announces a layer, or a file that may hold one is damaged."""
    configs = (decoder.config, decoder.causal_lm.config)
    announced = {
        key: count for config in configs for key in _ANNOUNCED if (count := getattr(config, key, 0))
    }
    if checkpoint.unreadable:
        raise ValueError(checkpoint.unreadable[0])
    if announced:
        key, count = next(iter(announced.items()))
        raise ValueError(
            f"the config announces it ({key} = {count}), but no file has tensors of a layout that "
            "selfspec knows"
        )


__all__ = ["load_published", "load_shipped", "ships_head"]
