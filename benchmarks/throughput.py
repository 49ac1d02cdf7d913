"""Throughput on prompts with answers of various lengths: `python -m benchmarks.throughput`.

Static batches of transformers, its continuous batching, and selfspec's `generate_batch` continue
the same prompts greedily. They run in turn in one process, so that changes of the machine's speed
affect all of them. Every answer is compared with that of the static batches. If they differ, it is
compared with that of a single call, because padding can change the rounding of nearly equal scores.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria
from transformers.utils import logging

from selfspec import DEMO_MODEL, SelfSpecModel
from selfspec.apps.bench.config import PromptSetConfig
from selfspec.apps.bench.prompts import padded, read_prompts
from selfspec.apps.bench.results import Grid, memory_cell
from selfspec.apps.bench.run import Memory, peak_memory
from selfspec.decoder.checkpoints import load_tokenizer

_PAGE = 64  # slots of a page of transformers' continuous batching
_SETS = ("text", "gsm8k", "humaneval", "mbpp")


@dataclass
class BatchMethod:
    """One method of continuing all prompts, and its results.

    Attributes:
        name: its name in the table.
        run: continues the prompts, the given number at a time.
        seconds: seconds of every run.
        busy: CPU seconds of every run, which other processes affect less.
        equal: answers of the last run that equal those of static batches or of single calls.
        memory: memory of the run with the highest peak.
    """

    name: str
    run: Callable[[int], list[list[int]]]
    seconds: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    equal: int = 0
    memory: Memory | None = None


class Lengths(StoppingCriteria):
    """Ends each row after its own number of new tokens."""

    def __init__(self, start: int, lengths: Sequence[int]):
        self.ends = start + torch.tensor(lengths)

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Any:
        """`[batch]` whether each row has all its tokens."""
        return input_ids.shape[1] >= self.ends.to(input_ids.device)


def main() -> None:
    """Read arguments, measure, print."""
    arguments = _arguments()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dtype = getattr(torch, arguments.dtype)
    spec = SelfSpecModel.from_pretrained(arguments.model, arguments.heads, dtype=dtype)
    spec.causal_lm.to(arguments.device)
    spec.causal_lm.generation_config.eos_token_id = None  # lengths are given
    spec.causal_lm.config.eos_token_id = None
    prompts, lengths = _requests(arguments)

    @cache
    def single(index: int) -> list[int]:
        return _greedy(spec.causal_lm, [prompts[index]], [lengths[index]])[0]

    console = Console()
    for rows in arguments.rows:
        methods = _methods(spec, prompts, lengths, arguments.draft)
        _measure(methods, rows, arguments.repeats, single, spec.causal_lm.device)
        console.print(
            _grid(methods, rows, sum(lengths), len(prompts), arguments).table(console.width)
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=str(DEMO_MODEL), help="the target")
    parser.add_argument("--heads", help="folder of heads; default: those beside the target")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--draft", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs=2, default=[16, 256], help="of the answers")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16], help="at a time")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def _requests(arguments: argparse.Namespace) -> tuple[list[list[int]], list[int]]:
    """Prompts and the lengths of their answers, in a random order that is the same in every run."""
    tokenizer = load_tokenizer(arguments.model)
    count = -(-arguments.prompts // len(_SETS))
    sets = [PromptSetConfig(name=name, reader=name, count=count) for name in _SETS]
    read = [prompt for one in sets for prompt in read_prompts(one, tokenizer)]
    source = random.Random(0)
    prompts = source.sample(read, arguments.prompts)
    low, high = arguments.lengths
    steps = range(arguments.prompts)
    lengths = [low + (high - low) * at // max(1, arguments.prompts - 1) for at in steps]
    return prompts, source.sample(lengths, len(lengths))


def _methods(
    spec: SelfSpecModel, prompts: list[list[int]], lengths: list[int], fields: list[str]
) -> list[BatchMethod]:
    target = spec.causal_lm

    def static(rows: int) -> list[list[int]]:
        spans = [slice(at, at + rows) for at in range(0, len(prompts), rows)]
        return [text for span in spans for text in _greedy(target, prompts[span], lengths[span])]

    def continuous(rows: int) -> list[list[int]]:
        return _continuous(target, prompts, lengths, rows)

    def batched(draft: object) -> Callable[[int], list[list[int]]]:
        def run(rows: int) -> list[list[int]]:
            outputs = spec.generate_batch(
                prompts, draft=draft, batch_size=rows, max_new_tokens=lengths, do_sample=False
            )
            return [output.generated_tokens for output in outputs.values()]

        return run

    given = dict(field.split("=", 1) for field in fields)
    return [
        BatchMethod("transformers, static batches", static),
        BatchMethod("transformers, generate_batch", continuous),
        BatchMethod("selfspec without drafts", batched("none")),
        BatchMethod("selfspec", batched(given or None)),
    ]


def _greedy(
    target: PreTrainedModel, prompts: list[list[int]], lengths: list[int]
) -> list[list[int]]:
    """Answers of one batch of the target's `generate`."""
    tokens, mask = padded([torch.tensor(prompt) for prompt in prompts], target.device)
    start = tokens.shape[1]
    run: Any = target.generate
    output = run(
        tokens,
        attention_mask=mask,
        do_sample=False,
        pad_token_id=0,
        max_new_tokens=max(lengths),
        stopping_criteria=[Lengths(start, lengths)],
    )
    rows = output[:, start:].tolist()
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def _continuous(
    target: PreTrainedModel, prompts: list[list[int]], lengths: list[int], rows: int
) -> list[list[int]]:
    """Answers by the continuous batching of transformers, with one length per request."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    # By default transformers reserves most of the memory.
    longest = max(map(len, prompts)) + max(lengths)
    limits = ContinuousBatchingConfig(
        max_requests_per_batch=rows,
        max_batch_tokens=512,
        page_size=_PAGE,
        num_blocks=rows * -(-longest // _PAGE),
    )
    answers: dict[str, list[int]] = {}
    begin: Any = target.continuous_batching_context_manager
    with torch.no_grad(), begin(config, continuous_batching_config=limits) as manager:
        names = [
            manager.add_request(prompt, max_new_tokens=length)
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        while len(answers) < len(prompts):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                answers[result.request_id] = result.generated_tokens
            elif result is None and not manager.is_running():
                raise RuntimeError("continuous batching of transformers ended early")
    return [answers[name] for name in names]


def _measure(
    methods: Sequence[BatchMethod],
    rows: int,
    repeats: int,
    single: Callable[[int], list[int]],
    device: torch.device,
) -> None:
    """Time the methods in turn; `single` returns a prompt's answer by a single call."""
    expected: list[list[int]] = []

    def timed(method: BatchMethod) -> None:
        start, busy = time.perf_counter(), time.process_time()
        texts = method.run(rows)
        method.seconds.append(time.perf_counter() - start)
        method.busy.append(time.process_time() - busy)
        if not expected:
            expected.extend(texts)
        pairs = enumerate(zip(texts, expected, strict=True))
        method.equal = sum(own == static or own == single(at) for at, (own, static) in pairs)

    for _ in range(repeats):
        for method in methods:
            memory = peak_memory(partial(timed, method), device)
            method.memory = max(filter(None, (method.memory, memory)), default=None)


def _grid(
    methods: Sequence[BatchMethod],
    at_a_time: int,
    tokens: int,
    prompts: int,
    arguments: argparse.Namespace,
) -> Grid:
    low, high = arguments.lengths
    rows: list[list[str]] = []
    for method in methods:
        ratios = [
            statistics.median(a / b for a, b in zip(base.seconds, method.seconds, strict=True))
            for base in methods[:2]
        ]
        rows.append(
            [
                method.name,
                f"{tokens / statistics.median(method.seconds):.0f}",
                *(f"{ratio:.2f}x" for ratio in ratios),
                f"{statistics.median(method.busy):.1f} s",
                f"{method.equal}/{prompts}",
                memory_cell(method.memory),
            ]
        )
    columns = ["tokens/s", "over static", "over its generate_batch", "CPU time", "equal"]
    columns = ["", *columns, "peak MiB (grown)"]
    return Grid(
        f"{prompts} prompts, answers of {low} to {high} tokens, {at_a_time} rows, "
        f"{arguments.dtype}, greedy; medians of {arguments.repeats} interleaved runs",
        columns,
        rows,
    )


if __name__ == "__main__":
    main()
