"""Compares decoding with a grammar with and without drafts: JSON records with fixed keys.

Run `python -m benchmarks.structured`, with xgrammar installed. The model in the package writes
arrays of records that a JSON schema describes, greedily and in float32, in turns by its own
`generate`, by the loop without drafts, by the default draft without heads, and by that with heads.
Every text has to equal the first. It prints speeds over the first in CPU time. The exit code is 1
if the default without heads is less than 1.5 times as fast.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import console, parser, take_turns, told
from selfspec import DEMO_MODEL, SelfSpecModel
from selfspec.apps.cli.generate import json_processors

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


def _schema(keys: Mapping[str, Any], count: int) -> str:
    record = {"type": "object", "properties": keys, "required": [*keys]}
    record["additionalProperties"] = False
    return json.dumps({"type": "array", "items": record, "minItems": count, "maxItems": count})


def main() -> int:
    """Run it; returns the exit code."""
    made = parser(__doc__, target=False)
    made.add_argument("--repeats", type=int, default=5, help="calls of each kind")
    made.add_argument("--records", type=int, default=4, help="records of an array")
    made.add_argument("--max-new-tokens", type=int, default=256)
    given = made.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    plain, drafting = SelfSpecModel(model), SelfSpecModel(model, heads=DEMO_MODEL)
    options = {"max_new_tokens": given.max_new_tokens, "do_sample": False}
    options |= tokenizer("The records as JSON: ", return_tensors="pt")
    slowest = float("inf")
    for name, keys in RECORDS.items():
        new = json_processors(model.config.vocab_size, tokenizer, _schema(keys, given.records))
        methods: dict[str, Callable[..., Any]] = {
            "generate": model.generate,
            "no drafts": partial(plain.generate, draft="none"),
            "default": plain.generate,
            "default, with heads": drafting.generate,
        }
        calls = {
            method: lambda call=call, new=new: call(**options, logits_processor=[new()])
            for method, call in methods.items()
        }
        found = take_turns(calls, given.repeats)
        own = found["generate"]
        for method, timed in found.items():
            if not all(torch.equal(text, own.outputs[0]) for text in timed.outputs):
                raise ValueError(f"{method} writes another text than generate")
        speeds = {method: timed.over(own, cpu=True) for method, timed in found.items()}
        slowest = min(slowest, speeds["default"])
        console.print(f"{name}: {told(speeds, '{:.2f}x')}", markup=False)
    console.print(f"slowest default: {slowest:.2f}x of generate; the bar is {BAR}")
    return int(slowest < BAR)


if __name__ == "__main__":
    sys.exit(main())
