"""Text to blocks of tokens."""

from .blocks import Batch, Blocks, collate, pack
from .chats import Document
from .mixture import Mixture
from .sources import SourceConfig, read_texts, tokenize

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
