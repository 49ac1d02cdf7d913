"""The files of a feature cache: a manifest beside safetensors shards, each written whole."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import Self

from selfspec.config import StrictConfig, parse
from selfspec.heads.store import replacing
from training.identity import changes, read_facts, write_facts
from training.metrics import Display

MANIFEST_NAME = "features.json"
_FORMAT = 1


class TextFacts(StrictConfig):
    """One source of text.

    Attributes:
        blocks: how many it holds.
        sha256: of their tokens and documents.
    """

    blocks: int
    sha256: str


class Manifest(StrictConfig):
    """What a cache holds, and of what.

    Attributes:
        format_version: of the files.
        target: facts of the target.
        block_size: tokens of a block.
        text: the sources.
        streams: residual streams, by the number of layers below.
        dtype: of the numbers.
        blocks_per_shard: blocks of a file; the last may hold fewer.
        shards: SHA-256 of the files that are there, in their order.
    """

    format_version: int = _FORMAT
    target: dict[str, Any]
    block_size: int
    text: list[TextFacts]
    streams: list[int]
    dtype: Literal["bfloat16", "float32"]
    blocks_per_shard: int = Field(default=1, ge=1)
    shards: list[str] = Field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The manifest of a folder, or `None` where there is none.

        Raises:
            ValueError: it is damaged.
        """
        path = folder / MANIFEST_NAME
        facts = read_facts(path)
        return None if facts is None else parse(cls, facts, str(path))

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of the numbers."""
        return getattr(torch, self.dtype)

    @property
    def blocks(self) -> int:
        """Blocks of all sources."""
        return sum(source.blocks for source in self.text)

    @property
    def files(self) -> int:
        """Shards of the whole cache."""
        return math.ceil(self.blocks / self.blocks_per_shard)

    @property
    def whole(self) -> bool:
        """Whether every shard is there."""
        return len(self.shards) == self.files

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's features."""
        numbers = self.block_size * self.target["hidden_size"] * (len(self.streams) + 1)
        return numbers * self.torch_dtype.itemsize

    def cut(self, megabytes: float) -> Self:
        """The same in shards of about this size."""
        blocks = max(1, int(megabytes * 1e6 / self.block_bytes))
        return self.model_copy(update={"blocks_per_shard": blocks})

    def blocks_of(self, shard: int) -> range:
        """Numbers of the blocks in a shard."""
        first = shard * self.blocks_per_shard
        return range(first, min(first + self.blocks_per_shard, self.blocks))

    def check(self, wanted: Manifest, folder: Path) -> None:
        """Raise ValueError, naming what differs, unless this cache holds all that is wanted."""
        there, here = (m._compared for m in (self, wanted))
        different = list(changes(there, here))
        if not set(wanted.streams) <= set(self.streams):
            different.append(f"set of streams ({self.streams} there, {wanted.streams} here)")
        if different:
            raise ValueError(
                f"the features in {folder} were made with another {', '.join(different)}; give a "
                "new features.folder, or delete that one to make them anew"
            )

    @property
    def _compared(self) -> dict[str, Any]:
        facts = self.model_dump(include={"format_version", "target", "block_size", "dtype"})
        sources = {f"text of data[{n}]": source.sha256 for n, source in enumerate(self.text)}
        return {**facts, **sources}


def shard_path(folder: Path, number: int) -> Path:
    """File of a shard."""
    return folder / f"features_{number:05d}.safetensors"


def make_files(
    folder: Path, manifest: Manifest, make: Callable[[int], dict[str, Tensor]]
) -> Manifest:
    """Write the shards that are not there yet; returns the manifest of the whole cache.

    A killed run loses the shard it was at: the manifest names those that are whole.

    Args:
        folder: the cache.
        manifest: what it shall hold, and what it holds already.
        make: the tensors of a shard, by its number.

    Raises:
        OSError: the disk has no room for them, or one could not be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(".features*.tmp"):
        left_over.unlink()
    done = manifest.blocks_of(len(manifest.shards)).start
    display = Display("reading text", manifest.blocks, done)
    display.say(_room(folder, manifest, manifest.blocks - done))
    with display:
        for number in range(len(manifest.shards), manifest.files):
            written = _write(shard_path(folder, number), make(number))
            manifest = manifest.model_copy(update={"shards": [*manifest.shards, written]})
            write_facts(folder / MANIFEST_NAME, manifest.model_dump())
            display.step(manifest.blocks_of(number).stop, {}, line=True)
    return manifest


def _room(folder: Path, manifest: Manifest, blocks: int) -> str:
    """Say what the features take; raise OSError if the disk has no room for them."""
    size, free = blocks * manifest.block_bytes, shutil.disk_usage(folder).free
    said = (
        f"features of {blocks} blocks (streams {manifest.streams} and the LM head's inputs in "
        f"{manifest.dtype}) take {size / 1e9:.3f} GB in {folder}; {free / 1e9:.3f} GB are free"
    )
    if size > free:
        raise OSError(
            f"{said}; give less text, another features.folder, or no `features`: the target then "
            "reads the text as it comes"
        )
    return said


def _write(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write a shard, whole or not at all; returns its SHA-256."""
    try:
        with replacing(path) as scratch:
            save_file(tensors, scratch)
            return _sha256(scratch)
    except (SafetensorError, OSError) as error:  # the former is what a full disk gives
        raise OSError(
            f"{path} could not be written ({error}); called again, it goes on from there"
        ) from error


def check_files(folder: Path, manifest: Manifest) -> None:
    """Read every shard once.

    Raises:
        ValueError: one is missing, or is not what was written.
    """
    for number, written in enumerate(manifest.shards):
        path = shard_path(folder, number)
        if not path.is_file() or _sha256(path) != written:
            what = "damaged" if path.is_file() else "missing"
            raise ValueError(
                f"{path} is {what}; delete {folder} to make its features anew, or put the file back"
            )


def _sha256(path: Path) -> str:
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            sha256.update(piece)
    return sha256.hexdigest()
