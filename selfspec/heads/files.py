"""Reading and writing files of heads."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import groupby
from pathlib import Path
from socket import gethostname
from typing import IO

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from selfspec.config import JsonObject
from selfspec.decoder.checkpoints import folder_of

_HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "subfolder")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; ValueError if it is damaged."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give a safetensors file")
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


def replace_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def make_folder(folder: Path) -> None:
    """Make a folder if it is missing; ValueError if it is a file, or in one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"{folder} cannot be made, a file is in its way; give another") from None


_LOCK = ".lock"


@contextmanager
def one_run(folder: Path) -> Iterator[None]:
    """Keep a folder for this process until the block ends.

    The lock is the operating system's, so that none is left of a process that is killed.

    Args:
        folder: made if it is missing. The file `.lock` in it names the process.

    Raises:
        BlockingIOError: another process keeps the folder.
        ValueError: it is a file, or in one.
    """
    make_folder(folder)
    with (folder / _LOCK).open("a+", encoding="utf-8") as file:
        if not _is_locked(file):
            raise BlockingIOError(
                f"{folder} is in use by {_owner(file)}; wait until it ends, or give another output"
            )
        try:
            file.truncate(0)
            started = datetime.now().astimezone().isoformat(" ", "seconds")
            json.dump({"pid": os.getpid(), "host": gethostname(), "started": started}, file)
            file.flush()
            yield
        finally:
            file.truncate(0)


def check_free(folder: Path) -> None:
    """Raise BlockingIOError if another process keeps a folder (`one_run`)."""
    if (folder / _LOCK).exists():
        with one_run(folder):
            pass


def _is_locked(file: IO[str]) -> bool:
    """Lock an open file for this process; false if another one has it."""
    try:
        _lock(file)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # the file system has no locks
        return True
    return True


if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[str]) -> None:
        file.seek(2**30)  # what is locked cannot be read: a byte far behind the text
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(file: IO[str]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _owner(file: IO[str]) -> str:
    """The process that keeps a lock, in words."""
    file.seek(0)
    try:
        told = json.loads(file.read())
        return "process {pid} on {host}, started {started}".format(**told)
    except (ValueError, KeyError, TypeError):  # it has not written its name yet
        return "another process"


def read_object(path: Path, remedy: str = "it may be truncated") -> JsonObject:
    """The JSON object in a file; ValueError, ending with `remedy`, if it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {remedy}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, got a {type(found).__name__}; {remedy}")
    return found


def changes(saved: object, given: object, name: str = "") -> Iterator[str]:
    """Names of the leaves in which two trees of dicts and lists differ, with short values."""
    if isinstance(saved, list) and isinstance(given, list) and len(saved) == len(given):
        saved, given = dict(enumerate(saved)), dict(enumerate(given))
    if isinstance(saved, Mapping) and isinstance(given, Mapping):
        for key in sorted(saved.keys() | given.keys()):
            inner = f"{name}.{key}" if name else str(key)
            yield from changes(saved.get(key), given.get(key), inner)
    elif saved != given:
        values = f" ({saved!r} there, {given!r} here)"
        yield name + values * (len(values) < 80)


def refuse_changes(saved: object, given: object, what: str, remedy: str) -> None:
    """Raise ValueError, naming the differences, unless the facts of both are the same.

    Args:
        saved: facts of what is on disk.
        given: facts of what is wanted.
        what: what is on disk, the beginning of the message.
        remedy: the end of the message.
    """
    different = ", ".join(changes(saved, given))
    if different:
        raise ValueError(f"{what} with another {different}; {remedy}")


def read_lines(path: Path, *fields: str) -> list[JsonObject]:
    """The JSON objects in the lines of a file; an unfinished last line is removed from it.

    Args:
        path: the file, which may be missing.
        fields: what every object has.

    Raises:
        ValueError: another line is damaged.
    """
    text = path.read_bytes() if path.is_file() else b""
    *lines, rest = text.split(b"\n")
    if rest:
        os.truncate(path, len(text) - len(rest))  # what is appended must begin a line
    return [_line(f"{path}, line {n}", line, fields) for n, line in enumerate(lines, 1)]


def _line(place: str, text: bytes, fields: Sequence[str]) -> JsonObject:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found.keys() >= set(fields):
        wanted = f" with {' and '.join(fields)}" if fields else ""
        raise ValueError(
            f"{place} is damaged: it must hold a JSON object{wanted}, got {text[:40]!r}; delete "
            "that line to go on without it"
        )
    return found


def append_line(path: Path, record: JsonObject) -> None:
    """Append a JSON object in a line of its own.

    Raises:
        OSError: it could not be written.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
    except OSError as error:
        raise OSError(
            f"{path} could not be written ({error}); the same command resumes after the last line"
        ) from error


def read_index(path: Path) -> dict[str, str]:
    """For each tensor, the file that an index names; ValueError if the index is damaged."""
    files = read_object(path).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ValueError(f"{path} must map tensors to files under weight_map; it may be truncated")
    return files


@contextmanager
def opened(path: Path) -> Iterator[safe_open]:
    """A safetensors file to read tensors from; ValueError if it is damaged or lacks one."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error}); it may be truncated") from None


class CheckpointFiles:
    """The safetensors files of a checkpoint, which are read tensor by tensor.

    They are those that its index names, or `model.safetensors`. Files beside them, as people keep a
    layer for drafting in, are read for names that these lack.

    Args:
        path: a folder, a GGUF file in one, or a hub id.
        options: options of `from_pretrained`, of which those of the hub are used.

    Attributes:
        files: for the name of each tensor, the name of its file; empty if there are none.
        unreadable: why files beside those of the index could not be read.

    Raises:
        ValueError: the index or `model.safetensors` is damaged.
    """

    def __init__(self, path: str | Path, **options: object):
        self._path = folder_of(path)
        self._options = {name: options[name] for name in _HUB_OPTIONS if name in options}
        self.files: dict[str, str] = {}
        self.unreadable: list[str] = []
        main = self._file(SAFE_WEIGHTS_INDEX_NAME)
        if main is not None:
            self.files = dict(read_index(main))
        else:
            main = self._file(SAFE_WEIGHTS_NAME)
            if main is not None:
                self._add(main)
        folder = Path(self._path) if main is None else main.parent
        for beside in sorted(folder.glob("*.safetensors")):
            if beside.name not in self.files.values() and beside.is_file():
                try:
                    self._add(beside)
                except ValueError as error:
                    self.unreadable.append(str(error))

    def _add(self, path: Path) -> None:
        with opened(path) as file:
            for name in file.keys():
                self.files.setdefault(name, path.name)

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        path = self._file(self.files[name])
        if path is None:
            raise FileNotFoundError(f"no {self.files[name]} in {self._path}, which its index names")
        return path

    def values(self, name: str, indices: Sequence[int]) -> list[float]:
        """Single numbers of a tensor, by their indices in row-major order."""
        with opened(self.file_of(name)) as file:
            tensor = file.get_slice(name)
            width = math.prod(tensor.get_shape()[1:])
            found = [tensor[at // width : at // width + 1].flatten()[at % width] for at in indices]
        return [float(value) for value in found]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Whole tensors.

        Raises:
            FileNotFoundError: there is no such file as the index names.
            ValueError: a file is damaged, or lacks a tensor.
        """
        tensors: dict[str, Tensor] = {}
        by_file = sorted((self.files[name], name) for name in names)
        for _, group in groupby(by_file, key=lambda pair: pair[0]):
            chosen = [name for _, name in group]
            with opened(self.file_of(chosen[0])) as file:
                tensors |= {name: file.get_tensor(name) for name in chosen}
        return tensors

    def _file(self, name: str) -> Path | None:
        found = cached_file(
            self._path, name, _raise_exceptions_for_missing_entries=False, **self._options
        )
        return None if found is None else Path(found)
