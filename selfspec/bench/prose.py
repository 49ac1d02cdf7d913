"""Prose as models of prose read it."""

from __future__ import annotations

import re

_STRAIGHT = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'"})  # noqa: RUF001


def clean_prose(text: str) -> str:
    """Straight quotes, single spaces, one paragraph a line."""
    paragraphs = re.split(r"\n\s*\n", text.translate(_STRAIGHT))
    return "\n".join(folded for part in paragraphs if (folded := " ".join(part.split())))
