"""Shows that the memory of reading a text does not grow with its file.

Run `python -m benchmarks.reading` from a checkout. It writes JSON lines, reads them as `fit` does,
and prints the time and by how much the memory of the process has grown. The exit code is 1 if that
is more than the limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from selfspec.apps.bench.run import peak_memory
from training.data import SourceConfig, read_texts

_WORDS = "It was a dark and stormy night; the rain fell in torrents, except at intervals. "


def write_lines(path: Path, size: int) -> None:
    """Write JSON lines of different lengths until the file has `size` bytes."""
    lines = [json.dumps({"id": n, "text": _WORDS * (1 + n * n % 97)}) + "\n" for n in range(256)]
    many = "".join(lines)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(1 + size // len(many)):
            file.write(many)


def _read(path: Path) -> None:
    for _ in read_texts(SourceConfig(files=[str(path)])):
        pass


def main(arguments: list[str] | None = None) -> int:
    """Run it; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=2000, help="size of the file")
    parser.add_argument("--limit", type=float, default=300, help="MB by which memory may grow")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.jsonl"
        write_lines(path, given.megabytes * 10**6)
        began = time.perf_counter()
        memory = peak_memory(partial(_read, path), torch.device("cpu"))
        seconds, size = time.perf_counter() - began, path.stat().st_size / 1e9
    if memory is None:
        parser.error("the system does not tell the memory of a process")
    Console(highlight=False, soft_wrap=True).print(
        f"{size:.2f} GB of JSON lines read in {seconds:.0f} s; memory grew by "
        f"{memory.growth / 1e6:.1f} MB at most"
    )
    return int(memory.growth > given.limit * 1e6)


if __name__ == "__main__":
    sys.exit(main())
