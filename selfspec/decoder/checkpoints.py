"""Checkpoints: where they are, and how they are loaded."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

# Options of `from_pretrained` with which a folder needs no config.json of its own.
_ELSEWHERE = {"config", "gguf_file", "subfolder"}


def find_checkpoint(name: str | Path, options: Collection[str] = ()) -> Path | str:
    """The folder of a checkpoint, or the Hugging Face id that `name` is.

    Args:
        name: a folder or a Hugging Face id.
        options: names of the options of `from_pretrained`.

    Raises:
        FileNotFoundError: `name` is a folder without a config.json, or looks like a path, and there
            is no folder.
    """
    folder = Path(name).expanduser()
    text = str(name)
    is_path = isinstance(name, Path) or text.startswith((".", "~", os.sep)) or text.count("/") > 1
    if any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
        return folder
    if folder.is_dir() and _ELSEWHERE.intersection(options):
        return folder
    if folder.is_dir() or is_path:
        missing = ": it has no config.json" if folder.is_dir() else ""
        raise FileNotFoundError(
            f"no model folder at {name}{missing}; give a folder with a config.json, or a Hugging "
            "Face id"
        )
    return text


def load_causal_lm(path: str | Path, **options: Any) -> nn.Module:
    """Load a checkpoint with `AutoModelForCausalLM.from_pretrained`, ready to decode.

    Raises:
        OSError: there is no such checkpoint.
        ValueError: the weights are damaged.
    """
    try:
        return AutoModelForCausalLM.from_pretrained(path, **options).eval()
    except SafetensorError as error:
        raise ValueError(
            f"the weights in {path} cannot be read ({error}); the file may be truncated"
        ) from None


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load a checkpoint's tokenizer.

    Raises:
        OSError: there is none.
        ValueError: it cannot be read.
    """
    try:
        return AutoTokenizer.from_pretrained(path)
    except (ValueError, OSError) as error:
        folder = Path(path)
        if not folder.is_dir() or (folder / "tokenizer.json").is_file():
            raise
        raise FileNotFoundError(
            f"no tokenizer.json in {path}, and no other tokenizer that can be read; save the "
            "model's tokenizer there with tokenizer.save_pretrained"
        ) from error
