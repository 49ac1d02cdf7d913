"""Checkpoints: where they are, and how they are loaded."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.import_utils import is_gguf_available, is_kernels_available
from transformers.utils.peft_utils import find_adapter_config_file

from selfspec.config import Options

GGUF = ".gguf"
HEADS_CONFIG = "selfspec.json"  # in a folder of exit heads
# Options of `from_pretrained` with which a folder needs no config.json of its own.
_ELSEWHERE = {"config", "gguf_file", "subfolder"}
_BASE = "base_model_name_or_path"  # in the config of an adapter
# Options of `from_pretrained` that a config is found by.
_OF_CONFIG = {
    *("cache_dir", "force_download", "local_files_only", "subfolder"),
    *("code_revision", "revision", "token", "trust_remote_code"),
}


def find_checkpoint(name: str | Path, options: Collection[str] = ()) -> Path | str:
    """The folder or GGUF file of a checkpoint, or the Hugging Face id that `name` is.

    Args:
        name: a folder, a `.gguf` file, or a Hugging Face id. A folder without a config.json may
            hold one GGUF file.
        options: names of the options of `from_pretrained`.

    Raises:
        FileNotFoundError: `name` is a folder with neither a config.json nor one GGUF file, is
            another file, or looks like a path, and there is nothing.
    """
    path = Path(name).expanduser()
    text = str(name)
    is_path = isinstance(name, Path) or text.startswith((".", "~", os.sep)) or text.count("/") > 1
    if any((path / file).is_file() for file in ("config.json", "adapter_config.json")):
        return path
    if path.suffix.lower() == GGUF:
        if not path.is_file():
            raise FileNotFoundError(f"no GGUF file at {name}")
        return path
    if not path.exists() and not is_path:
        return text
    if path.is_dir() and _ELSEWHERE.intersection(options):
        return path
    files = sorted(path.glob(f"*{GGUF}")) if path.is_dir() else []
    if len(files) == 1:
        return files[0]
    missing = ", which is a file" if path.is_file() else ""
    if path.is_dir():
        found = f", and {len(files)} GGUF files, of which one has to be named" if files else ""
        missing = f": it has no config.json{found}"
        if (path / HEADS_CONFIG).is_file():
            missing = ", which holds exit heads; they are given as heads, beside their target"
    raise FileNotFoundError(
        f"no model folder at {name}{missing}; give a folder with a config.json, a GGUF file, or a "
        "Hugging Face id"
    )


def folder_of(path: str | Path) -> str | Path:
    """The folder of a GGUF file, where heads and profiles lie; another checkpoint's own name."""
    return Path(path).parent if Path(path).suffix.lower() == GGUF else path


def _named(path: str | Path) -> tuple[str | Path, dict[str, object]]:
    """What `from_pretrained` takes as the checkpoint, and its option for a GGUF file.

    Raises:
        ImportError: the package `gguf` is not installed.
    """
    file = Path(path)
    if file.suffix.lower() != GGUF:
        return path, {}
    if not is_gguf_available():
        raise ImportError(
            f"{path} is a GGUF file, which needs the package gguf: pip install 'selfspec[gguf]'"
        )
    return file.parent, {"gguf_file": file.name}


def load_config(path: str | Path) -> PreTrainedConfig:
    """Load a checkpoint's config; that of an adapter is the config of the model it was made for.

    Raises:
        ImportError: it is a GGUF file, and the package `gguf` is not installed.
        OSError: there is none.
    """
    _, named = _named(path)
    if named:
        return copy.deepcopy(_config_of_gguf(Path(path), Path(path).stat().st_mtime_ns))
    path = _base_of(path)
    with named_in_errors(path):
        return AutoConfig.from_pretrained(path)


def _base_of(path: str | Path) -> str | Path:
    """The checkpoint that an adapter was made for, as transformers finds it; another is its own.

    Raises:
        FileNotFoundError: it is a folder that is not there.
    """
    has_config = (Path(path) / "config.json").is_file()
    file = None if has_config else find_adapter_config_file(str(path))
    if file is None:
        return path
    return find_checkpoint(json.loads(Path(file).read_text(encoding="utf-8"))[_BASE])


@lru_cache(maxsize=1)  # transformers' reader takes half a minute for a vocabulary of 262,144
def _config_of_gguf(file: Path, changed: int) -> PreTrainedConfig:
    """The config of a GGUF file that was last changed at a time."""
    return AutoConfig.from_pretrained(file.parent, gguf_file=file.name)


@contextmanager
def named_in_errors(path: str | Path) -> Iterator[None]:
    """Name a checkpoint that is not here in errors of the hub, which leave it out offline."""
    try:
        yield
    except OSError as error:
        if Path(path).exists() or str(path) in str(error):
            raise
        raise OSError(
            f"there is no folder {path}, and no such Hugging Face id could be loaded: {error}"
        ) from error


def auto_class(
    config: PreTrainedConfig,
) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """The class that makes a causal LM: some multimodal ones are no `AutoModelForCausalLM`."""
    named = getattr(config, "auto_map", None) or {}
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or AutoModelForCausalLM.__name__ in named
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if sees and not known else AutoModelForCausalLM


def _auto_class(
    source: str | Path, options: Options
) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """The class that loads a checkpoint."""
    config = options.get("config")
    if config is None:
        source = _base_of(source)
    if not isinstance(config, PreTrainedConfig):
        found_by = {name: value for name, value in options.items() if name in _OF_CONFIG}
        try:
            config = AutoConfig.from_pretrained(source if config is None else config, **found_by)
        except (OSError, ValueError):  # a folder with a GGUF file
            return AutoModelForCausalLM
    return auto_class(config)


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


def load_causal_lm(path: str | Path, **options: object) -> PreTrainedModel:
    """Load a checkpoint, ready to decode.

    `AutoModelForCausalLM` loads it, or `AutoModelForImageTextToText` if that does not know its
    config.

    The weights of a GGUF file stay packed where transformers has kernels for them (the package
    `kernels`) and `dtype` is float32, in which these compute; else they are dequantized to `dtype`.

    Raises:
        ImportError: it is a GGUF file, and the package `gguf` is not installed.
        OSError: there is no such checkpoint.
        ValueError: the weights are damaged, or torch has no such dtype.
    """
    dtype = options.get("dtype", "auto")
    if isinstance(dtype, str) and not (dtype == "auto" or _is_dtype(dtype)):
        raise ValueError(
            f"dtype must be 'auto', a torch.dtype, or the name of one such as 'bfloat16', got "
            f"{dtype!r}"
        )
    source, named = _named(path)
    if named:
        packed = is_kernels_available() and dtype in ("float32", torch.float32)
        named["quantization_config"] = GgufConfig(dequantize=not packed)
        named["config"] = load_config(path)
    try:
        options = {**named, **options}
        with named_in_errors(path):
            return _auto_class(source, options).from_pretrained(source, **options).eval()
    except SafetensorError as error:
        raise ValueError(
            f"the weights in {path} cannot be read ({error}); the file may be truncated"
        ) from None


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load a checkpoint's tokenizer.

    Raises:
        ImportError: it is a GGUF file, and the package `gguf` is not installed.
        OSError: there is none.
        ValueError: it cannot be read.
    """
    source, named = _named(path)
    try:
        with named_in_errors(path):
            return AutoTokenizer.from_pretrained(source, **named)
    except (ValueError, OSError) as error:
        folder = Path(path)
        if not folder.is_dir() or (folder / "tokenizer.json").is_file():
            raise
        raise FileNotFoundError(
            f"no tokenizer.json in {path}, and no other tokenizer that can be read; save the "
            "model's tokenizer there with tokenizer.save_pretrained"
        ) from error
