"""Metrics of a run: a live display, JSON lines, and trackers."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from selfspec.config import unknown_name
from selfspec.heads.files import read_lines, replace_text

METRICS_NAME = "metrics.jsonl"
_TRACKERS = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}


def check_trackers(names: list[str]) -> None:
    """Raise before any work starts if a tracker is unknown or not installed."""
    for name in names:
        if name not in _TRACKERS:
            raise ValueError(unknown_name("tracker", name, list(_TRACKERS)))
        if importlib.util.find_spec(_TRACKERS[name]) is None:
            raise ImportError(f"tracker {name!r} is not installed: pip install {_TRACKERS[name]}")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All entries of a run; an unfinished last line is removed."""
    return read_lines(folder / METRICS_NAME, "step")


class MetricsLog:
    """One JSON object a line, by step.

    Args:
        folder: folder of the file.
        from_step: first step of a resumed run; later entries are dropped.
    """

    def __init__(self, folder: Path, from_step: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS_NAME
        kept = [entry for entry in read_metrics(folder) if entry["step"] < from_step]
        replace_text(self.path, "".join(json.dumps(entry) + "\n" for entry in kept))

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Add a line.

        Raises:
            OSError: it could not be written.
        """
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        except OSError as error:
            raise OSError(f"{self.path} could not be written ({error})") from error


class Display:
    """Progress of a run: a live bar on a terminal, plain lines elsewhere.

    Args:
        name: what runs.
        steps: its length.
        start: the step it starts at.
        silent: show nothing (processes other than the first).
    """

    def __init__(self, name: str, steps: int, start: int = 0, silent: bool = False):
        self.console = Console(quiet=silent, highlight=False)
        self.name, self.steps, self.start = name, steps, start
        self._began = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}"),
            console=self.console,
            disable=not self.console.is_terminal or silent,
        )
        self._task = self._progress.add_task(name, total=steps, completed=start, metrics="")

    def __enter__(self) -> Display:
        """Show the bar."""
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the bar."""
        self._progress.stop()

    def step(self, done: int, values: dict[str, float], line: bool) -> None:
        """Update the progress; `line` prints the values if there is no live bar."""
        text = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        self._progress.update(self._task, completed=done, metrics=text)
        if line and not self.console.is_terminal:
            spent = time.monotonic() - self._began
            left = spent / max(1, done - self.start) * (self.steps - done)
            times = f"{spent / 60:.1f} min, about {left / 60:.1f} left"
            self.say(f"{self.name} {done}/{self.steps}  {text}  ({times})")

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, markup=False, soft_wrap=True)
