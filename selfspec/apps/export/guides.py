"""Folders that are created as a whole, and their READMEs with the lines that launch an engine."""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from re import fullmatch
from shlex import quote

import psutil
from safetensors import SafetensorError

from selfspec import DEMO_MODEL
from selfspec.config import JsonObject

_HUB_ID = r"[\w-][\w.-]*/[\w.-]+"


def guide(
    name: str,
    target: str = "",
    folder: str = "",
    vllm: JsonObject | None = None,
    num_draft_tokens: int = 0,
    **words: object,
) -> str:
    """A README: a template of the package, filled in.

    `folder` is the checkpoint that engines load as the draft model of `target`, `vllm` vLLM's
    speculative config; `words` are what else the template `name` has places for.
    """
    template = (DEMO_MODEL.parent / "export" / f"{name}.md").read_text(encoding="utf-8")
    given = {
        "base_model": f"base_model: {target}\n" if fullmatch(_HUB_ID, target) else "",
        "target": target,
        "folder": folder,
        "big": quote(target),
        "small": quote(folder),
        "yaml": json.dumps(folder),
        "vllm": quote(json.dumps(vllm)),
        "k": num_draft_tokens,
        "sglang_k": num_draft_tokens + 1,  # SGLang also counts the token before the first draft
    }
    return template.format(**{**given, **words})


def check_free(folder: str | Path) -> Path:
    """The absolute path of a folder to create.

    Raises:
        FileExistsError: it exists and is not empty.
        OSError: it cannot be made where it is to be.
    """
    path = Path(folder).expanduser().absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{folder} is there already; delete it, or name another folder")
    above = next(parent for parent in path.parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        why = "cannot be written to" if above.is_dir() else "is not a folder"
        raise OSError(f"{folder} cannot be made, because {above} {why}; name another folder")
    return path


@contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """A scratch folder to fill; it becomes `folder` when the block ends without an error."""
    path = check_free(folder)
    _remove_left_over(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        scratch.mkdir(parents=True)
        yield scratch
        if path.exists():
            path.rmdir()
        scratch.rename(path)
    except SafetensorError as error:  # on a full disk
        raise OSError(f"{folder} could not be written: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _remove_left_over(path: Path) -> None:
    """Remove the scratch folders of exports to `path` that were killed: they may be large."""
    for scratch in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        process = scratch.suffixes[-2].removeprefix(".")
        if process.isdigit() and not psutil.pid_exists(int(process)):
            shutil.rmtree(scratch, ignore_errors=True)
