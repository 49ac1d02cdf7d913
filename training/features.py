"""What a target makes of training text: read as it is needed, or once, from files.

A cache holds the residual streams that heads read and the inputs of the LM head, for every block
of the training text; no step of a fit runs the target's layers then. It costs
`hidden * (streams + 1)` numbers a token on disk, and pays where text is seen more than once, or by
several fits.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

import torch
from pydantic import Field
from rich.console import Console
from safetensors import safe_open
from torch import Tensor

from selfspec.config import StrictConfig
from selfspec.decoder import Decoder, Packing
from selfspec.heads import ExitHead
from selfspec.heads.teacher_forcing import TargetStates, target_states
from training.data import Batch, Blocks, collate
from training.feature_files import Manifest, TextFacts, check_files, make_files, shard_path
from training.identity import digest, target_facts
from training.parallel import processes

_ROWS = 8  # blocks of a pass while a cache is made


class FeaturesConfig(StrictConfig):
    """A cache of the target's features.

    Attributes:
        folder: where it lies, for every process to see; fits of the same text may share it.
        dtype: `bfloat16` takes half the space, `float32` is what the target computes.
        shard_megabytes: size of a file, which is what a killed run loses at most.
    """

    folder: str
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    shard_megabytes: float = Field(default=256, gt=0)


def streams_of(heads: Sequence[ExitHead]) -> list[int]:
    """The residual streams that any of the heads reads."""
    return sorted({layer for head in heads for layer in head.input_layers})


class Reader(Protocol):
    """Says what the target made of a batch."""

    def read(self, batch: Batch) -> TargetStates:
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

    def read(self, batch: Batch) -> TargetStates:
        """Run the target."""
        return target_states(self.decoder, batch.tokens, batch.documents, self.streams)


class CachedReader:
    """Looks batches up in files, of which no more than their rows comes into memory.

    Blocks are found by their content, so any order and any mixture of the text can be read.

    Args:
        folder: the cache.
        manifest: what it holds.
        numbers: place of each block in the cache, by its key.
        streams: residual streams to read, by the number of layers below.
        dtype: what they are turned into: the dtype of the target.
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

    def read(self, batch: Batch) -> TargetStates:
        """Look a batch up.

        Raises:
            ValueError: it holds a block of other text.
        """
        try:
            places = [divmod(self.numbers[key], self.size) for key in block_keys(batch)]
        except KeyError:
            raise ValueError(
                "the batch holds a block that the features lack; make them of the text that is read"
            ) from None

        def stored(name: str) -> Tensor:
            rows = [self.files[shard].get_slice(name)[row] for shard, row in places]
            return torch.stack(rows).to(batch.tokens.device, self.dtype)

        streams = {layer: stored(_stream(layer)) for layer in self.streams}
        return TargetStates(batch.tokens, Packing.of(batch.documents), streams, stored("normed"))


def open_features(
    config: FeaturesConfig, decoder: Decoder, streams: Sequence[int], text: Sequence[Blocks]
) -> CachedReader:
    """Open the features of a text; make those first that are not there yet.

    With several processes the first one makes them, on its own device, while the others wait.

    Args:
        config: where they lie.
        decoder: the target.
        streams: residual streams that heads read, by the number of layers below.
        text: the blocks of each source.

    Raises:
        ValueError: the folder holds features of another target, other text or other streams, or a
            file in it is damaged.
        OSError: the disk has no room for them, or they could not be written.
    """
    folder = Path(config.folder)
    keys = [[key for batch in _passes(blocks) for key in block_keys(batch)] for blocks in text]
    manifest = Manifest(
        target=target_facts(decoder),
        block_size=text[0].block_size,
        text=[TextFacts(blocks=len(p), sha256=digest([key.hex() for key in p])) for p in keys],
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
    # No barrier: making features may take longer than one may last.
    while not ((manifest := Manifest.read(folder)) and manifest.whole):
        time.sleep(1)
    manifest.check(wanted, folder)
    return manifest


def _read_shard(
    manifest: Manifest, number: int, decoder: Decoder, text: Sequence[Blocks]
) -> dict[str, Tensor]:
    """`[blocks, block_size, hidden]` of each stream, over the blocks of a shard."""
    reader = TargetReader(decoder, manifest.streams)
    numbers = manifest.blocks_of(number)
    parts: list[dict[str, Tensor]] = []
    # A pass holds the same blocks whenever the shard is made, so its rounding is the same.
    for start in range(numbers.start, numbers.stop, _ROWS):
        batch = collate([_block(text, n) for n in numbers[start - numbers.start :][:_ROWS]])
        reading = reader.read(batch.to(decoder.device))
        tensors = {_stream(layer): stream for layer, stream in reading.streams.items()}
        tensors["normed"] = reading.normed
        parts.append({name: t.to("cpu", manifest.torch_dtype) for name, t in tensors.items()})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _passes(blocks: Blocks) -> Iterator[Batch]:
    for start in range(0, len(blocks), _ROWS):
        numbers = range(start, min(start + _ROWS, len(blocks)))
        yield collate([blocks[number] for number in numbers])


def _block(text: Sequence[Blocks], number: int) -> Batch:
    """A block by its place in all sources, end to end."""
    for blocks in text:
        if number < len(blocks):
            return blocks[number]
        number -= len(blocks)
    raise IndexError(number)


def _stream(layer: int) -> str:
    return f"stream_{layer}"
