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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import console, parser
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
    command = [sys.executable, "-m", "selfspec.apps.cli", "bench", "--config", config]
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
    families = given.families or (HYBRIDS if given.hybrids else FAMILIES)
    slowest = float("inf")
    with tempfile.TemporaryDirectory() as folder:
        for target, dtype in write_targets(Path(folder), [*families], families is FAMILIES):
            console.print(f"{target.name}, {dtype}")
            output = Path(folder) / "bench" / f"{target.name}-{dtype}"
            slowest = min(slowest, measure(target, dtype, given.config, output))
    console.print(f"slowest: {slowest:.2f}x of generate; the bar is {BAR}")
    return int(slowest < BAR)


if __name__ == "__main__":
    sys.exit(main())
