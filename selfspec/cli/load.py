"""A target from the command line's options."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec import DEMO_MODEL
from selfspec.cli.options import Dtype, Kernels, KVCache
from selfspec.cli.output import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from selfspec.model import SelfSpecModel


@dataclass(frozen=True)
class Loaded:
    """A target, ready to write.

    Attributes:
        name: what the user called it.
        embedded: whether it is the model in the package.
        spec: the wrapped model.
        tokenizer: its tokenizer.
    """

    name: str
    embedded: bool
    spec: SelfSpecModel
    tokenizer: PreTrainedTokenizerBase

    def to_dict(self) -> dict[str, Any]:
        """What ran where, for reports."""
        import torch

        decoder = self.spec.engine.decoder
        return {
            "model": self.name,
            "layers": decoder.depth,
            "dtype": str(decoder.dtype).removeprefix("torch."),
            "device": str(decoder.device),
            "kernels": decoder.kernels,
            "kv_cache_dtype": decoder.kv_cache_dtype,
            "threads": torch.get_num_threads(),
        }


def resolve(model: str | None) -> tuple[str, Path | str]:
    """The target's name, and the folder or id to load it from.

    Raises:
        FileNotFoundError: `model` reads like a path, and there is no folder of a model.
    """
    if model is None:
        return DEMO_MODEL.name, DEMO_MODEL
    path = Path(model).expanduser()
    looks_like_path = model.startswith((".", "~", os.sep)) or model.count("/") > 1
    is_model = any((path / name).is_file() for name in ("config.json", "adapter_config.json"))
    if looks_like_path and not is_model:
        raise FileNotFoundError(
            f"no model folder at {model}; give a folder with a config.json, or a Hugging Face id"
        )
    return model, path if is_model else model


def load(
    model: str | None,
    heads: str | None,
    dtype: Dtype,
    device: str | None,
    profile: Path | None = None,
    kernels: Kernels = Kernels.eager,
    kv_cache: KVCache = KVCache.auto,
) -> Loaded:
    """Load a target and its tokenizer.

    Raises:
        OSError: there is no such model, or it cannot be read.
        ValueError: the model cannot draft for itself, or the heads are not its own.
    """
    name, path = resolve(model)
    with progress().status(f"loading {name}"):
        quiet_transformers()
        from transformers import AutoTokenizer

        from selfspec.model import SelfSpecModel

        stored = "float32" if model is None else "auto"
        options = {"dtype": stored if dtype is Dtype.auto else dtype.value, **_placed(device)}
        options |= {"profile": profile, "kernels": kernels.value, "kv_cache_dtype": kv_cache.value}
        spec = SelfSpecModel.from_pretrained(path, heads, **options)
        return Loaded(name, model is None, spec, AutoTokenizer.from_pretrained(path))


def _placed(device: str | None) -> dict[str, Any]:
    """What `from_pretrained` needs to put the weights there."""
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "auto":
        return {"device_map": "auto"}
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"unknown device {device!r}; say cpu, cuda, cuda:1, mps or auto") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r}: torch sees no GPU here; leave --device out")
    return {} if kind == "cpu" else {"device_map": device}


def quiet_transformers() -> None:
    """Leave stderr to selfspec's own messages; a terminal still gets progress bars."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
