"""Puts the table of tested families into the page on models.

The families are those that the tests run over, and what the table says of each is read from a
model of it, so neither can go stale.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MARKER = "<!-- families -->"
_TESTS = Path(__file__).parents[2] / "tests"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs' event: the Markdown of a page, before it is rendered."""
    if MARKER not in markdown:
        return markdown
    return markdown.replace(MARKER, "\n".join(table()))


def table() -> Iterator[str]:
    """The lines of the table, a family each."""
    sys.path.insert(0, str(_TESTS))
    try:
        from families import FAMILIES, build
    finally:
        sys.path.remove(str(_TESTS))
    from transformers.utils import logging

    from selfspec.decoder import Decoder

    logging.set_verbosity_error()  # configs this small make it wonder

    yield "| family | class in transformers | attention | trees |"
    yield "|---|---|---|---|"
    for family in sorted(FAMILIES):
        decoder = Decoder(build(family, "eager"))
        name = type(decoder.causal_lm).__name__
        trees = "no" if decoder.counts_keys else "yes"
        yield f"| `{family}` | `{name}` | {_attention(decoder.windows)} | {trees} |"


def _attention(windows: list[int | None]) -> str:
    """What kinds of layers there are."""
    kinds = Counter("full" if window is None else "sliding window" for window in windows)
    return " and ".join(sorted(kinds))
