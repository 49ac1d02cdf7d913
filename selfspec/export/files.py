"""Folders that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_free(folder: str | Path) -> Path:
    """The folder to write, absolute.

    Raises:
        FileExistsError: it is there already, with something in it.
    """
    path = Path(folder).expanduser().absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{folder} is there already; delete it, or name another folder")
    return path


@contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """A folder to fill, which becomes `folder` when the block ends well.

    Raises:
        FileExistsError: `folder` is there already, with something in it.
    """
    path = check_free(folder)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        scratch.mkdir(parents=True)
        yield scratch
        if path.exists():
            path.rmdir()
        scratch.rename(path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
