"""How a head is read while it drafts: one reader per way of drafting, one per file."""

from selfspec.drafters.engine import Engine
from selfspec.drafters.readers.base import ExitReader
from selfspec.drafters.readers.context import ContextReader
from selfspec.drafters.readers.layer import LayerReader
from selfspec.drafters.readers.one_pass import OnePassReader
from selfspec.drafters.readers.parallel import ParallelReader
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
