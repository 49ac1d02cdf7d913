"""What a store of texts costs and brings: `python -m benchmarks.store`.

It prints the memory of a store and the time of a lookup while old texts make room for new ones.
Then a model answers the maths questions in the package twice with one store, and rewrites functions
of Python's standard library with one change, greedily. Plain decoding answers the same prompts in
turn with each, and every text is compared with its text. Speedups are ratios of the CPU seconds of
whole calls, prefill included, on one thread, because threads that wait count as busy. In bfloat16
verifying several tokens may round two nearly equal scores differently; only in float32 does the
exit code count different texts.
"""

from __future__ import annotations

import inspect
import json
import random
import shutil
import string
import sys
import textwrap
import time
from collections.abc import Sequence

import torch

from benchmarks.common import console, load, new_tokens, parser, share_equal, take_turns
from selfspec import SelfSpecModel, TextStore
from selfspec.apps.bench.config import PromptSetConfig
from selfspec.apps.bench.prompts import read_prompts
from selfspec.apps.chat_templates import encode_chat
from selfspec.decoder.checkpoints import load_tokenizer

BARS = {"questions again": 2.0, "edits": 1.5}
_LOOKUP_BAR = 50.0  # microseconds
_MODULES = (textwrap, shutil, string, inspect, json, random)


def measure_store(drafts: int, texts: int) -> bool:
    """Time lookups and additions, and compare the memory with its bound; true if both hold."""
    source, store = random.Random(0), TextStore(100_000)
    bound = store.nbytes
    pieces = [[source.randrange(50_000) for _ in range(10)] for _ in range(2000)]
    written = [[token for _ in range(10) for token in source.choice(pieces)] for _ in range(texts)]
    began = time.process_time()
    for text in written:
        store.add(text)
    adding = 1e6 * (time.process_time() - began) / sum(map(len, written))
    contexts = [source.choice(written)[: source.randrange(2, 90)] for _ in range(drafts)]
    found, began = 0, time.process_time()
    for context in contexts:
        match = store.find(context, 2)
        found += len(store.continuation(match, 40)) if match is not None else 0
    looking = 1e6 * (time.process_time() - began) / drafts
    console.print(
        f"{texts} texts through {store.max_tokens} tokens: {adding:.1f} µs a token added; "
        f"{drafts} lookups: {looking:.1f} µs each, {found / drafts:.1f} tokens drafted; "
        f"memory {store.nbytes / 1e6:.1f} MB, at first {bound / 1e6:.1f} MB"
    )
    return max(adding, looking) < _LOOKUP_BAR and store.nbytes == bound


def edits(count: int) -> list[str]:
    """Requests to rewrite a function with another name."""
    functions = {
        function.__name__: inspect.getsource(function)
        for module in _MODULES
        for _, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
    }
    fitting = [name for name, code in functions.items() if 300 < len(code) < 900]
    return [
        f"Rewrite this function with the name `{name}_2`, and change nothing else:\n\n"
        f"```python\n{functions[name]}```"
        for name in random.Random(0).sample(fitting, min(count, len(fitting)))
    ]


def compare(
    spec: SelfSpecModel, prompts: Sequence[list[int]], store: TextStore, max_new_tokens: int
) -> tuple[float, str]:
    """The speedup of lookups in a store, and how many texts are equal."""
    seconds, texts = {"none": 0.0, "prompt_lookup": 0.0}, {"none": [], "prompt_lookup": []}
    for prompt in prompts:
        ids = torch.tensor([prompt])

        def answer(draft: str, ids: torch.Tensor = ids) -> list[int]:
            spec.store = store if draft == "prompt_lookup" else None
            options = {"do_sample": False, "max_new_tokens": max_new_tokens}
            return new_tokens(spec.generate(ids, draft=draft, **options), ids)

        for draft, timed in take_turns(
            {draft: lambda draft=draft: answer(draft) for draft in texts}, turns=1
        ).items():
            seconds[draft] += timed.busy[0]
            texts[draft] += timed.outputs
    return seconds["none"] / seconds["prompt_lookup"], share_equal(*texts.values())


def main() -> int:
    """Run it; returns the exit code."""
    made = parser(__doc__)
    made.add_argument("--questions", type=int, default=8)
    made.add_argument("--data", help="file of GSM8K's questions; default: 16 in the package")
    made.add_argument("--edits", type=int, default=10)
    made.add_argument("--max-new-tokens", type=int, default=64)
    made.add_argument("--drafts", type=int, default=100_000)
    made.add_argument("--texts", type=int, default=11_000)
    given = made.parse_args()
    torch.set_num_threads(1)
    good = measure_store(given.drafts, given.texts)
    spec, tokenizer = load(given), load_tokenizer(given.model)
    chat = tokenizer.chat_template is not None
    maths = PromptSetConfig(
        name="maths", reader="gsm8k", path=given.data, count=given.questions, chat=chat
    )
    asked = read_prompts(maths, tokenizer)
    rewritten = [
        encode_chat(tokenizer, [{"role": "user", "content": text}])
        if chat
        else tokenizer(f"{text}\n\n").input_ids
        for text in edits(given.edits)
    ]
    compare(spec, asked[:1], TextStore(), 8)  # the first call makes what is kept
    store = TextStore()
    for name, prompts, kept in (
        ("edits", rewritten, TextStore()),
        ("questions", asked, store),
        ("questions again", asked, store),
    ):
        speed, equal = compare(spec, prompts, kept, given.max_new_tokens)
        console.print(f"{name}: {speed:.2f}x; {equal} texts equal")
        alike = equal == f"{len(prompts)}/{len(prompts)}"
        good &= speed >= BARS.get(name, 0.0) and (alike or given.dtype != "float32")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
