"""Measurements in stages: each writes a file, and a run that was stopped goes on with the next."""

from __future__ import annotations

import gc
import json
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from selfspec.apps.bench.results import Grid
from selfspec.apps.bench.run import reason
from selfspec.heads.files import read_object, refuse_changes, replace_text


@dataclass
class Found:
    """The results of a stage: single values, tables, and whether all checks passed."""

    facts: dict[str, Any] = field(default_factory=dict)
    grids: list[Grid] = field(default_factory=list)
    passed: bool = True


Stage = Callable[[], Found]


def run_stages(
    stages: Mapping[str, Stage],
    folder: Path,
    identity: Mapping[str, Any],
    console: Console,
    minutes: float = float("inf"),
) -> bool:
    """Run the stages that have no file yet, and report all; returns whether all passed.

    The files and reports are in `folder`. It holds results of one `identity`, what they depend on;
    ValueError if it is another one. No stage begins after so many minutes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    results: dict[str, dict[str, Any]] = {}
    for name, stage in stages.items():
        path = folder / f"{name}.json"
        if path.is_file():
            results[name] = read_object(path)
            about = f"{path} holds results of a setup"
            remedy = "give another --output, or remove the folder"
            refuse_changes(results[name]["setup"], identity, about, remedy)
        elif time.monotonic() - began > 60 * minutes:
            console.print(f"{minutes:g} minutes are over; run the command again to continue")
            break
        else:
            results[name] = _ran(stage, identity)
            if "error" not in results[name]:  # else it is tried again next time
                replace_text(path, json.dumps(results[name], indent=2) + "\n")
        state = results[name].get("error") or ("passed" if results[name]["passed"] else "FAILED")
        console.print(f"{name}: {results[name]['seconds']:.0f} s, {state}")
        _report(folder, results)
    return all(result["passed"] for result in results.values())


def _ran(stage: Stage, identity: Mapping[str, Any]) -> dict[str, Any]:
    began, error = time.perf_counter(), {}
    try:
        with warnings.catch_warnings():  # the tables have the kernels that fall back
            warnings.filterwarnings("ignore", message=".*they run as they are")
            found = stage()
    except Exception as caught:  # the other stages still run
        found, error = Found(passed=False), {"error": reason(caught)}
    seconds = round(time.perf_counter() - began, 1)
    gc.collect()
    torch.cuda.empty_cache()
    return {
        "setup": dict(identity),
        "seconds": seconds,
        "passed": found.passed,
        "facts": found.facts,
        "grids": [grid._asdict() for grid in found.grids],
        **error,
    }


def _report(folder: Path, results: dict[str, dict[str, Any]]) -> None:
    lines: list[str] = []
    for name, result in results.items():
        verdict = "passed" if result["passed"] else "FAILED"
        lines += ["", f"# {name}", "", f"{verdict}, {result['seconds']:.0f} s", ""]
        lines += [f"- {key}: {value}" for key, value in result["facts"].items()]
        lines += [f"- error: {result['error']}"] if "error" in result else []
        lines += [line for grid in result["grids"] for line in Grid(**grid).markdown()]
    replace_text(folder / "report.md", "\n".join(lines) + "\n")
    replace_text(folder / "report.json", json.dumps(results, indent=2))
