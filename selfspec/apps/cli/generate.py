"""`selfspec generate`: continues prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from selfspec.apps.cli import options as opt
from selfspec.apps.cli.common import (
    Loaded,
    Source,
    print_json,
    progress,
    read_prompts,
    reporting,
    summary,
)

if TYPE_CHECKING:
    from selfspec.config import DraftConfig
    from selfspec.schedule.stats import Stats, Trace

_JOB = "Job"


Format = Literal["text", "jsonl", "trace", "svg"]
PromptText = Annotated[
    str | None, typer.Argument(help="Text to continue; - reads stdin.", show_default="stdin")
]
File = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        help='Prompts: JSON lines with a "prompt" each, or one plain text; - reads stdin.',
    ),
]
JobPrompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="A job: prompts as in --file, answered into --output. If interrupted, the same "
        "command resumes it.",
        rich_help_panel=_JOB,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="JSON lines file to write: one answer per prompt, in order.",
        rich_help_panel=_JOB,
    ),
]
BatchSize = Annotated[
    int,
    typer.Option(
        min=1,
        help="Prompts that run at a time; when one finishes, the next joins.",
        rich_help_panel=_JOB,
    ),
]
Processes = Annotated[int, typer.Option(min=1, help="Number of processes.", rich_help_panel=_JOB)]
FormatOption = Annotated[
    Format,
    typer.Option(
        "--format",
        help="text: the continuation. jsonl: an object per prompt. trace: the continuation "
        "with accepted, corrected and bonus tokens marked. svg: the same as a picture.",
    ),
]


def generate(
    prompt: PromptText = None,
    file: File = None,
    prompts_file: JobPrompts = None,
    output: Output = None,
    batch_size: BatchSize = 8,
    processes: Processes = 1,
    model: opt.Model = None,
    heads: opt.Heads = None,
    dtype: opt.DtypeOption = "auto",
    device: opt.Device = None,
    kernels: opt.KernelsOption = "auto",
    kv_cache: opt.KVCacheOption = "auto",
    config: opt.Config = None,
    draft: opt.Draft = None,
    profile: opt.Profile = None,
    max_new_tokens: opt.MaxNewTokens = 128,
    temperature: opt.Temperature = 0.0,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    seed: opt.Seed = 0,
    form: FormatOption = "text",
    as_json: opt.AsJson = False,
) -> None:
    """Continue prompts by self-speculation; the output is that of the model's own decoding."""
    if prompt is not None and file is not None:
        raise typer.BadParameter("give a prompt or --file, not both")
    if (prompts_file is None) != (output is None) or (output and (prompt or file)):
        raise typer.BadParameter("a job has --prompts and --output, and no other prompt")
    prompts = read_prompts(prompt, prompts_file or file)
    drafting = opt.draft_config(config, draft)
    options = {"max_new_tokens": max_new_tokens, **opt.sampling(temperature, top_k, top_p)}
    source = Source(model, heads, dtype, device, profile, kernels, kv_cache)
    if output is not None:
        job = _Job(source, drafting, options, seed, batch_size)
        job.run(prompts, output, processes, as_json)
        return
    with reporting(as_json) as console:
        target = source.load()
        drafting = drafting or target.spec.draft_for(sampled=temperature > 0)
        options["draft"] = drafting
        results = [_continue(target, text, options, seed, form, console) for text in prompts]
    if as_json:
        print_json({**target.to_dict(), "draft": drafting.model_dump(), "results": results})


def _continue(
    target: Loaded,
    prompt: str,
    options: dict[str, Any],
    seed: int,
    form: Format,
    console: Console,
) -> dict[str, Any]:
    """Continue one prompt, show the output, and return the result for JSON."""
    import torch

    spec, tokenizer = target.spec, target.tokenizer
    inputs = tokenizer(prompt, return_tensors="pt").to(spec.engine.decoder.device)
    streamer = None
    if form == "text" and not console.quiet:
        from transformers import TextStreamer

        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)  # pyright: ignore
    spec.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        generator=torch.Generator(spec.engine.decoder.device).manual_seed(seed),
        streamer=streamer,
        **options,
    )
    stats, trace = spec.last_stats, spec.last_trace
    assert stats is not None and trace is not None
    text = tokenizer.decode(trace.tokens(), skip_special_tokens=True)
    result = {"prompt": prompt, "text": text, "stats": stats.to_dict()}
    if form == "trace":
        result["trace"] = [
            {"drafted": r.drafted, "accepted": r.accepted, "target": r.target}
            for r in trace.rows[0]
        ]
    if not console.quiet:
        _show(target, form, console, result, stats, trace)
    return result


def _show(
    target: Loaded,
    form: Format,
    console: Console,
    result: dict[str, Any],
    stats: Stats,
    trace: Trace,
) -> None:
    if form == "jsonl":
        print_json(result)
        return
    if form == "trace":
        from selfspec.apps.display import pieces, write_piece

        for piece in pieces(trace, target.tokenizer):
            write_piece(console, piece)
        console.file.write("\n")
    if form == "svg":
        from selfspec.apps.display import trace_svg

        title = (
            f"{stats.acceptance_rate:.0%} of the drafts accepted, "
            f"{stats.mean_accepted_length:.2f} tokens a round"
        )
        console.file.write(trace_svg(trace, target.tokenizer, result["prompt"], title))
    Console(stderr=True, highlight=False).print(summary(stats), style="dim")


@dataclass(frozen=True)
class _Job:
    """Many prompts over several processes, each with a target of its own."""

    source: Source
    draft: DraftConfig | None
    options: dict[str, Any]
    seed: int
    batch_size: int

    def run(self, prompts: list[str], output: Path, processes: int, as_json: bool) -> None:
        """Answer all prompts into `output`."""
        from selfspec.generation.jobs import run_job

        # Device and batch size may change: the output stays the same.
        place = self.source._replace(device=None)._asdict()
        facts = {**place, "draft": self.draft, "options": self.options, "seed": self.seed}
        identity = {name: str(value) for name, value in facts.items()}
        bar = Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=progress())
        with reporting(as_json) as console, bar:
            task = bar.add_task("prompts", total=len(prompts))
            run_job(prompts, self, output, identity, processes, lambda n: bar.advance(task, n))
            lines = output.read_text(encoding="utf-8").splitlines()
            failed = sum("error" in json.loads(line) for line in lines)
            of_these = f", {failed} of them errors" if failed else ""
            console.print(f"{output}: {len(prompts)} answers{of_these}")
        if as_json:
            print_json({"output": str(output), "answers": len(prompts), "errors": failed})

    def __call__(
        self, worker: int, workers: int
    ) -> Callable[[Mapping[int, str]], Iterator[tuple[int, dict[str, Any]]]]:
        """Make the function that answers prompts in process `worker` of `workers`."""
        import torch

        source = self.source
        if source.device is None and torch.cuda.is_available():
            source = source._replace(device=f"cuda:{worker % torch.cuda.device_count()}")
        if workers > 1:
            torch.set_num_threads(max(1, torch.get_num_threads() // workers))
        return partial(self._answers, source.load())

    def _answers(
        self, target: Loaded, prompts: Mapping[int, str]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """The rows' answers, as they are finished."""
        rows, texts = list(prompts), list(prompts.values())
        outputs = target.spec.generate_batch_iter(
            (target.tokenizer(text)["input_ids"] for text in texts),
            draft=self.draft,
            batch_size=self.batch_size,
            seed=[self.seed + row for row in rows],
            **self.options,
        )
        for output in outputs:
            text = target.tokenizer.decode(output.generated_tokens, skip_special_tokens=True)
            stats = output.stats.counted()
            answer = {"prompt": texts[output.number], "text": text, "stats": stats}
            failed = {} if output.error is None else {"error": output.error}
            yield rows[output.number], answer | failed
