"""What commands print: rich on a terminal, one JSON object on request."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from pathlib import Path

    from selfspec.schedule.stats import Stats


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


def make_folder_of(file: Path) -> None:
    """Make the folder that a file will be written to, before any long work.

    Raises:
        ValueError: something that is no folder stands in its place.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"cannot write {file}: {file.parent} is no folder") from None


def progress() -> Console:
    """A console on stderr, for what is under way; off a terminal it says nothing."""
    console = Console(stderr=True, highlight=False)
    console.quiet = not console.is_terminal
    return console


def complain(message: str) -> None:
    """Say in one line on stderr what is wrong."""
    line = " ".join(message.split())
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"selfspec: {line}", markup=False)


def summary(stats: Stats) -> str:
    """The figures of one text in a line."""
    return (
        f"{stats.emitted} tokens, {stats.tokens_per_second:.1f} tokens/s, "
        f"acceptance rate {stats.acceptance_rate:.3f}, "
        f"mean accepted length {stats.mean_accepted_length:.2f}"
    )


def in_units(count: float, unit: str = "") -> str:
    """A large number in short: 12.9 M, 1.5 GB."""
    prefixes = ["", "k", "M", "G", "T"]
    while abs(count) >= 1000 and len(prefixes) > 1:
        count /= 1000
        del prefixes[0]
    return f"{count:.3g} {prefixes[0]}{unit}".rstrip()
