"""selfspec: self-speculative decoding for PyTorch and Hugging Face transformers."""

from selfspec.config import DraftConfig
from selfspec.model import SelfSpecModel

__version__ = "0.1.0"

__all__ = ["DraftConfig", "SelfSpecModel", "__version__"]
