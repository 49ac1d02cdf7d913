"""What a store of texts costs and brings: `python -m benchmarks.store`.

It prints the memory of a store and the time of a lookup while old texts make room for new ones.
Then a model answers questions twice with one store, and rewrites functions of Python's standard
library with one change, greedily. Plain decoding answers the same prompts in turn with each, and
every text is compared with its text. Speedups are ratios of the CPU seconds of whole calls,
prefill included, on one thread, because threads that wait count as busy. In bfloat16 verifying
several tokens may round two nearly equal scores differently; only in float32 does the exit code
count different texts.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import shutil
import string
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from selfspec import DEMO_MODEL, SelfSpecModel, TextStore
from selfspec.decoder.checkpoints import load_tokenizer

BARS = {"questions again": 2.0, "edits": 1.5}
_LOOKUP_BAR = 50.0  # microseconds
_MODULES = (textwrap, shutil, string, inspect, json, random)
_WORDS = ("apples", "stamps", "marbles", "books", "coins")


def measure_store(console: Console, drafts: int, texts: int) -> bool:
    """Time lookups and additions, and compare the memory with its bound; true if both hold."""
    source, store = random.Random(0), TextStore(100_000)
    bound = store.nbytes
    pieces = [[source.randrange(50_000) for _ in range(10)] for _ in range(2000)]
    written = [[token for _ in range(10) for token in source.choice(pieces)] for _ in range(texts)]
    began = time.process_time()
    for text in written:
        store.add(text)
    adding = (time.process_time() - began) / sum(map(len, written))
    evicted = texts - store.max_tokens // len(written[0])  # all are as long
    contexts = [source.choice(written)[: source.randrange(2, 90)] for _ in range(drafts)]
    found, began = 0, time.process_time()
    for context in contexts:
        match = store.find(context, 2)
        found += len(store.continuation(match, 40)) if match is not None else 0
    looking = (time.process_time() - began) / drafts
    console.print(
        f"{texts} texts through {store.max_tokens} tokens, {evicted} of them evicted: "
        f"{adding * 1e6:.1f} µs a token added; "
        f"{drafts} lookups: {looking * 1e6:.1f} µs each, {found / drafts:.1f} tokens drafted; "
        f"memory {store.nbytes / 1e6:.1f} MB, at first {bound / 1e6:.1f} MB"
    )
    return max(adding, looking) * 1e6 < _LOOKUP_BAR and store.nbytes == bound


def questions(count: int, file: Path | None) -> list[str]:
    """Questions of GSM8K from its file, or made ones of its kind."""
    if file is not None:
        lines = file.read_text(encoding="utf-8").splitlines()[:count]
        return [json.loads(line)["question"] for line in lines]
    source = random.Random(0)
    return [
        f"A shop has {source.randrange(20, 90)} {source.choice(_WORDS)} and sells "
        f"{source.randrange(2, 19)} of them on each of {source.randrange(2, 5)} days. Each costs "
        f"${source.randrange(2, 9)}. How many are left, and how much money did the shop take?"
        for _ in range(count)
    ]


def edits(count: int) -> list[str]:
    """Requests to rewrite a function with another name."""
    functions = [
        inspect.getsource(function)
        for module in _MODULES
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
    ]
    fitting = [code for code in functions if 300 < len(code) < 900]
    return [
        f"Rewrite this function with the name `{_name(code)}_2`, and change nothing else:\n\n"
        f"```python\n{code}```"
        for code in random.Random(0).sample(fitting, min(count, len(fitting)))
    ]


def _name(code: str) -> str:
    return code.split("def ", 1)[1].split("(", 1)[0]


@dataclass
class Timed:
    """The CPU seconds of a method and of plain decoding on the same prompts."""

    plain: float = 0.0
    seconds: float = 0.0
    equal: int = 0
    prompts: int = 0


class Runner:
    """Answers prompts in turn by plain decoding and by lookups."""

    def __init__(self, spec: SelfSpecModel, new_tokens: int):
        self.spec, self.new_tokens = spec, new_tokens

    def answer(self, prompt: Tensor, draft: str, store: TextStore | None) -> tuple[Tensor, float]:
        """The text, and its CPU seconds."""
        self.spec.store = store
        began = time.process_time()
        mask, options = torch.ones_like(prompt), {"do_sample": False, "draft": draft}
        text: Any = self.spec.generate(
            prompt, attention_mask=mask, max_new_tokens=self.new_tokens, **options
        )
        return text, time.process_time() - began

    def compare(self, prompts: Sequence[Tensor], store: TextStore | None) -> Timed:
        """Every prompt by both."""
        timed = Timed()
        for prompt in prompts:
            own, plain = self.answer(prompt, "none", None)
            text, seconds = self.answer(prompt, "prompt_lookup", store)
            timed.plain, timed.seconds = timed.plain + plain, timed.seconds + seconds
            timed.equal += int(torch.equal(own, text))
            timed.prompts += 1
        return timed


def encoder(tokenizer: Any) -> Callable[[str], Tensor]:
    """Encodes a request, as a chat if the tokenizer has a template."""

    def encode(request: str) -> Tensor:
        if tokenizer.chat_template is None:
            return tokenizer(f"{request}\n\n", return_tensors="pt")["input_ids"]
        chat = [{"role": "user", "content": request}]
        options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        return tokenizer.apply_chat_template(chat, **options)["input_ids"]

    return encode


def main() -> int:
    """Run it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default=str(DEMO_MODEL))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--gsm8k", type=Path, help="its train.jsonl; questions are made without it")
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--edits", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=100_000)
    parser.add_argument("--texts", type=int, default=11_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(soft_wrap=True)
    good = measure_store(console, arguments.drafts, arguments.texts)
    spec = SelfSpecModel.from_pretrained(arguments.target, dtype=getattr(torch, arguments.dtype))
    runner, encode = Runner(spec, arguments.new_tokens), encoder(load_tokenizer(arguments.target))
    asked = [encode(text) for text in questions(arguments.questions, arguments.gsm8k)]
    store = TextStore()
    runner.answer(asked[0], "none", None)  # the first call makes what is kept
    sets = {"edits": [encode(text) for text in edits(arguments.edits)]}
    sets |= {"questions": asked, "questions again": asked}
    for name, prompts in sets.items():
        timed = runner.compare(prompts, store if "questions" in name else TextStore())
        speed = timed.plain / timed.seconds
        console.print(f"{name}: {speed:.2f}x; {timed.equal} of {timed.prompts} texts equal")
        good &= speed >= BARS.get(name, 0.0)
        good &= arguments.dtype != "float32" or timed.equal == timed.prompts
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
