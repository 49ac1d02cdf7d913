"""Text to blocks of tokens."""

from .blocks import Batch, Blocks, collate, pack
from .mixture import Mixture
from .sources import Document, SourceConfig, read_texts, tokenize

__all__ = [
    "Batch",
    "Blocks",
    "Document",
    "Mixture",
    "SourceConfig",
    "collate",
    "pack",
    "read_texts",
    "tokenize",
]
