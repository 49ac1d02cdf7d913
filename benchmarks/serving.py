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
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from selfspec import DEMO_MODEL, DraftConfig, SelfSpecModel
from selfspec.apps.bench.config import PromptSetConfig
from selfspec.apps.bench.prompts import read_prompts
from selfspec.apps.export import FOLDABLE, export_draft, export_eagle3
from selfspec.decoder.checkpoints import load_tokenizer
from selfspec.heads import Eagle3Head, ExitHead
from selfspec.serving import SCHEME
from selfspec.serving.exits import KINDS

_SETS = ("text", "gsm8k", "humaneval", "mbpp")


@dataclass
class ServingMethod:
    """One method of serving, and its results.

    Attributes:
        name: its name in the table.
        speculative: vLLM's speculative config, or `None`.
        draft: the same draft in selfspec, for comparison, or `None`.
        parameters: parameters of the draft model that it does not share with the target.
        blocks: KV blocks that fit into the given memory.
        seconds: seconds of every run, by number of requests.
        equal: number of requests with the same tokens as without drafts, and of all requests.
        drafted: tokens drafted in vLLM.
        accepted_at: drafts accepted in vLLM, by position.
    """

    name: str
    speculative: dict[str, Any] | None = None
    draft: dict[str, Any] | None = None
    parameters: int = 0
    blocks: int = 0
    seconds: dict[int, list[float]] = field(default_factory=dict)
    equal: list[int] = field(default_factory=lambda: [0, 0])
    drafted: int = 0
    accepted_at: list[int] = field(default_factory=list)


def main() -> None:
    """Read arguments, measure, print."""
    arguments = _arguments()
    console = Console()
    spec = SelfSpecModel.from_pretrained(
        arguments.model, arguments.heads, dtype=getattr(torch, arguments.dtype)
    )
    prompts = _prompts(arguments.model, max(arguments.requests))
    with tempfile.TemporaryDirectory() as scratch:
        methods = _chosen(_methods(spec, arguments, Path(scratch)), arguments.methods)
        console.print(
            f"starting {len(methods)} engines of vLLM: {', '.join(w.name for w in methods)}"
        )
        _measure(methods, prompts, arguments, console)
    own = {
        method.name: _own(spec, method, prompts, arguments) for method in methods if method.draft
    }
    console.print(_table(methods, own, arguments))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=str(DEMO_MODEL), help="the target")
    parser.add_argument("--heads", help="folder of heads; default: those beside the target")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32], help="at a time")
    parser.add_argument(
        "--methods", nargs="+", help="rows of the table, by parts of their names; default: all"
    )
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=2**28)
    parser.add_argument("--enforce-eager", action="store_true", help="do not compile")
    return parser.parse_args()


def _prompts(model: str, count: int) -> list[list[int]]:
    tokenizer = load_tokenizer(model)
    each = -(-count // len(_SETS))
    sets = [PromptSetConfig(name=name, reader=name, count=min(each, 8)) for name in _SETS]
    read = [prompt for one in sets for prompt in read_prompts(one, tokenizer, 384)]
    return [read[at % len(read)] for at in range(count)]


def _methods(
    spec: SelfSpecModel, arguments: argparse.Namespace, scratch: Path
) -> list[ServingMethod]:
    """Serving without drafts, with heads in place, and with exported heads."""
    decoder, count = spec.decoder, arguments.num_draft_tokens
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
            model = f"{SCHEME}{arguments.heads or ''}@{place}"
            add(f"in place {place}", "draft_model", model, head, own)
    for head in heads:
        folder = scratch / f"{head.kind}_{head.exit_layer}"
        if head.kind in FOLDABLE[:1]:
            folded = export_draft(decoder, head, folder, target=arguments.model)
            name = f"folded {head.kind}:{head.exit_layer}"
            add(name, "draft_model", str(folder), head, folded.parameters)
        if isinstance(head, Eagle3Head):
            written = export_eagle3(decoder, head, folder, target=arguments.model)
            add("eagle3", "eagle3", str(folder / "speculators"), head, written.parameters)
    return methods


def _chosen(methods: list[ServingMethod], names: Sequence[str] | None) -> list[ServingMethod]:
    """The methods whose names contain one of `names`, after serving without drafts.

    Raises:
        SystemExit: a name is in none of them.
    """
    for name in names or ():
        if not any(name in method.name for method in methods):
            known = ", ".join(method.name for method in methods)
            raise SystemExit(f"--methods {name}: no such method; there are {known}")
    drafting = [m for m in methods[1:] if names is None or any(name in m.name for name in names)]
    return [methods[0], *drafting]


# One process per engine


def _serve(method: ServingMethod, arguments: argparse.Namespace, asked: Connection) -> None:
    """Answer lists of prompts with tokens, seconds and counters until `None` comes."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=arguments.model,
        dtype=arguments.dtype,
        max_model_len=512,
        max_num_seqs=max(arguments.requests),
        kv_cache_memory_bytes=arguments.kv_cache_memory_bytes,
        enable_prefix_caching=False,
        enforce_eager=arguments.enforce_eager,
        speculative_config=method.speculative,
        disable_log_stats=False,
    )
    options = SamplingParams(temperature=0, max_tokens=arguments.max_new_tokens, ignore_eos=True)
    asked.send(engine.llm_engine.vllm_config.cache_config.num_gpu_blocks)
    while (prompts := asked.recv()) is not None:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        outputs = engine.generate(given, options, use_tqdm=False)
        seconds = time.perf_counter() - start
        counted = {m.name: m for m in engine.get_metrics() if "spec_decode" in m.name}
        drafts = counted.get("vllm:spec_decode_num_draft_tokens")
        accepted = counted.get("vllm:spec_decode_num_accepted_tokens_per_pos")
        asked.send(
            (
                [list(output.outputs[0].token_ids) for output in outputs],
                seconds,
                drafts.value if drafts else 0,
                accepted.values if accepted else [],
            )
        )


def _measure(
    methods: Sequence[ServingMethod],
    prompts: list[list[int]],
    arguments: argparse.Namespace,
    console: Console,
) -> None:
    """Run the engines in turn; fill in blocks, seconds and counters of the methods."""
    context = multiprocessing.get_context("spawn")
    engines: list[tuple[ServingMethod, Connection, Any]] = []
    for method in methods:
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(method, arguments, there), daemon=True)
        process.start()
        there.close()
        method.blocks = here.recv()
        engines.append((method, here, process))
        console.print(f"  {method.name}: {method.blocks} KV blocks")
    for count in arguments.requests:
        for repeat in range(-1, arguments.repeats):  # the first run warms up
            undrafted: list[list[int]] = []
            for method, engine, _ in engines:
                engine.send(prompts[:count])
                tokens, seconds, method.drafted, method.accepted_at = engine.recv()
                undrafted = undrafted or tokens
                if repeat >= 0:
                    method.seconds.setdefault(count, []).append(seconds)
                    method.equal[0] += sum(a == b for a, b in zip(tokens, undrafted, strict=True))
                    method.equal[1] += count
        console.print(f"  {count} at a time: done")
    for _, engine, process in engines:
        engine.send(None)
        process.join()


# selfspec's own counts, and the table


def _own(
    spec: SelfSpecModel,
    method: ServingMethod,
    prompts: list[list[int]],
    arguments: argparse.Namespace,
) -> list[float]:
    """Acceptance rate at each position in selfspec."""
    drafted, accepted = 0, [0] * arguments.num_draft_tokens
    for prompt in prompts[:8]:
        spec.generate(
            torch.tensor([prompt]),
            max_new_tokens=arguments.max_new_tokens,
            min_new_tokens=arguments.max_new_tokens,
            do_sample=False,
            draft=method.draft,
        )
        for round_ in (spec.last_trace.rows[0] if spec.last_trace else ())[:-1]:
            drafted += 1
            accepted = [n + (at < round_.accepted) for at, n in enumerate(accepted)]
    return [n / max(1, drafted) for n in accepted]


def _table(
    methods: Sequence[ServingMethod], own: dict[str, list[float]], arguments: argparse.Namespace
) -> Table:
    table = Table(title=f"vLLM, {arguments.dtype}, {arguments.max_new_tokens} new tokens, greedy")
    table.add_column("method")
    for count in arguments.requests:
        table.add_column(f"{count} at a time", justify="right")
    for name in ("equal", "KV blocks", "parameters", "acceptance in vLLM", "in selfspec"):
        table.add_column(name, justify="right")
    for method in methods:
        speeds = []
        for count in arguments.requests:
            pairs = zip(methods[0].seconds[count], method.seconds[count], strict=True)
            ratios = [without / with_drafts for without, with_drafts in pairs]
            rate = count * arguments.max_new_tokens / statistics.median(method.seconds[count])
            speeds.append(f"{rate:.0f} tok/s, {statistics.median(ratios):.2f}x")
        rounds = max(1, method.drafted // arguments.num_draft_tokens)
        here = " ".join(f"{n / rounds:.2f}" for n in method.accepted_at)
        there = " ".join(f"{rate:.2f}" for rate in own.get(method.name, ()))
        equal = f"{method.equal[0]}/{method.equal[1]}"
        table.add_row(
            method.name, *speeds, equal, str(method.blocks), f"{method.parameters:,}", here, there
        )
    return table


if __name__ == "__main__":
    main()
