"""The target's hidden states as training features, computed on the fly or cached on disk."""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import Self

from selfspec.config import StrictConfig, parse
from selfspec.decoder import Decoder, Packing
from selfspec.heads import ExitHead
from selfspec.heads.files import refuse_changes, replacing
from selfspec.heads.teacher_forcing import TargetStates, target_states

from ..data import Batch, Blocks, collate
from ..loop.checkpoint import digest, read_facts, target_facts, write_facts
from ..loop.metrics import Display
from ..loop.parallel import processes

MANIFEST_NAME = "features.json"
_FORMAT = 1


class Manifest(StrictConfig):
    """The contents of a cache.

    Attributes:
        format_version: version of the format.
        target: facts of the target.
        block_size: tokens of a block.
        blocks: blocks of all sources.
        text: for each source, a hash of its tokens and documents.
        streams: hidden states, by the number of layers below.
        dtype: dtype of the hidden states.
        blocks_per_shard: blocks of a file; the last may hold fewer.
        shards: SHA-256 of the existing files, in order.
    """

    format_version: int = _FORMAT
    target: dict[str, Any]
    block_size: int
    blocks: int
    text: list[str]
    streams: list[int]
    dtype: Literal["bfloat16", "float32"]
    blocks_per_shard: int = Field(default=1, ge=1)
    shards: list[str] = Field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The manifest of a folder; `None` if there is none.

        Raises:
            ValueError: it is damaged.
        """
        path = folder / MANIFEST_NAME
        facts = read_facts(path)
        return None if facts is None else parse(cls, facts, str(path))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype."""
        return getattr(torch, self.dtype)

    @property
    def files(self) -> int:
        """Number of shards of the complete cache."""
        return math.ceil(self.blocks / self.blocks_per_shard)

    @property
    def whole(self) -> bool:
        """Whether every shard exists."""
        return len(self.shards) == self.files

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's features."""
        numbers = self.block_size * self.target["hidden_size"] * (len(self.streams) + 1)
        return numbers * self.torch_dtype.itemsize

    def cut(self, megabytes: float) -> Self:
        """A copy with shards of about this size."""
        blocks = max(1, int(megabytes * 1e6 / self.block_bytes))
        return self.model_copy(update={"blocks_per_shard": blocks})

    def blocks_of(self, shard: int) -> range:
        """Numbers of the blocks in a shard."""
        first = shard * self.blocks_per_shard
        return range(first, min(first + self.blocks_per_shard, self.blocks))

    def check(self, wanted: Manifest, folder: Path) -> None:
        """Raise ValueError, naming the differences, unless this cache holds all that is wanted."""
        there, here = (m._compared for m in (self, wanted))
        if not set(wanted.streams) <= set(self.streams):
            there["set of streams"], here["set of streams"] = self.streams, wanted.streams
        refuse_changes(
            there,
            here,
            f"the features in {folder} were made",
            "give a new features.folder, or delete that one to recompute them",
        )

    @property
    def _compared(self) -> dict[str, Any]:
        facts = self.model_dump(include={"format_version", "target", "block_size", "dtype"})
        sources = {f"text of data[{n}]": sha256 for n, sha256 in enumerate(self.text)}
        return {**facts, **sources}


def shard_path(folder: Path, number: int) -> Path:
    """File of a shard."""
    return folder / f"features_{number:05d}.safetensors"


def make_files(
    folder: Path, manifest: Manifest, make: Callable[[int], dict[str, Tensor]]
) -> Manifest:
    """Write the missing shards; returns the manifest of the complete cache.

    A killed run loses at most the current shard: the manifest lists complete ones.

    Args:
        folder: the cache.
        manifest: the wanted contents, and the existing shards.
        make: returns the tensors of a shard.

    Raises:
        OSError: the disk is too small, or a shard could not be written.
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
    """A message with the size of the features; OSError if the disk is too small."""
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
    """Write a shard atomically; returns its SHA-256."""
    try:
        with replacing(path) as scratch:
            save_file(tensors, scratch)
            return _sha256(scratch)
    except (SafetensorError, OSError) as error:  # safetensors raises its own on a full disk
        raise OSError(f"{path} could not be written ({error}); run it again to resume") from error


def check_files(folder: Path, manifest: Manifest) -> None:
    """Check every shard.

    Raises:
        ValueError: one is missing or damaged.
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


_ROWS = 8  # blocks of a pass while a cache is computed


class FeaturesConfig(StrictConfig):
    """A cache of the target's features.

    Attributes:
        folder: its folder, visible to every process; fits on the same text may share it.
        dtype: `bfloat16` takes half the space, `float32` is exact.
        shard_megabytes: size of a file, which a killed run loses at most.
        keep: whether the folder stays when the heads are fitted.
    """

    folder: str
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    shard_megabytes: float = Field(default=256, gt=0)
    keep: bool = True


def streams_of(heads: Sequence[ExitHead]) -> list[int]:
    """The hidden states that the heads read, by the number of layers below."""
    return sorted({layer for head in heads for layer in head.input_layers})


Reader = Callable[[Batch], TargetStates]
"""Provides the target's hidden states for a batch."""


def target_reader(decoder: Decoder, streams: Sequence[int]) -> Reader:
    """Runs the target over each batch.

    Args:
        decoder: the target.
        streams: hidden states to keep, by the number of layers below.
    """
    return lambda batch: target_states(decoder, batch.tokens, batch.documents, streams)


class CachedReader:
    """Reads the hidden states of batches from a cache.

    Blocks are found by their content, so that the text can be read in any order.

    Args:
        folder: the cache.
        manifest: its contents.
        numbers: index of each block in the cache, by its key.
        streams: hidden states to read, by the number of layers below.
        dtype: the dtype to convert to.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        numbers: dict[bytes, int],
        streams: Sequence[int],
        dtype: torch.dtype,
    ):
        self.size, self.numbers = manifest.blocks_per_shard, numbers
        self.streams, self.dtype = streams, dtype
        shards = range(manifest.files)
        self.files = [safe_open(shard_path(folder, n), framework="pt") for n in shards]

    def __call__(self, batch: Batch) -> TargetStates:
        """The hidden states of a batch.

        Raises:
            ValueError: a block is not in the cache.
        """
        try:
            places = [divmod(self.numbers[key], self.size) for key in block_keys(batch)]
        except KeyError:
            raise ValueError(
                "the batch holds a block that is not in the features; compute them for this text"
            ) from None

        def stored(name: str) -> Tensor:
            rows = [self.files[shard].get_slice(name)[row] for shard, row in places]
            return torch.stack(rows).to(batch.tokens.device, self.dtype)

        streams = {layer: stored(_stream(layer)) for layer in self.streams}
        return TargetStates(batch.tokens, Packing.of(batch.documents), streams, stored("normed"))


def open_features(
    config: FeaturesConfig, decoder: Decoder, streams: Sequence[int], text: Sequence[Blocks]
) -> CachedReader:
    """Open the features of a text, after computing the missing ones.

    With several processes the first one computes them while the others wait.

    Args:
        config: the cache.
        decoder: the target.
        streams: hidden states that heads read, by the number of layers below.
        text: the blocks of each source.

    Raises:
        ValueError: the folder holds features of another target, other text or other streams, or a
            file in it is damaged.
        OSError: the disk is too small, or features could not be written.
    """
    folder = Path(config.folder)
    keys = [[key for batch in _passes(blocks) for key in block_keys(batch)] for blocks in text]
    manifest = Manifest(
        target=target_facts(decoder),
        block_size=text[0].block_size,
        blocks=sum(map(len, keys)),
        text=[digest([key.hex() for key in part]) for part in keys],
        streams=sorted(set(streams)),
        dtype=config.dtype,
    ).cut(config.shard_megabytes)
    if processes().is_main_process:
        manifest = _prepare(folder, manifest, decoder, text)
    else:
        manifest = _wait(folder, manifest)
    numbers: dict[bytes, int] = {}
    for number, key in enumerate(key for part in keys for key in part):
        numbers.setdefault(key, number)
    return CachedReader(folder, manifest, numbers, streams, decoder.dtype)


def block_keys(batch: Batch) -> list[bytes]:
    """A hash of each block: the same tokens in the same documents have the same features."""
    rows = torch.cat([batch.tokens, batch.positions], dim=1).cpu().numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows]


def _prepare(folder: Path, wanted: Manifest, decoder: Decoder, text: Sequence[Blocks]) -> Manifest:
    manifest = Manifest.read(folder) or wanted
    manifest.check(wanted, folder)
    if not manifest.whole:
        decoder.causal_lm.to(processes().device)  # pyright: ignore[reportArgumentType]
        manifest = make_files(folder, manifest, lambda n: _read_shard(manifest, n, decoder, text))
    Console().print(f"checking the features in {folder}", markup=False, highlight=False)
    check_files(folder, manifest)
    return manifest


def _wait(folder: Path, wanted: Manifest) -> Manifest:
    # Not a barrier, which would time out.
    while not ((manifest := Manifest.read(folder)) and manifest.whole):
        time.sleep(1)
    manifest.check(wanted, folder)
    return manifest


def _read_shard(
    manifest: Manifest, number: int, decoder: Decoder, text: Sequence[Blocks]
) -> dict[str, Tensor]:
    """`[blocks, block_size, hidden]` of each stream, over the blocks of a shard."""
    read = target_reader(decoder, manifest.streams)
    numbers = manifest.blocks_of(number)
    parts: list[dict[str, Tensor]] = []
    # A pass always holds the same blocks, so that rounding is reproducible.
    for start in range(numbers.start, numbers.stop, _ROWS):
        batch = collate([_block(text, n) for n in numbers[start - numbers.start :][:_ROWS]])
        reading = read(batch.to(decoder.device))
        tensors = {_stream(layer): stream for layer, stream in reading.streams.items()}
        tensors["normed"] = reading.normed
        parts.append({name: t.to("cpu", manifest.torch_dtype) for name, t in tensors.items()})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _passes(blocks: Blocks) -> Iterator[Batch]:
    for start in range(0, len(blocks), _ROWS):
        numbers = range(start, min(start + _ROWS, len(blocks)))
        yield collate([blocks[number] for number in numbers])


def _block(text: Sequence[Blocks], number: int) -> Batch:
    """A block by its index in the concatenated sources."""
    for blocks in text:
        if number < len(blocks):
            return blocks[number]
        number -= len(blocks)
    raise IndexError(number)


def _stream(layer: int) -> str:
    return f"stream_{layer}"
