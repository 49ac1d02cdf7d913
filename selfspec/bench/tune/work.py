"""The work file: what was measured so far, so that an interrupted tuning goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class WorkFile:
    """Parts of a measurement, one JSON object a line, added as they come.

    Args:
        path: where they are kept; `None` keeps them nowhere.
        place: what they all depend on; parts of another place are not taken.
    """

    def __init__(self, path: Path | None, place: Any):
        self.path, self._place = path, place
        self._found = dict(_read(path)) if path is not None and path.is_file() else {}

    def part(self, name: str, settings: Any, measure: Callable[[], Any]) -> Any:
        """What was measured of a part with these settings, or what `measure` finds now.

        Args:
            name: of the part.
            settings: what else it depends on.
            measure: returns plain values.
        """
        key = _digest([self._place, name, settings])
        if key not in self._found:
            self._found[key] = measure()
            self._append({"key": key, "part": name, "value": self._found[key]})
        return self._found[key]

    def _append(self, line: dict[str, Any]) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A line that was cut off gets its end first, so that this one stands alone.
        before = self.path.read_bytes() if self.path.is_file() else b""
        cut_off = bool(before) and not before.endswith(b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * cut_off + json.dumps(line) + "\n")


def _read(path: Path) -> list[tuple[str, Any]]:
    """Whole lines; one that was cut off when the machine went down is measured again."""
    found: list[tuple[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
            found.append((entry["key"], entry["value"]))
        except (json.JSONDecodeError, TypeError, KeyError):
            continue
    return found


def _digest(settings: Any) -> str:
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
