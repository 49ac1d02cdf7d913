"""`selfspec generate`: continues prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from selfspec.apps.cli import options as opt
from selfspec.apps.cli.common import (
    Loaded,
    Source,
    hint_heads,
    is_sampled,
    note,
    own_choices,
    print_json,
    progress,
    read_prompts,
    reporting,
    resolve,
    say_choices,
    summary,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from selfspec.config import DraftConfig
    from selfspec.schedule.stats import Stats, Trace

_JOB = "Job"
_TEXT = "Text"


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
Chat = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="Each prompt is a user's message in the checkpoint's chat template, and the text is "
        "the reply.",
        rich_help_panel=_TEXT,
    ),
]
JSONSchema = Annotated[
    str | None,
    typer.Option(
        "--json-schema",
        metavar="SCHEMA",
        help="The text is JSON that fits this schema: JSON, or the path of a file with it. Needs "
        "xgrammar.",
        rich_help_panel=_TEXT,
    ),
]
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
    chat: Chat = False,
    system: opt.System = None,
    json_schema: JSONSchema = None,
    max_new_tokens: opt.MaxNewTokens = 128,
    temperature: opt.OwnTemperature = None,
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
    if system is not None and not chat:
        raise typer.BadParameter("--system is a message of a chat; give --chat, too")
    asking = _Asking(chat, system, json_schema and _read_schema(json_schema))
    prompts = read_prompts(prompt, prompts_file or file)
    drafting = opt.draft_config(config, draft)
    options = {"max_new_tokens": max_new_tokens, **opt.sampling(temperature, top_k, top_p)}
    source = Source(model, heads, dtype, device, profile, kernels, kv_cache)
    if output is not None:
        asking.check(source)
        job = _Job(source, asking, drafting, options, seed, batch_size)
        job.run(prompts, output, processes, as_json)
        return
    with reporting(as_json) as console:
        asking.check(source)
        target = source.load()
        drafting = drafting or target.spec.draft_for(sampled=is_sampled(target.spec, options))
        asking.hint(target)
        hint_heads(target.spec)
        say_choices(target.spec, options)
        options |= {"draft": drafting, **asking.stops(target)}
        process = asking.processors(target)
        results = [
            _continue(target, text, asking, {**options, **process()}, seed, form, console)
            for text in prompts
        ]
    if as_json:
        chosen = {"generation_config": own_choices(target.spec), "draft": drafting.model_dump()}
        print_json({**target.to_dict(), **chosen, "results": results})


def _read_schema(given: str) -> str:
    """A JSON schema, given as it is or as the path of its file.

    Raises:
        ValueError: it is not a JSON object.
    """
    is_text = given.lstrip().startswith("{")
    if not is_text and not Path(given).is_file():
        raise FileNotFoundError(f"no schema at {given}; give JSON, or the path of a file with it")
    text = given if is_text else Path(given).read_text(encoding="utf-8")
    try:
        schema = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the schema is not JSON ({error}), got {text[:80]!r}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"a schema is a JSON object, got {text[:80]!r}")
    return text


@dataclass(frozen=True)
class _Asking:
    """How prompts become tokens, and what bounds the texts behind them.

    Attributes:
        chat: whether a prompt is a user's message.
        system: a system message before it.
        schema: a JSON schema of the texts.
    """

    chat: bool = False
    system: str | None = None
    schema: str | None = None

    def check(self, source: Source) -> None:
        """Refuse what the checkpoint or this installation cannot do, before weights are loaded.

        Raises:
            ImportError: there is a schema, and xgrammar is not installed.
            ValueError: it is a chat, and the tokenizer has no template.
        """
        from selfspec.decoder.checkpoints import load_tokenizer

        if self.schema is not None and find_spec("xgrammar") is None:
            raise ImportError(
                "--json-schema needs the package xgrammar: pip install 'selfspec[structured]'"
            )
        if self.chat and not load_tokenizer(resolve(source.model)[1]).chat_template:
            raise ValueError("--chat needs a chat template, and the tokenizer has none")

    def hint(self, target: Loaded) -> None:
        """Say that the checkpoint has a chat template, if it is not used."""
        if target.tokenizer.chat_template and not self.chat:
            note("the checkpoint has a chat template: --chat puts the prompt into it")

    def encode(self, tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
        """Token ids of a prompt."""
        if not self.chat:
            return tokenizer(prompt).input_ids
        from selfspec.apps.cli.conversation import encode_turns, first_turn

        return encode_turns(tokenizer, first_turn(prompt, self.system))

    def stops(self, target: Loaded) -> dict[str, Any]:
        """Options of `generate` with which a reply ends with its turn."""
        if not self.chat:
            return {}
        from selfspec.apps.cli.conversation import turn_stops

        return turn_stops(target.spec, target.tokenizer)

    def processors(self, target: Loaded) -> Callable[[], dict[str, Any]]:
        """Makes the options of `generate` that keep one call to the schema."""
        if self.schema is None:
            return dict
        import xgrammar.contrib.hf  # pyright: ignore[reportMissingImports]

        ends = self.stops(target).get("eos_token_id")
        vocabulary = xgrammar.TokenizerInfo.from_huggingface(
            target.tokenizer, vocab_size=target.spec.config.vocab_size, stop_token_ids=ends
        )
        # With any white space allowed, a small model may write nothing else.
        grammar = xgrammar.GrammarCompiler(vocabulary).compile_json_schema(
            self.schema, any_whitespace=False
        )
        return lambda: {"logits_processor": [xgrammar.contrib.hf.LogitsProcessor(grammar)]}


def _continue(
    target: Loaded,
    prompt: str,
    asking: _Asking,
    options: dict[str, Any],
    seed: int,
    form: Format,
    console: Console,
) -> dict[str, Any]:
    """Continue one prompt, show the output, and return the result for JSON."""
    import torch

    spec, tokenizer = target.spec, target.tokenizer
    device = spec.decoder.device
    ids = torch.tensor([asking.encode(tokenizer, prompt)], device=device)
    streamer = None
    if form == "text" and not console.quiet:
        from transformers import TextStreamer

        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)  # pyright: ignore
    spec.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        generator=torch.Generator(device).manual_seed(seed),
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
    asking: _Asking
    draft: DraftConfig | None
    options: dict[str, Any]
    seed: int
    batch_size: int

    def run(self, prompts: list[str], output: Path, processes: int, as_json: bool) -> None:
        """Answer all prompts into `output`."""
        from selfspec.generation.jobs import run_job

        # Device and batch size may change: the output stays the same.
        place = self.source._replace(device=None)._asdict()
        facts = {
            **place,
            **vars(self.asking),
            "draft": self.draft,
            "options": self.options,
            "seed": self.seed,
        }
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
        bounds = {**self.asking.stops(target), **self.asking.processors(target)()}
        outputs = target.spec.generate_batch_iter(
            (self.asking.encode(target.tokenizer, text) for text in texts),
            draft=self.draft,
            batch_size=self.batch_size,
            seed=[self.seed + row for row in rows],
            **self.options,
            **bounds,
        )
        for output in outputs:
            text = target.tokenizer.decode(output.generated_tokens, skip_special_tokens=True)
            stats = output.stats.counted()
            answer = {"prompt": texts[output.number], "text": text, "stats": stats}
            failed = {} if output.error is None else {"error": output.error}
            yield rows[output.number], answer | failed
