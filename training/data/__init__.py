"""Text to blocks of tokens."""

from training.data.blocks import Batch, Blocks, collate, pack
from training.data.mixture import Mixture
from training.data.sources import Document, SourceConfig, read_texts, tokenize

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
