"""`selfspec generate`: continues prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from selfspec.apps.cli.common import (
    Loaded,
    Reporter,
    Source,
    begin,
    command,
    note,
    own_choices,
    progress_bar,
    read_prompts,
    show_choices,
    summary,
)
from selfspec.apps.cli.options import Drafting, Prompts, System, Writing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from selfspec.config import DraftConfig, JsonObject, Options

Format = Literal["text", "jsonl", "trace", "svg"]

_job = partial(typer.Option, rich_help_panel="Job")
_text = partial(typer.Option, rich_help_panel="Text")


@dataclass(frozen=True)
class Job:
    """Options of many prompts at once."""

    prompts: Annotated[
        Path | None,
        _job(
            "--prompts",
            metavar="FILE",
            help="A job: prompts as in --file, answered into --output. If interrupted, the same "
            "command resumes it.",
        ),
    ] = None
    output: Annotated[
        Path | None,
        _job("--output", "-o", help="JSON lines file to write: one answer per prompt, in order."),
    ] = None
    batch_size: Annotated[
        int, _job(min=1, help="Prompts that run at a time; when one finishes, the next joins.")
    ] = 8
    processes: Annotated[int, _job(min=1, help="Number of processes.")] = 1


@dataclass(frozen=True)
class Asking:
    """How prompts become tokens, and what bounds the texts behind them."""

    chat: Annotated[
        bool,
        _text(
            "--chat",
            help="Each prompt is a user's message in the checkpoint's chat template, and the text "
            "is the reply.",
        ),
    ] = False
    system: System = None
    json_schema: Annotated[
        str | None,
        _text(
            metavar="SCHEMA",
            help="The text is JSON that fits this schema: JSON, or the path of a file with it. "
            "Needs xgrammar.",
        ),
    ] = None

    def check(self, source: Source) -> None:
        """Refuse what the checkpoint or this installation cannot do, before weights are loaded."""
        if self.json_schema is not None and find_spec("xgrammar") is None:
            raise ImportError(
                "--json-schema needs the package xgrammar: pip install 'selfspec[structured]'"
            )
        if self.chat and not source.tokenizer.chat_template:
            raise ValueError("--chat needs a chat template, and the tokenizer has none")

    def encode(self, tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
        """Token ids of a prompt."""
        if not self.chat:
            return tokenizer(prompt).input_ids
        from selfspec.apps.chat_templates import encode_turns, first_turn

        return encode_turns(tokenizer, first_turn(prompt, self.system))

    def bounds(self, target: Loaded) -> Callable[[], Options]:
        """Makes the options of `generate` with which one call ends with its turn, in the schema."""
        stops: Options = {}
        if self.chat:
            from selfspec.apps.chat_templates import turn_stops

            stops = turn_stops(target.spec, target.tokenizer)
        if self.json_schema is None:
            return lambda: stops
        size, tokenizer = target.spec.config.vocab_size, target.tokenizer
        make = json_processors(size, tokenizer, self.json_schema, stops.get("eos_token_id"))
        return lambda: {**stops, "logits_processor": [make()]}


def json_processors(
    vocab_size: int,
    tokenizer: PreTrainedTokenizerBase,
    schema: str,
    stop_ids: list[int] | None = None,
) -> Callable[[], Any]:
    """Makes a logits processor per call, with which it writes JSON of a schema, by xgrammar."""
    import xgrammar.contrib.hf  # pyright: ignore[reportMissingImports]

    vocabulary = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=stop_ids
    )
    try:
        # With any white space allowed, a small model may write nothing else.
        grammar = xgrammar.GrammarCompiler(vocabulary).compile_json_schema(
            schema, any_whitespace=False
        )
    except RuntimeError as error:
        raise ValueError(f"xgrammar does not understand the schema: {error}") from None
    return partial(xgrammar.contrib.hf.LogitsProcessor, grammar)


@command
def generate(
    console: Reporter,
    source: Source,
    drafting: Drafting,
    writing: Writing,
    asking: Asking,
    job: Job,
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; - reads stdin.", show_default="stdin")
    ] = None,
    file: Prompts = None,
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="text: the continuation. jsonl: an object per prompt. trace: the continuation "
            "with accepted, corrected and bonus tokens marked. svg: the same as a picture.",
        ),
    ] = "text",
) -> None:
    """Continue prompts by self-speculation; the output is that of the model's own decoding."""
    if prompt is not None and file is not None:
        raise typer.BadParameter("give a prompt or --file, not both")
    if (job.prompts is None) != (job.output is None) or (job.output and (prompt or file)):
        raise typer.BadParameter("a job has --prompts and --output, and no other prompt")
    if asking.system is not None and not asking.chat:
        raise typer.BadParameter("--system is a message of a chat; give --chat, too")
    if asking.json_schema is not None:
        asking = replace(asking, json_schema=_read_schema(asking.json_schema))
    if job.output is not None and form != "text":
        raise typer.BadParameter(f"a job writes its own format; leave out --format {form}")
    prompts = read_prompts(prompt, job.prompts or file)
    if form == "svg" and len(prompts) > 1:
        raise typer.BadParameter(f"--format svg draws one prompt, got {len(prompts)}")
    asking.check(source)
    if job.output is not None:
        answers = _Answers(source, asking, drafting.chosen, writing, job.batch_size)
        return _run_job(answers, prompts, job.output, job.processes, console)
    target, draft, options = begin(source, drafting, writing)
    if target.tokenizer.chat_template and not asking.chat:
        note("the checkpoint has a chat template: --chat puts the prompt into it")
    bounds = asking.bounds(target)
    results: list[JsonObject] = []
    for text in prompts:
        tokens = asking.encode(target.tokenizer, text)
        more = {**options, "draft": draft, **bounds()}
        results.append(_continue(target, text, tokens, more, writing.seed, form, console))
    chosen = {"generation_config": own_choices(target.spec), "draft": draft.model_dump()}
    console.answer({**target.to_dict(), **chosen, "results": results})


def _read_schema(given: str) -> str:
    """A JSON schema, given as it is or as the path of its file; ValueError if it is no object."""
    from selfspec.config import read_text

    is_text = given.lstrip().startswith("{")
    if not is_text and not Path(given).is_file():
        raise FileNotFoundError(f"no schema at {given}; give JSON, or the path of a file with it")
    text = given if is_text else read_text(Path(given))
    try:
        schema = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the schema is not JSON ({error}), got {text[:80]!r}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"a schema is a JSON object, got {text[:80]!r}")
    return text


def _continue(
    target: Loaded,
    prompt: str,
    tokens: list[int],
    options: Options,
    seed: int,
    form: Format,
    console: Console,
) -> JsonObject:
    """Continue one prompt, show the output, and return the result for JSON."""
    import torch
    from transformers import TextStreamer

    spec, tokenizer = target.spec, target.tokenizer
    device, streamer = spec.decoder.device, None
    ids = torch.tensor([tokens], dtype=torch.long, device=device)
    if form == "text" and not console.quiet:
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
        told = ("drafted", "accepted", "target")
        result["trace"] = [{name: getattr(r, name) for name in told} for r in trace.rows[0]]
    if console.quiet:
        return result
    from selfspec.apps.display.trace import pieces, trace_svg, write_piece

    if form == "jsonl":
        console.file.write(json.dumps(result, allow_nan=False) + "\n")
    elif form == "trace":
        for piece in pieces(trace, tokenizer):
            write_piece(console, piece)
        console.file.write("\n")
    elif form == "svg":
        title = (
            f"{stats.acceptance_rate:.0%} of the drafts accepted, "
            f"{stats.mean_accepted_length:.2f} tokens a round"
        )
        console.file.write(trace_svg(trace, tokenizer, prompt, title))
    if form != "jsonl":
        note(summary(stats))
    return result


@dataclass(frozen=True)
class _Answers:
    """Answers prompts of a job; each of its processes loads a target of its own."""

    source: Source
    asking: Asking
    draft: DraftConfig | None
    writing: Writing
    batch_size: int

    @property
    def identity(self) -> dict[str, str]:
        """What answers depend on; they are the same for any device and batch size."""
        place = vars(replace(self.source, device=None))
        facts = {**place, **vars(self.asking), **vars(self.writing), "draft": self.draft}
        return {name: str(value) for name, value in facts.items()}

    def __call__(
        self, worker: int, workers: int
    ) -> Callable[[Mapping[int, str]], Iterator[tuple[int, JsonObject]]]:
        """Make the function that answers prompts in process `worker` of `workers`."""
        import torch

        source = self.source
        if source.device is None and torch.cuda.is_available():
            source = replace(source, device=f"cuda:{worker % torch.cuda.device_count()}")
        if workers > 1:
            torch.set_num_threads(max(1, torch.get_num_threads() // workers))
        target = source.load()
        if not worker:
            show_choices(target.spec, self.writing.options)
        return partial(self._answer, target)

    def _answer(
        self, target: Loaded, prompts: Mapping[int, str]
    ) -> Iterator[tuple[int, JsonObject]]:
        """The rows' answers, as they are finished."""
        rows, texts = list(prompts), list(prompts.values())
        outputs = target.spec.generate_batch_iter(
            (self.asking.encode(target.tokenizer, text) for text in texts),
            draft=self.draft,
            batch_size=self.batch_size,
            seed=[self.writing.seed + row for row in rows],
            **self.writing.options,
            **self.asking.bounds(target)(),
        )
        with target.spec.decoder:  # nothing else uses the model between answers
            for output in outputs:
                text = target.tokenizer.decode(output.generated_tokens, skip_special_tokens=True)
                stats = output.stats.counted()
                answer = {"prompt": texts[output.number], "text": text, "stats": stats}
                failed = {} if output.error is None else {"error": output.error}
                yield rows[output.number], answer | failed


def _run_job(
    answers: _Answers, prompts: list[str], output: Path, processes: int, console: Reporter
) -> None:
    """Answer all prompts into `output`."""
    from selfspec.generation.jobs import run_job
    from selfspec.heads.files import read_lines

    done = 0
    with progress_bar() as show:

        def advance(more: int) -> None:
            nonlocal done
            done += more
            show("prompts", done, len(prompts))

        run_job(prompts, answers, output, answers.identity, processes, advance)
    failed = sum("error" in answer for answer in read_lines(output))
    of_these = f", {failed} of them errors" if failed else ""
    console.print(f"{output}: {len(prompts)} answers{of_these}")
    console.answer({"output": str(output), "answers": len(prompts), "errors": failed})
