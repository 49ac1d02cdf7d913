"""Compares the default draft of checkpoints without heads with their own `generate`.

Run `python -m benchmarks.never_slower` from a checkout. It measures five tiny random families
in float32, and the model in the package without its heads in both dtypes, each in a fresh process;
with `--hybrids`, ten families with recurrent layers; with `--families`, the named ones. It prints
one line for each mode and prompt set. The exit code is 1 if the default, or the loop without
drafts, is slower than .98 of `generate` in any of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import console, parser
from selfspec import DEMO_MODEL

BAR = 0.98
TINY: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def write_targets(folder: Path, families: Sequence[str], demo: bool) -> Iterator[tuple[Path, str]]:
    """Write the checkpoints; yields the folder and the dtype of each."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    for family in families:
        torch.manual_seed(0)
        values = {**TINY["all"], **TINY["hybrids"].get(family, {})}
        config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **values)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / family)
        tokenizer.save_pretrained(folder / family)
        yield folder / family, "float32"
    if demo:
        AutoModelForCausalLM.from_pretrained(DEMO_MODEL).save_pretrained(folder / "demo")
        tokenizer.save_pretrained(folder / "demo")
        yield folder / "demo", "float32"
        yield folder / "demo", "bfloat16"


def measure(target: Path, dtype: str, config: str, output: Path) -> float:
    """Run `selfspec bench` on a target, in a process of its own; print a line for each place.

    Returns:
        The lowest speed over `generate`, of the default and of the loop without drafts.
    """
    command = [sys.executable, "-m", "selfspec.cli", "bench", "--config", config]
    command += ["--output", str(output), f"target={target}", f"dtype={dtype}"]
    subprocess.run(command, check=True, capture_output=True)
    rows = json.loads((output / "results.json").read_text(encoding="utf-8"))["rows"]
    by_place = {(row["mode"], row["prompts"], row["method"]): row for row in rows}
    speeds = []
    for mode, prompts in dict.fromkeys(place[:2] for place in by_place):
        ours, plain = (by_place[mode, prompts, name] for name in ("default", "none"))
        speed, alone = (row["speedup"]["value"] for row in (ours, plain))
        accepted = ours["acceptance_rate"]
        share = "none" if accepted is None else f"{accepted:.2f}"
        console.print(
            f"  {mode}, {prompts}: {speed:.2f}x (without drafts {alone:.2f}x; accepted of "
            f"drafted: {share})",
            markup=False,
        )
        speeds += [speed, alone]
    return min(speeds)


def main() -> int:
    """Run it; returns the exit code."""
    made = parser(__doc__, target=False)
    made.add_argument("--config", default="configs/never_slower.yaml")
    chosen = made.add_mutually_exclusive_group()
    chosen.add_argument("--hybrids", action="store_true", help="families with recurrent layers")
    chosen.add_argument("--families", nargs="+", help="model types, for example llama lfm2")
    given = made.parse_args()
    families = given.families or list(TINY["hybrids" if given.hybrids else "default"])
    demo = not given.families and not given.hybrids
    slowest = float("inf")
    with tempfile.TemporaryDirectory() as folder:
        for target, dtype in write_targets(Path(folder), families, demo):
            console.print(f"{target.name}, {dtype}")
            output = Path(folder) / "bench" / f"{target.name}-{dtype}"
            slowest = min(slowest, measure(target, dtype, given.config, output))
    console.print(f"slowest: {slowest:.2f}x of generate; the bar is {BAR}")
    return int(slowest < BAR)


if __name__ == "__main__":
    sys.exit(main())
