"""Reports: one HTML file with its pictures inside, which loads nothing from elsewhere."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from selfspec.heads.files import replace_text

_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 0 auto; padding: 1rem; }}
h1 {{ font-size: 1.6rem; }}
h2 {{ font-size: 1.15rem; margin: 2rem 0 .5rem; }}
.wide {{ overflow-x: auto; margin: .75rem 0; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }}
th, td {{ padding: .3rem .7rem; text-align: right; white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
tr + tr > td {{ border-top: 1px solid #8884; }}
th {{ border-bottom: 1px solid #888; }}
.facts td {{ text-align: left; vertical-align: top; }}
.facts td:last-child {{ white-space: normal; overflow-wrap: anywhere; }}
pre {{ background: #8882; padding: .75rem; overflow-x: auto; font-size: .85rem; }}
img {{ background: white; width: 100%; margin: .75rem 0; }}
</style>
<h1>{title}</h1>
{body}
</html>
"""


class HTMLReport:
    """A report of headings, text, tables and pictures, in this order of calls.

    Args:
        title: its title.
    """

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

    def facts(self, facts: Mapping[str, Any]) -> None:
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
        replace_text(path, _PAGE.format(title=escape(self.title), body="\n".join(self._parts)))
        return path


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
