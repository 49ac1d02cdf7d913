"""How a head is read while it drafts: token by token, or all drafts in one pass."""

from selfspec.drafters.engine import Engine
from selfspec.drafters.readers.one_pass import ContextReader, OnePassReader, ParallelReader
from selfspec.drafters.readers.token_by_token import ExitReader, LayerReader
from selfspec.heads import DFlashHead, ExitHead


def make_reader(engine: Engine, head: ExitHead) -> ExitReader:
    """The reader that a head needs."""
    if isinstance(head, DFlashHead):
        return ContextReader(engine, head)
    if head.layer is None:
        return (OnePassReader if head.drafts_at_once else ExitReader)(engine, head)
    return (ParallelReader if head.drafts_at_once else LayerReader)(engine, head)


__all__ = [
    "ContextReader",
    "ExitReader",
    "LayerReader",
    "OnePassReader",
    "ParallelReader",
    "make_reader",
]
