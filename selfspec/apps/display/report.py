"""Reports: one HTML file with its pictures inside, which loads nothing from elsewhere."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from selfspec import DEMO_MODEL
from selfspec.heads.files import replace_text

_PAGE = DEMO_MODEL.parent / "report.html"


class HTMLReport:
    """A report of headings, text, tables and pictures, in this order of calls."""

    def __init__(self, title: str):
        self.title = title
        self._parts: list[str] = []

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append(f"<p>{escape(text)}</p>")

    def code(self, text: str) -> None:
        """Add lines to copy."""
        self._parts.append(f"<pre>{escape(text)}</pre>")

    def facts(self, facts: Mapping[str, object]) -> None:
        """Add a table of names and values."""
        rows = "".join(_row("td", [name, str(value)]) for name, value in facts.items())
        self._parts.append(f'<table class="facts">{rows}</table>')

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table; the first column names the rows."""
        lines = _row("th", columns) + "".join(_row("td", row) for row in rows)
        self._parts.append(f'<div class="wide"><table>{lines}</table></div>')

    def picture(self, png: bytes, shows: str) -> None:
        """Add a PNG picture; `shows` is for those who cannot see it."""
        source = f"data:image/png;base64,{b64encode(png).decode('ascii')}"
        self._parts.append(f'<img src="{source}" alt="{escape(shows)}">')

    def write(self, path: Path) -> Path:
        """Write the file, atomically."""
        page = Template(_PAGE.read_text(encoding="utf-8"))
        replace_text(path, page.substitute(title=escape(self.title), body="\n".join(self._parts)))
        return path


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
