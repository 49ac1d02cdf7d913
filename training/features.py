"""What a target makes of training text: read as it is needed, or once, from files.

A cache holds the residual streams that heads read and the inputs of the LM head, for every block
of the training text, in safetensors shards beside a manifest. Fitting then never runs the target's
layers. It costs disk space, `hidden * (streams + 1)` numbers a token, and pays when text is seen
more than once, or by several fits.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import Field
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from selfspec.config import StrictConfig, parse
from selfspec.decoder import Decoder, Packing
from selfspec.forcing import Reading, read_text
from selfspec.heads.store import replacing
from training.data import Batch, Blocks, collate
from training.identity import changes, digest, read_facts, target_facts, write_facts
from training.metrics import Display
from training.parallel import processes

MANIFEST_NAME = "features.json"
_FORMAT = 1
_ROWS = 8  # blocks of a pass while a cache is made
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class FeaturesConfig(StrictConfig):
    """A cache of the target's features.

    Attributes:
        folder: where it lies, for every process to see; fits of the same text may share it.
        dtype: `bfloat16` takes half the space, `float32` is what the target computes.
        shard_megabytes: size of a file, and what a killed run loses at most.
    """

    folder: str
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    shard_megabytes: float = Field(default=256, gt=0)


class Reader(Protocol):
    """Says what the target made of a batch."""

    def read(self, batch: Batch) -> Reading:
        """The target's view of a batch, with the residual streams that the heads read."""
        ...


class TargetReader:
    """Runs the target over each batch.

    Args:
        decoder: the target.
        streams: residual streams to keep, by the number of layers below.
    """

    def __init__(self, decoder: Decoder, streams: Sequence[int]):
        self.decoder, self.streams = decoder, streams

    def read(self, batch: Batch) -> Reading:
        """Run the target."""
        return read_text(self.decoder, batch.tokens, batch.documents, self.streams)


class Manifest(StrictConfig):
    """What a cache holds, and of what.

    Attributes:
        format_version: of the files.
        target: facts of the target.
        block_size: tokens of a block.
        text: by source, its number of blocks and their hash.
        streams: residual streams, by the number of layers below.
        dtype: of the numbers.
        blocks_per_shard: blocks of a file; the last may hold fewer.
        shards: SHA-256 of the files that are there, in order.
    """

    format_version: int = _FORMAT
    target: dict[str, Any]
    block_size: int
    text: list[dict[str, Any]]
    streams: list[int]
    dtype: Literal["bfloat16", "float32"]
    blocks_per_shard: int = Field(ge=1)
    shards: list[str] = Field(default_factory=list)

    @property
    def blocks(self) -> int:
        """Blocks of all sources."""
        return sum(source["blocks"] for source in self.text)

    @property
    def files(self) -> int:
        """Shards of the whole cache."""
        return math.ceil(self.blocks / self.blocks_per_shard)

    @property
    def block_bytes(self) -> int:
        """Bytes of the features of a block."""
        numbers = self.block_size * self.target["hidden_size"] * (len(self.streams) + 1)
        return numbers * _DTYPES[self.dtype].itemsize

    @property
    def whole(self) -> bool:
        """Whether every shard is there."""
        return len(self.shards) == self.files

    def check(self, wanted: Manifest, folder: Path) -> None:
        """Raise ValueError, naming what differs, unless this cache serves what is wanted."""
        compared = {"format_version", "target", "block_size", "dtype"}
        own, given = (m.model_dump(include=compared) for m in (self, wanted))
        different = list(changes(own, given))
        own, given = ([s["sha256"] for s in m.text] for m in (self, wanted))
        names = [source["name"] for source in wanted.text]
        if len(own) != len(given):
            different.append(f"number of sources ({len(own)} there, {len(given)} here)")
        different += [f"text of {n}" for n, a, b in zip(names, own, given, strict=False) if a != b]
        if missing := sorted(set(wanted.streams) - set(self.streams)):
            different.append(f"set of residual streams ({self.streams} there, {missing} wanted)")
        if different:
            raise ValueError(
                f"the features in {folder} were made with another {', '.join(different)}; give a "
                "new features.folder, or delete that one to make them anew"
            )


def open_features(
    config: FeaturesConfig, decoder: Decoder, streams: Sequence[int], text: Sequence[Blocks]
) -> CachedReader:
    """Open the features of a text; make them first where they are not all there.

    With several processes the first one makes them, on its own device; the others wait.

    Args:
        config: where they lie.
        decoder: the target.
        streams: residual streams that heads read, by the number of layers below.
        text: the blocks of each source.

    Raises:
        ValueError: the folder holds features of another target, text or set of streams, or a file
            in it is damaged.
        OSError: the disk has no room for them.
    """
    folder, console = Path(config.folder), Console(highlight=False)
    keys = [_keys(blocks) for blocks in text]
    wanted = _wanted(config, decoder, streams, text, keys)
    if processes().is_main_process:
        manifest = _read_manifest(folder) or wanted
        manifest.check(wanted, folder)
        if not manifest.whole:
            manifest = _make(manifest, folder, decoder, text)
        console.print(f"checking {manifest.files} files of features in {folder}", markup=False)
        check_files(manifest, folder)
    else:
        # No barrier: making features may outlast its time limit.
        while not ((manifest := _read_manifest(folder)) and manifest.whole):
            time.sleep(1)
        manifest.check(wanted, folder)
    numbers: dict[bytes, int] = {}
    for number, key in enumerate(key for part in keys for key in part):
        numbers.setdefault(key, number)
    return CachedReader(folder, manifest, numbers, streams, decoder.dtype)


def _wanted(
    config: FeaturesConfig,
    decoder: Decoder,
    streams: Sequence[int],
    text: Sequence[Blocks],
    keys: Sequence[Sequence[bytes]],
) -> Manifest:
    manifest = Manifest(
        target=target_facts(decoder),
        block_size=text[0].block_size,
        text=[
            {"name": blocks.name, "blocks": len(part), "sha256": digest([k.hex() for k in part])}
            for blocks, part in zip(text, keys, strict=True)
        ],
        streams=sorted(set(streams)),
        dtype=config.dtype,
        blocks_per_shard=1,
    )
    fitting = int(config.shard_megabytes * 1e6 / manifest.block_bytes)
    return manifest.model_copy(update={"blocks_per_shard": max(1, fitting)})


def _read_manifest(folder: Path) -> Manifest | None:
    path = folder / MANIFEST_NAME
    facts = read_facts(path)
    return None if facts is None else parse(Manifest, facts, str(path))


def _shard(folder: Path, number: int) -> Path:
    return folder / f"features_{number:05d}.safetensors"


def _keys(blocks: Blocks) -> list[bytes]:
    """By content: the same tokens in the same documents have the same features."""
    return [key for start in range(len(blocks)) for key in block_keys(blocks[start])]


def block_keys(batch: Batch) -> list[bytes]:
    """A hash of each block's tokens and of where its documents begin."""
    rows = torch.cat([batch.tokens.long(), batch.positions], dim=1).cpu().numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows]


# Making


def _make(manifest: Manifest, folder: Path, decoder: Decoder, text: Sequence[Blocks]) -> Manifest:
    """Read the text that is not in the cache yet, shard by shard."""
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(".features*.tmp"):
        left_over.unlink()
    first = len(manifest.shards)
    done = first * manifest.blocks_per_shard
    display = Display("reading", manifest.blocks, done)
    display.say(_room(manifest, done, folder))
    decoder.causal_lm.to(processes().device)
    with display:
        for number in range(first, manifest.files):
            features = _read_shard(manifest, number, decoder, text)
            shard = _write_shard(features, _shard(folder, number))
            manifest = manifest.model_copy(update={"shards": [*manifest.shards, shard]})
            write_facts(folder / MANIFEST_NAME, manifest.model_dump())
            done = min(done + manifest.blocks_per_shard, manifest.blocks)
            display.step(done, {}, line=True)
    return manifest


def _room(manifest: Manifest, done: int, folder: Path) -> str:
    """Say what the cache takes; raise OSError if the disk has no room for it."""
    size, free = (manifest.blocks - done) * manifest.block_bytes, shutil.disk_usage(folder).free
    said = (
        f"features of {manifest.blocks - done} blocks take {size / 1e9:.2f} GB in {folder} "
        f"({len(manifest.streams)} streams and the LM head's inputs in {manifest.dtype})"
    )
    if size > free:
        raise OSError(
            f"{said}, of which {free / 1e9:.2f} GB are free; give less text, another "
            "features.folder, or none: the target then reads the text as it comes"
        )
    return f"{said}; {free / 1e9:.2f} GB are free"


def _read_shard(
    manifest: Manifest, number: int, decoder: Decoder, text: Sequence[Blocks]
) -> dict[str, Tensor]:
    """`[blocks, block_size, hidden]` of each stream."""
    first = number * manifest.blocks_per_shard
    last = min(first + manifest.blocks_per_shard, manifest.blocks)
    reader, parts = TargetReader(decoder, manifest.streams), []
    for start in range(first, last, _ROWS):
        numbers = range(start, min(start + _ROWS, last))
        batch = collate([_block(text, n) for n in numbers]).to(decoder.device)
        parts.append(_tensors(reader.read(batch)))
    dtype = _DTYPES[manifest.dtype]
    return {
        name: torch.cat([part[name].to("cpu", dtype) for part in parts]).contiguous()
        for name in parts[0]
    }


def _block(text: Sequence[Blocks], number: int) -> Batch:
    for blocks in text:
        if number < len(blocks):
            return blocks[number]
        number -= len(blocks)
    raise IndexError(number)


def _tensors(reading: Reading) -> dict[str, Tensor]:
    streams = {_stream(layer): stream for layer, stream in reading.streams.items()}
    return {**streams, "normed": reading.normed}


def _stream(layer: int) -> str:
    return f"stream_{layer}"
