"""Reading an exit draft by draft: the passes behind a head, and the KV of its own layer."""

from selfspec.drafters.engine import Engine
from selfspec.drafters.exit_readers.exit import ExitReader
from selfspec.drafters.exit_readers.layer import LayerReader
from selfspec.heads import ExitHead


def make_reader(engine: Engine, head: ExitHead) -> ExitReader:
    """The reader that a head needs."""
    return (ExitReader if head.layer is None else LayerReader)(engine, head)


__all__ = ["ExitReader", "LayerReader", "make_reader"]
