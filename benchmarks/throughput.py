"""Throughput on prompts with answers of various lengths: `python -m benchmarks.throughput`.

Static batches of transformers, its continuous batching, and selfspec's `generate_batch` continue
the same prompts greedily. They run in turn in one process, so that changes of the machine's speed
affect all of them. Every answer is compared with that of the static batches. If they differ, it is
compared with that of a single call, because padding can change the rounding of nearly equal scores.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria
from transformers.utils import logging

from benchmarks.common import Timed, console, load, mixed_prompts, parser, take_turns
from selfspec import SelfSpecModel
from selfspec.apps.bench.prompts import padded
from selfspec.apps.bench.results import Grid, memory_cell
from selfspec.apps.bench.run import Memory, peak_memory
from selfspec.decoder.checkpoints import load_tokenizer

_PAGE = 64  # slots of a page of transformers' continuous batching
_COLUMNS = ("tokens/s", "over static", "over its generate_batch", "CPU time", "equal")


class Request(NamedTuple):
    """A prompt, and the number of tokens of its answer."""

    prompt: list[int]
    length: int


class Answers(NamedTuple):
    """The answers to all requests, and the memory of the run."""

    texts: list[list[int]]
    memory: Memory | None


class Lengths(StoppingCriteria):
    """Ends each row after its own number of new tokens."""

    def __init__(self, start: int, requests: Sequence[Request]):
        self.ends = start + torch.tensor([request.length for request in requests])

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Any:
        """`[batch]` whether each row has all its tokens."""
        return input_ids.shape[1] >= self.ends.to(input_ids.device)


def main() -> None:
    """Read arguments, measure, print."""
    made = parser(__doc__)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--draft", nargs="*", default=[], metavar="KEY=VALUE")
    made.add_argument("--prompts", type=int, default=64)
    made.add_argument("--lengths", type=int, nargs=2, default=[16, 256], help="of the answers")
    made.add_argument("--rows", type=int, nargs="+", default=[8, 16], help="at a time")
    made.add_argument("--repeats", type=int, default=3)
    given = made.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    spec = load(given)
    spec.causal_lm.to(given.device)
    spec.causal_lm.generation_config.eos_token_id = None  # lengths are given
    spec.causal_lm.config.eos_token_id = None
    requests = _requests(given)
    draft = dict(field.split("=", 1) for field in given.draft) or None
    single: dict[int, list[int]] = {}
    for rows in given.rows:
        methods = {
            "transformers, static batches": partial(_static, spec.causal_lm, requests, rows),
            "transformers, generate_batch": partial(_continuous, spec.causal_lm, requests, rows),
            "selfspec without drafts": partial(_batched, spec, requests, rows, "none"),
            "selfspec": partial(_batched, spec, requests, rows, draft),
        }
        device = spec.causal_lm.device
        calls = {name: partial(_with_memory, run, device) for name, run in methods.items()}
        found = take_turns(calls, given.repeats)
        equal = _equal(spec.causal_lm, requests, found, single)
        console.print(_grid(found, equal, rows, requests, given).table(console.width))


def _requests(given: argparse.Namespace) -> list[Request]:
    """Prompts and the lengths of their answers, in a random order that is the same in every run."""
    read = mixed_prompts(load_tokenizer(given.model), -(-given.prompts // 4))
    source, (low, high) = random.Random(0), given.lengths
    prompts = source.sample(read, given.prompts)
    most = max(1, given.prompts - 1)
    lengths = [low + (high - low) * at // most for at in range(given.prompts)]
    return list(map(Request, prompts, source.sample(lengths, len(lengths))))


def _with_memory(run: Callable[[], list[list[int]]], device: torch.device) -> Answers:
    texts: list[list[int]] = []
    memory = peak_memory(lambda: texts.extend(run()), device)
    return Answers(texts, memory)


def _static(target: PreTrainedModel, requests: list[Request], rows: int) -> list[list[int]]:
    """Answers by the target's own `generate`, in batches of `rows`."""
    answers: list[list[int]] = []
    generate: Any = target.generate
    for at in range(0, len(requests), rows):
        batch = requests[at : at + rows]
        tokens, mask = padded([torch.tensor(prompt) for prompt, _ in batch], target.device)
        output = generate(
            tokens,
            attention_mask=mask,
            do_sample=False,
            pad_token_id=0,
            max_new_tokens=max(length for _, length in batch),
            stopping_criteria=[Lengths(tokens.shape[1], batch)],
        )
        written = output[:, tokens.shape[1] :].tolist()
        answers += [row[:length] for row, (_, length) in zip(written, batch, strict=True)]
    return answers


def _continuous(target: PreTrainedModel, requests: list[Request], rows: int) -> list[list[int]]:
    """Answers by the continuous batching of transformers, with one length per request."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    # By default transformers reserves most of the memory.
    prompts, lengths = zip(*requests, strict=True)
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
        names = [manager.add_request(prompt, max_new_tokens=length) for prompt, length in requests]
        while len(answers) < len(requests):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                answers[result.request_id] = result.generated_tokens
            elif result is None and not manager.is_running():
                raise RuntimeError("continuous batching of transformers ended early")
    return [answers[name] for name in names]


def _batched(
    spec: SelfSpecModel, requests: list[Request], rows: int, draft: Any
) -> list[list[int]]:
    """Answers by selfspec's `generate_batch`."""
    prompts, lengths = map(list, zip(*requests, strict=True))
    outputs = spec.generate_batch(
        prompts, draft=draft, batch_size=rows, max_new_tokens=lengths, do_sample=False
    )
    return [output.generated_tokens for output in outputs.values()]


def _equal(
    target: PreTrainedModel,
    requests: list[Request],
    found: Mapping[str, Timed[Answers]],
    single: dict[int, list[int]],
) -> dict[str, int]:
    """Answers of each method's last run that equal those of static batches or of single calls."""
    expected, equal = next(iter(found.values())).outputs[0].texts, dict.fromkeys(found, 0)
    for name, timed in found.items():
        for at, text in enumerate(timed.outputs[-1].texts):
            if text != expected[at] and at not in single:
                single[at] = _static(target, [requests[at]], 1)[0]
            equal[name] += text in (expected[at], single.get(at))
    return equal


def _grid(
    found: Mapping[str, Timed[Answers]],
    equal: Mapping[str, int],
    at_a_time: int,
    requests: list[Request],
    given: argparse.Namespace,
) -> Grid:
    rows: list[list[str]] = []
    tokens, bases = sum(length for _, length in requests), list(found.values())[:2]
    for name, timed in found.items():
        rate = f"{tokens / median(timed.seconds):.0f}"
        speeds = [f"{timed.over(base):.2f}x" for base in bases]
        memory = max((run.memory for run in timed.outputs if run.memory), default=None)
        cells = [f"{median(timed.busy):.1f} s", f"{equal[name]}/{len(requests)}"]
        rows.append([name, rate, *speeds, *cells, memory_cell(memory)])
    low, high = given.lengths
    title = (
        f"{len(requests)} prompts, answers of {low} to {high} tokens, {at_a_time} rows, "
        f"{given.dtype}, greedy; medians of {given.repeats} interleaved runs"
    )
    return Grid(title, ["", *_COLUMNS, "peak MiB (grown)"], rows)


if __name__ == "__main__":
    main()
