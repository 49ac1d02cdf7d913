"""Reading and writing files of heads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; ValueError if it is damaged."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error}); it may be truncated") from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A scratch file to write; it replaces `path` when the block ends without an error."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield scratch
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
