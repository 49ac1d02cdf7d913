"""Measures drafts by the whole model with fewer bits and fewer keys, on a long text.

Run `python -m benchmarks.approximate CHECKPOINT --text FILE` from a checkout. The file's first
tokens are the prompt, which is prefilled once. Each draft then continues it, in turn with plain
decoding; the table has the median of these ratios. Times are wall clock; `--cpu` counts the
process's CPU time instead, for a machine that does other work, too (with one thread).
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache

from selfspec import DraftConfig, SelfSpecModel
from selfspec.schedule.stats import Stats


class Run(NamedTuple):
    """One continuation: its statistics, seconds of its rounds, and new tokens."""

    stats: Stats
    seconds: float
    tokens: list[int]


class LongText:
    """A prompt that is prefilled once, and continued by one draft after the other.

    Args:
        spec: the target.
        ids: `[1, n]` the prompt.
        new: tokens to generate.
        cpu: whether to count CPU time.
    """

    def __init__(self, spec: SelfSpecModel, ids: torch.Tensor, new: int, cpu: bool):
        self.spec, self.ids, self.new = spec, ids, new
        self.clock = time.process_time if cpu else time.perf_counter
        self.cache = DynamicCache(config=spec.decoder.config)
        with torch.inference_mode():
            for block in ids[:, :-1].split(512, dim=1):
                spec.causal_lm(block, past_key_values=self.cache, logits_to_keep=1)

    def run(self, draft: DraftConfig, new: int | None = None) -> Run:
        """Continue the prompt; the time of the first token, which copies the cache, is left out."""
        began = [0.0]

        class Watch:
            def put(self, value: torch.Tensor) -> None:
                began[0] = began[0] or clock() * (value.numel() < 16)

            def end(self) -> None:
                pass

        clock, cache = self.clock, copy.deepcopy(self.cache)
        options: dict[str, Any] = {"past_key_values": cache, "streamer": Watch()}
        output: Any = self.spec.generate(
            self.ids,
            draft=draft,
            max_new_tokens=new or self.new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            **options,
        )
        seconds = clock() - began[0]
        return Run(output.stats, seconds, output.sequences[0, self.ids.shape[1] :].tolist())


def drafts_of(depth: int, windows: Sequence[int], drafts: int) -> dict[str, DraftConfig]:
    """The drafts to measure, by name: every precision with every window, and with all keys."""
    whole: dict[str, Any] = {"exit_layer": depth, "num_draft_tokens": drafts}
    found: dict[str, DraftConfig] = {}
    for window in (*windows, None):
        for precision in (None, "int8", "int4"):
            if precision or window:
                name = f"{precision or 'own bits'}, {window or 'all'} keys"
                draft = {**whole, "precision": precision, "window": window}
                found[name] = DraftConfig.of(draft)
        mixed = {"precision": "int4", "lm_head_precision": "int8", "window": window}
        found[f"int4, LM head int8, {window or 'all'} keys"] = DraftConfig.of({**whole, **mixed})
    return found


def measure(text: LongText, drafts: dict[str, DraftConfig], turns: int) -> Table:
    """Run all drafts in turn, each between two runs of plain decoding."""
    plain = DraftConfig(drafter="none")
    ratios: dict[str, list[float]] = {name: [] for name in drafts}
    last: dict[str, Run] = {}
    for draft in drafts.values():
        text.run(draft, new=3)  # makes the copies
    before = text.run(plain)
    for _ in range(turns):
        for name, draft in drafts.items():
            last[name], after = text.run(draft), text.run(plain)
            ratios[name].append((before.seconds + after.seconds) / 2 / last[name].seconds)
            before = after
    table = Table("draft", "accepted", "tokens a round", "speed over plain", "same text")
    for name, run in last.items():
        stats, speed = run.stats, statistics.median(ratios[name])
        per_round = f"{(text.new - 1) / stats.rounds:.2f}"
        same = sum(a == b for a, b in zip(run.tokens, before.tokens, strict=True))
        shown = f"{stats.acceptance_rate:.2f}", per_round, f"{speed:.2f}x", f"{same}/{text.new}"
        table.add_row(name, *shown)
    return table


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--text", type=Path, required=True, help="a text file, long enough")
    parser.add_argument("--tokens", type=int, default=6000, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--windows", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--drafts", type=int, default=4, help="drafts of a round")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cpu", action="store_true", help="count CPU time")
    given = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(
        given.checkpoint, dtype=getattr(torch, given.dtype)
    ).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(given.checkpoint)
    text = given.text.read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : given.tokens]
    if ids.shape[1] < given.tokens:
        raise SystemExit(f"{given.text} has {ids.shape[1]} tokens, --tokens asks {given.tokens}")
    spec = SelfSpecModel(model)
    long_text = LongText(spec, ids, given.new, given.cpu)
    drafts = drafts_of(spec.decoder.depth, given.windows, given.drafts)
    Console().print(measure(long_text, drafts, given.turns))


if __name__ == "__main__":
    main()
