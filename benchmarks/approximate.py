"""Measures drafts by the whole model with fewer bits and fewer keys, on a long text.

Run `python -m benchmarks.approximate CHECKPOINT --text FILE` from a checkout. The file's first
tokens are the prompt, which is prefilled once. Each draft then continues it, in turn with plain
decoding; the table has the median of these ratios. Times are wall clock; `--cpu` counts the
process's CPU time instead, for a machine that does other work, too (with one thread).
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from benchmarks.common import console, new_tokens, parser, share_equal, take_turns
from selfspec import DraftConfig, SelfSpecModel
from selfspec.apps.bench.results import Grid
from selfspec.decoder import CACHE
from selfspec.decoder.checkpoints import load_causal_lm, load_tokenizer
from selfspec.schedule.stats import Stats

_COLUMNS = ("draft", "accepted", "tokens a round", "speed over plain", "same text")


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
        clock: tells seconds.
    """

    def __init__(self, spec: SelfSpecModel, ids: Tensor, new: int, clock: Callable[[], float]):
        self.spec, self.ids, self.new, self.clock = spec, ids, new, clock
        self.cache = DynamicCache(config=spec.decoder.config)
        given: dict[str, Any] = {CACHE: self.cache, "logits_to_keep": 1}
        with torch.inference_mode():
            for block in ids[:, :-1].split(512, dim=1):
                spec.causal_lm(block, **given)

    def run(self, draft: DraftConfig, new: int | None = None) -> Run:
        """Continue the prompt; the time of the first token, which copies the cache, is left out."""
        began: list[float] = []

        def put(value: Tensor) -> None:
            if value.numel() < 16:  # the prompt comes first
                began.append(self.clock())

        streamer: Any = SimpleNamespace(put=put, end=lambda: None)
        output: Any = self.spec.generate(
            self.ids,
            draft=draft,
            max_new_tokens=new or self.new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            streamer=streamer,
            past_key_values=copy.deepcopy(self.cache),
        )
        seconds = self.clock() - began[0]
        return Run(output.stats, seconds, new_tokens(output.sequences, self.ids))


def drafts_of(depth: int, windows: Sequence[int], drafts: int) -> dict[str, DraftConfig]:
    """The drafts to measure, by name: every precision with every window, and with all keys."""
    whole: dict[str, Any] = {"exit_layer": depth, "num_draft_tokens": drafts}
    found: dict[str, DraftConfig] = {}
    for window in (*windows, None):
        keys = {**whole, "window": window}
        for precision in (None, "int8", "int4"):
            if precision or window:
                name = f"{precision or 'own bits'}, {window or 'all'} keys"
                found[name] = DraftConfig.of({**keys, "precision": precision})
        mixed = {**keys, "precision": "int4", "lm_head_precision": "int8"}
        found[f"int4, LM head int8, {window or 'all'} keys"] = DraftConfig.of(mixed)
    return found


def measure(text: LongText, drafts: dict[str, DraftConfig], turns: int) -> Grid:
    """Run every draft in turn with plain decoding."""
    plain, rows = DraftConfig(drafter="none"), []
    for name, draft in drafts.items():
        text.run(draft, new=3)  # makes the copies
        calls = {"plain": partial(text.run, plain), name: partial(text.run, draft)}
        base, own = (timed.outputs for timed in take_turns(calls, turns).values())
        ratios = [a.seconds / b.seconds for a, b in zip(base, own, strict=True)]
        stats, speed = own[-1].stats, statistics.median(ratios)
        per_round = f"{(text.new - 1) / stats.rounds:.2f}"
        same = share_equal(own[-1].tokens, base[-1].tokens)
        rows.append([name, f"{stats.acceptance_rate:.2f}", per_round, f"{speed:.2f}x", same])
    return Grid(f"{text.ids.shape[1]} tokens of text", _COLUMNS, rows)


def main() -> None:
    """Measure, and print the table."""
    made = parser(__doc__, target=False)
    made.add_argument("checkpoint")
    made.add_argument("--text", type=Path, required=True, help="a text file, long enough")
    made.add_argument("--tokens", type=int, default=6000, help="tokens of the prompt")
    made.add_argument("--new", type=int, default=64, help="tokens to generate")
    made.add_argument("--windows", type=int, nargs="*", default=[64, 256, 1024])
    made.add_argument("--drafts", type=int, default=4, help="drafts of a round")
    made.add_argument("--turns", type=int, default=3)
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--cpu", action="store_true", help="count CPU time")
    given = made.parse_args()
    spec = SelfSpecModel(load_causal_lm(given.checkpoint, dtype=getattr(torch, given.dtype)))
    text = given.text.read_text(encoding="utf-8")
    ids = torch.tensor([load_tokenizer(given.checkpoint)(text).input_ids[: given.tokens]])
    if ids.shape[1] < given.tokens:
        raise SystemExit(f"{given.text} has {ids.shape[1]} tokens, --tokens asks {given.tokens}")
    drafts = drafts_of(spec.decoder.depth, given.windows, given.drafts)
    long_text = LongText(
        spec, ids, given.new, time.process_time if given.cpu else time.perf_counter
    )
    console.print(measure(long_text, drafts, given.turns).table(console.width))


if __name__ == "__main__":
    main()
