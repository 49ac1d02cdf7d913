"""Several models at once in the hands of one thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from selfspec.decoder.core import Decoder


@contextmanager
def held(*decoders: Decoder) -> Iterator[None]:
    """Put the gates of several models in, for this thread alone.

    Models are always taken in the same order: threads of which one drafts with the model that the
    other one writes with would wait for each other for ever.
    """
    with ExitStack() as stack:
        for decoder in sorted(decoders, key=lambda decoder: id(decoder.gates.lock)):
            stack.enter_context(decoder)
        yield
