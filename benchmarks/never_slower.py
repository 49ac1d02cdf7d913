"""Compares the default draft of checkpoints without heads with their own `generate`.

Run `python -m benchmarks.never_slower` from a checkout. It measures five tiny random families
in float32, and the model in the package without its heads in both dtypes, each in a fresh process;
with `--hybrids`, ten families with recurrent layers; with `--families`, the named ones. It prints
one line for each mode and prompt set. The exit code is 1 if the default, or the loop without
drafts, is slower than .98 of `generate` in any of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from selfspec import DEMO_MODEL

FAMILIES = ("llama", "gpt2", "qwen3", "gemma3_text", "gpt_neox")
BAR = 0.98
# Configs of families with other names for these keys translate them.
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_LINEAR = ["linear_attention", "full_attention"] * 3
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
_DELTA_NET = {"layer_types": _LINEAR, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
# Families with recurrent layers, and what their configs need beside `_TINY`.
HYBRIDS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_next": {**_EXPERTS, **_DELTA_NET},
    "qwen3_5_text": _DELTA_NET,
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 3},
    "granitemoehybrid": {**_EXPERTS, "layer_types": _LINEAR, "mamba_n_heads": 4},
    "nemotron_h": {"layers_block_type": _LINEAR, "mamba_num_heads": 8, "mamba_head_dim": 16},
    "bamba": {"attn_layer_indices": [1, 3, 5], "mamba_n_heads": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 3, "n_mamba_heads": 4},
    "jamba": {**_EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1},
    "minimax": {**_EXPERTS, "layer_types": _LINEAR},
}


def write_targets(folder: Path, families: Sequence[str], demo: bool) -> Iterator[tuple[Path, str]]:
    """Write the checkpoints; yields the folder and the dtype of each."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    for family in families:
        torch.manual_seed(0)
        values = {**_TINY, **HYBRIDS.get(family, {})}
        config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **values)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / family)
        tokenizer.save_pretrained(folder / family)
        yield folder / family, "float32"
    if not demo:
        return
    AutoModelForCausalLM.from_pretrained(DEMO_MODEL).save_pretrained(folder / "demo")
    tokenizer.save_pretrained(folder / "demo")
    yield folder / "demo", "float32"
    yield folder / "demo", "bfloat16"


def measure(target: Path, dtype: str, config: str, output: Path) -> list[dict[str, Any]]:
    """Rows of `selfspec bench` on a target, run in a process of its own."""
    command = [sys.executable, "-m", "selfspec.apps.cli", "bench", "--config", config]
    command += ["--output", str(output), f"target={target}", f"dtype={dtype}"]
    subprocess.run(command, check=True, capture_output=True)
    return json.loads((output / "results.json").read_text(encoding="utf-8"))["rows"]


def lines(rows: list[dict[str, Any]]) -> Iterator[tuple[float, str]]:
    """Speed over `generate` in each mode and prompt set, and the same in words.

    The speed is the lower of the default's and that of the loop without drafts.
    """
    by_place = {(row["mode"], row["prompts"], row["method"]): row for row in rows}
    for mode, prompts, method in by_place:
        if method == "default":
            ours, plain = (by_place[mode, prompts, name] for name in (method, "none"))
            speed, alone = (row["speedup"]["value"] for row in (ours, plain))
            accepted = ours["acceptance_rate"]
            share = "none" if accepted is None else f"{accepted:.2f}"
            yield (
                min(speed, alone),
                (
                    f"{mode}, {prompts}: {speed:.2f}x (without drafts "
                    f"{alone:.2f}x; accepted of drafted: {share})"
                ),
            )


def main() -> int:
    """Run it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/never_slower.yaml")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--hybrids", action="store_true", help="families with recurrent layers")
    chosen.add_argument("--families", nargs="+", help="model types, for example llama lfm2")
    arguments = parser.parse_args()
    families = arguments.families or (HYBRIDS if arguments.hybrids else FAMILIES)
    console, speeds = Console(soft_wrap=True), []
    with tempfile.TemporaryDirectory() as folder:
        for target, dtype in write_targets(Path(folder), [*families], families is FAMILIES):
            console.print(f"{target.name}, {dtype}")
            output = Path(folder) / "bench" / f"{target.name}-{dtype}"
            for speed, line in lines(measure(target, dtype, arguments.config, output)):
                speeds.append(speed)
                console.print(f"  {line}", markup=False)
    console.print(f"slowest: {min(speeds):.2f}x of generate; the bar is {BAR}")
    return int(min(speeds) < BAR)


if __name__ == "__main__":
    sys.exit(main())
