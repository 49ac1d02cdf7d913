"""Shows that the memory of reading a text does not grow with its file.

Run `python -m benchmarks.reading` from a checkout. It writes JSON lines, reads them as `fit` does,
and prints the time and by how much the memory of the process has grown. The exit code is 1 if that
is more than the limit.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import torch

from benchmarks.common import console, parser
from selfspec.apps.bench.run import peak_memory
from training.data import SourceConfig, read_texts

_WORDS = "It was a dark and stormy night; the rain fell in torrents, except at intervals. "


def main(arguments: list[str] | None = None) -> int:
    """Run it; returns the exit code."""
    made = parser(__doc__, target=False)
    made.add_argument("--megabytes", type=int, default=2000, help="size of the file")
    made.add_argument("--limit", type=float, default=300, help="MB by which memory may grow")
    given = made.parse_args(arguments)
    lines = [json.dumps({"id": n, "text": _WORDS * (1 + n * n % 97)}) + "\n" for n in range(256)]
    many = "".join(lines)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for _ in range(1 + given.megabytes * 10**6 // len(many)):
                file.write(many)
        source, began = SourceConfig(files=[str(path)]), time.perf_counter()
        memory = peak_memory(lambda: deque(read_texts(source), maxlen=0), torch.device("cpu"))
        seconds, size = time.perf_counter() - began, path.stat().st_size / 1e9
    if memory is None:
        made.error("the system does not tell the memory of a process")
    console.print(
        f"{size:.2f} GB of JSON lines read in {seconds:.0f} s; memory grew by "
        f"{memory.growth / 1e6:.1f} MB at most"
    )
    return int(memory.growth > given.limit * 1e6)


if __name__ == "__main__":
    sys.exit(main())
