"""Puts the tables of tested families into the page on models.

The list of families is that of the tests, and the columns are read from a model of each family,
so the tables cannot be out of date.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MARKER, HYBRID_MARKER = "<!-- families -->", "<!-- hybrids -->"
_TESTS = Path(__file__).parents[2] / "tests"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs' event: the Markdown of a page, before it is rendered."""
    for marker, lines in ((MARKER, table), (HYBRID_MARKER, hybrids)):
        if marker in markdown:
            markdown = markdown.replace(marker, "\n".join(lines()))
    return markdown


def table() -> Iterator[str]:
    """The lines of the table of families with attention in every layer."""
    yield "| family | class in transformers | attention | trees |"
    yield "|---|---|---|---|"
    for family, decoder in _decoders("FAMILIES"):
        name = type(decoder.causal_lm).__name__
        trees = "no" if decoder.counts_keys else "yes"
        yield f"| `{family}` | `{name}` | {_attention(decoder.windows)} | {trees} |"


def hybrids() -> Iterator[str]:
    """The lines of the table of families with recurrent layers."""
    yield "| family | class in transformers | attention | recurrent layers | `block`, `fused` |"
    yield "|---|---|---|---|---|"
    for family, decoder in _decoders("HYBRIDS"):
        name = type(decoder.causal_lm).__name__
        mixers = {type(mixer).__name__ for mixer, _ in decoder.gates.mixers.found}
        kind = "in layers of its own" if decoder.attention_layers else "in layers with a state"
        own = "yes" if decoder.attention_layers else "no"
        yield f"| `{family}` | `{name}` | {kind} | `{mixers.pop()}` | {own} |"


def _decoders(group: str) -> Iterator[tuple[str, Any]]:
    sys.path.insert(0, str(_TESTS))
    try:
        import families
    finally:
        sys.path.remove(str(_TESTS))
    from transformers.utils import logging

    from selfspec.decoder import Decoder

    logging.set_verbosity_error()  # configs this small make it wonder
    for family in sorted(getattr(families, group)):
        yield family, Decoder(families.build(family, "eager"))


def _attention(windows: list[int | None]) -> str:
    """What kinds of layers there are."""
    kinds = Counter("full" if window is None else "sliding window" for window in windows)
    return " and ".join(sorted(kinds))
