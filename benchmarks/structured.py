"""Compares decoding with a grammar with and without drafts: JSON records with fixed keys.

Run `python -m benchmarks.structured`, with xgrammar installed. The model in the package writes
arrays of records that a JSON schema describes, greedily and in float32, in turns by its own
`generate`, by the loop without drafts, by the default draft without heads, and by that with heads.
Every text has to equal the first. It prints the median CPU seconds of the first over those of each
other. The exit code is 1 if the default without heads is less than 1.5 times as fast.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from selfspec import DEMO_MODEL, SelfSpecModel

BAR = 1.5
_WORD = {"type": "string", "pattern": "^[A-Za-z ]{1,12}$"}
_NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}
_YES = {"type": "boolean"}
# The keys of each kind of record, and what their values may be.
RECORDS: Mapping[str, Mapping[str, Any]] = {
    "people": {"name": _WORD, "age": _NUMBER, "city": {"enum": ["Paris", "Rome"]}, "active": _YES},
    "orders": {"product": _WORD, "quantity": _NUMBER, "price": _NUMBER, "delivered": _YES},
    "weather": {
        "temperature": _NUMBER,
        "humidity": _NUMBER,
        "wind": {"enum": ["north", "east", "south", "west"]},
        "station": _WORD,
    },
}


def schema(keys: Mapping[str, Any], count: int) -> str:
    """The JSON schema of an array of `count` records."""
    record = {"type": "object", "properties": keys, "required": [*keys]}
    record["additionalProperties"] = False
    return json.dumps({"type": "array", "items": record, "minItems": count, "maxItems": count})


def processors(model: Any, tokenizer: Any, count: int) -> dict[str, Callable[[], Any]]:
    """For each kind of records, what makes a new logits processor."""
    import xgrammar.contrib.hf  # pyright: ignore[reportMissingImports]

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    compiler = xgrammar.GrammarCompiler(info)

    def maker(keys: Mapping[str, Any]) -> Callable[[], Any]:
        grammar = compiler.compile_json_schema(schema(keys, count), any_whitespace=False)
        return lambda: xgrammar.contrib.hf.LogitsProcessor(grammar)

    return {name: maker(keys) for name, keys in RECORDS.items()}


def ways(model: Any) -> dict[str, Callable[..., Any]]:
    """The calls to compare, the model's own first."""
    plain, drafting = SelfSpecModel(model), SelfSpecModel(model, heads=DEMO_MODEL)
    return {
        "generate": model.generate,
        "no drafts": partial(plain.generate, draft="none"),
        "default": plain.generate,
        "default, with heads": drafting.generate,
    }


def measure(
    calls: Mapping[str, Callable[..., Any]],
    new: Callable[[], Any],
    options: Mapping[str, Any],
    repeats: int,
) -> dict[str, float]:
    """Median CPU seconds of each call, which take turns.

    Raises:
        ValueError: two texts differ.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    texts: dict[str, Tensor] = {}
    for _ in range(repeats):
        for name, call in calls.items():
            began = time.process_time()
            texts[name] = call(**options, logits_processor=[new()])
            seconds[name].append(time.process_time() - began)
            if not torch.equal(texts[name], texts["generate"]):
                raise ValueError(f"{name} writes another text than generate")
    return {name: statistics.median(found) for name, found in seconds.items()}


def main() -> int:
    """Run it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="calls of each kind")
    parser.add_argument("--records", type=int, default=4, help="records of an array")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    options = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False}
    options |= tokenizer("The records as JSON: ", return_tensors="pt")
    console, slowest, calls = Console(soft_wrap=True), float("inf"), ways(model)
    for name, new in processors(model, tokenizer, arguments.records).items():
        seconds = measure(calls, new, options, arguments.repeats)
        speeds = {way: seconds["generate"] / found for way, found in seconds.items()}
        slowest = min(slowest, speeds["default"])
        told = ", ".join(f"{way} {speed:.2f}x" for way, speed in speeds.items())
        console.print(f"{name}: {told}", markup=False)
    console.print(f"slowest default: {slowest:.2f}x of generate; the bar is {BAR}")
    return int(slowest < BAR)


if __name__ == "__main__":
    sys.exit(main())
