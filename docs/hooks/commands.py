"""Puts the help of every command into the page on commands, as the commands themselves print it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

MARKER = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs' event: the Markdown of a page, before it is rendered."""
    if MARKER not in markdown:
        return markdown
    return markdown.replace(MARKER, commands())


def commands() -> str:
    """Every command's help as Markdown, by typer's own writer; its title is the page's."""
    writer = [sys.executable, "-m", "typer", "--app", "commands", "selfspec.apps.cli.entry"]
    printed = subprocess.check_output([*writer, "utils", "docs", "--name", "selfspec"], text=True)
    return printed.partition("\n")[2]
