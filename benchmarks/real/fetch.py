"""Other forms of the fetched checkpoint, and llama.cpp.

llama.cpp and its Python interface come from PyPI (`xllamacpp`, MIT), unpacked and not installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.real.gguf_file import write_gguf
from selfspec.apps.smollm2 import pip
from selfspec.decoder.checkpoints import load_causal_lm, load_tokenizer

_LLAMA_CPP = "xllamacpp>=2026.10,<2027"


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
        pip("install", "--no-deps", "--target", str(folder), _LLAMA_CPP)
    sys.path.append(str(folder))
    try:
        import xllamacpp  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    return True
