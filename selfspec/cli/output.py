"""What commands print: rich on a terminal, one JSON object on request."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any

from rich.console import Console


@contextmanager
def reporting(as_json: bool) -> Iterator[Console]:
    """Where a command shows what it does.

    With `--json` that is nowhere: stdout is kept free of everything, whoever writes to it.
    """
    if not as_json:
        yield Console(markup=False, highlight=False)
        return
    with redirect_stdout(sys.stderr):
        yield Console(quiet=True)


def print_json(data: Mapping[str, Any]) -> None:
    """Print one JSON object on one line."""
    sys.stdout.write(json.dumps(data, allow_nan=False) + "\n")


def progress() -> Console:
    """A console on stderr, for what is under way; off a terminal it says nothing."""
    console = Console(stderr=True, highlight=False)
    console.quiet = not console.is_terminal
    return console


def in_units(count: float, unit: str = "") -> str:
    """A large number in short: 12.9 M, 1.5 GB."""
    prefixes = ["", "k", "M", "G", "T"]
    while abs(count) >= 1000 and len(prefixes) > 1:
        count /= 1000
        del prefixes[0]
    return f"{count:.3g} {prefixes[0]}{unit}".rstrip()
