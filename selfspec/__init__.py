"""selfspec: self-speculative decoding for PyTorch and Hugging Face transformers."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selfspec.config import DraftConfig
    from selfspec.decoder.kernels.prepacked import prepack_
    from selfspec.drafters.text_store import TextStore
    from selfspec.model import SelfSpecModel

__version__ = "0.1.0"

DEMO_MODEL = Path(__file__).parent / "assets" / "mixed16"
"""Folder of the embedded target, in Hugging Face format."""

__all__ = ["DEMO_MODEL", "DraftConfig", "SelfSpecModel", "TextStore", "__version__", "prepack_"]

# Imported on first use: the command line answers --help without loading PyTorch.
_HOMES = {
    "DraftConfig": "selfspec.config",
    "SelfSpecModel": "selfspec.model",
    "TextStore": "selfspec.drafters.text_store",
    "prepack_": "selfspec.decoder.kernels.prepacked",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
