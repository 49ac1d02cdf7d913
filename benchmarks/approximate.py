"""Measures drafts by the whole model with fewer bits and fewer keys, on a long text.

Run `python -m benchmarks.approximate CHECKPOINT --text FILE` from a checkout. The file's first
tokens are the prompt, which is prefilled once. Each draft then continues it, in turn with plain
decoding; the table has the median of these ratios. Times are wall clock of whole calls, a copy of
the cache included; `--cpu` counts the process's CPU time instead, for a machine that does other
work, too (with one thread).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from benchmarks.common import console, new_tokens, parser, share_equal, take_turns
from selfspec import DraftConfig, SelfSpecModel
from selfspec.apps.bench.results import Grid
from selfspec.decoder.checkpoints import load_causal_lm, load_tokenizer

_COLUMNS = ("draft", "accepted", "tokens a round", "speed over plain", "same text")


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


def prefill(spec: SelfSpecModel, ids: Tensor) -> DynamicCache:
    """The KV cache of a prompt `[1, n]`, but for its last token."""
    cache = DynamicCache(config=spec.decoder.config)
    with torch.inference_mode():
        for block in ids[:, :-1].split(512, dim=1):
            spec.causal_lm(block, past_key_values=cache, logits_to_keep=1)
    return cache


def measure(spec: SelfSpecModel, ids: Tensor, drafts: dict[str, DraftConfig], given: Any) -> Grid:
    """Continue the prompt with every draft, in turn with plain decoding."""
    cache, plain, rows = prefill(spec, ids), DraftConfig(drafter="none"), []

    def write(draft: DraftConfig, new: int = given.new) -> Any:
        return spec.generate(
            ids,
            draft=draft,
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            past_key_values=copy.deepcopy(cache),
        )

    for name, draft in drafts.items():
        write(draft, new=3)  # copies of the weights are made
        calls = {"plain": partial(write, plain), name: partial(write, draft)}
        base, own = take_turns(calls, given.turns).values()
        texts = (new_tokens(timed.outputs[-1].sequences, ids) for timed in (own, base))
        stats, same = own.outputs[-1].stats, share_equal(*texts)
        figures = (stats.acceptance_rate, (given.new - 1) / stats.rounds)
        speed = f"{own.over(base, given.cpu):.2f}x"
        rows.append([name, *(f"{figure:.2f}" for figure in figures), speed, same])
    return Grid(f"{ids.shape[1]} tokens of text", _COLUMNS, rows)


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
    console.print(measure(spec, ids, drafts, given).table(console.width))


if __name__ == "__main__":
    main()
