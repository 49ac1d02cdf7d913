"""What the benchmarks share: arguments, the target, prompts, calls in turn and their ratios."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from selfspec import DEMO_MODEL, SelfSpecModel
from selfspec.apps.bench.config import PromptSetConfig
from selfspec.apps.bench.prompts import read_prompts
from selfspec.apps.display.demo import interleaved

console = Console(highlight=False, soft_wrap=True)

OutputT = TypeVar("OutputT")
_SETS = ("text", "gsm8k", "humaneval", "mbpp")


def parser(doc: str | None, target: bool = True) -> argparse.ArgumentParser:
    """A parser with a module's docstring, and `--model`, `--heads`, `--dtype` of a `target`."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if target:
        made.add_argument("--model", default=str(DEMO_MODEL), help="the target")
        made.add_argument("--heads", help="folder of heads; default: those beside the target")
        dtypes = ("float32", "bfloat16", "float16")
        made.add_argument("--dtype", default="float32", choices=dtypes)
    return made


def load(given: argparse.Namespace) -> SelfSpecModel:
    """The target that the arguments of `parser` name."""
    return SelfSpecModel.from_pretrained(given.model, given.heads, dtype=given.dtype)


def mixed_prompts(
    tokenizer: PreTrainedTokenizerBase, count: int, longest: int | None = None
) -> list[list[int]]:
    """Token ids of `count` prompts of each kind in the package: text, maths, two kinds of code."""
    sets = [PromptSetConfig(name=name, reader=name, count=count) for name in _SETS]
    return [prompt for one in sets for prompt in read_prompts(one, tokenizer, longest)]


@dataclass
class Timed(Generic[OutputT]):
    """The calls of one method, in the order of the turns."""

    seconds: list[float] = field(default_factory=list)  # wall time
    # CPU time, which other processes affect less; take it with one thread
    busy: list[float] = field(default_factory=list)
    outputs: list[OutputT] = field(default_factory=list)

    def add(self, call: Callable[[], OutputT]) -> None:
        """Time one more call."""
        began, busy = time.perf_counter(), time.process_time()
        self.outputs.append(call())
        self.seconds.append(time.perf_counter() - began)
        self.busy.append(time.process_time() - busy)

    def over(self, base: Timed[Any], cpu: bool = False) -> float:
        """Speed over `base`: the median ratio of the times of calls in the same turn."""
        own, others = (self.busy, base.busy) if cpu else (self.seconds, base.seconds)
        return statistics.median(b / a for a, b in zip(own, others, strict=True))


def take_turns(
    methods: Mapping[str, Callable[[], OutputT]], turns: int, warm_up: bool = False
) -> dict[str, Timed[OutputT]]:
    """Call every method once a turn, so that changes of the machine's speed affect all alike.

    With `warm_up` each is called once before, untimed.
    """
    for call in methods.values() if warm_up else ():
        call()
    found: dict[str, Timed[OutputT]] = {name: Timed() for name in methods}
    interleaved({name: partial(found[name].add, call) for name, call in methods.items()}, turns)
    return found


def told(figures: Mapping[str, float], form: str) -> str:
    """Figures by name in a line, each formatted."""
    return ", ".join(f"{name} {form.format(figure)}" for name, figure in figures.items())


def new_tokens(output: Any, prompt: torch.Tensor) -> list[int]:
    """What `generate` wrote after a prompt `[1, width]`."""
    return output[0, prompt.shape[1] :].tolist()


def share_equal(texts: Sequence[Any], others: Sequence[Any]) -> str:
    """How many texts are equal, of all."""
    return f"{sum(a == b for a, b in zip(texts, others, strict=True))}/{len(texts)}"
