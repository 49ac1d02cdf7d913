"""`selfspec demo`: plain decoding and self-speculation side by side."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from selfspec.cli import options as opt
from selfspec.cli.common import Loaded, load, print_json, progress, reporting

if TYPE_CHECKING:
    from selfspec.config import DraftConfig
    from selfspec.display.demo import DemoResult, Writer


class Domain(str, Enum):
    """What a passage in the package is."""

    prose = "prose"
    code = "code"
    maths = "maths"


# Drafters with one fixed exit.
_AT_ONE_EXIT = ("early_exit", "tree")

ROWS = (
    ("tokens/s", "tokens_per_second", "{:.1f}"),
    ("speedup", "speedup", "{:.2f}x"),
    ("acceptance rate", "acceptance_rate", "{:.3f}"),
    ("of first drafts", "first_draft_acceptance", "{:.3f}"),
    ("mean accepted length", "mean_accepted_length", "{:.2f}"),
    ("time in shallow layers", "time_shallow", "{:.1%}"),
    ("time in deep layers", "time_deep", "{:.1%}"),
    ("time in heads", "time_head", "{:.1%}"),
    ("time in sampling", "time_sampling", "{:.1%}"),
    ("time in the rest", "time_rest", "{:.1%}"),
)


def demo(
    model: opt.Model = None,
    heads: opt.Heads = None,
    dtype: opt.DtypeOption = opt.Dtype.auto,
    device: opt.Device = None,
    kernels: opt.KernelsOption = opt.Kernels.eager,
    config: opt.Config = None,
    draft: opt.Draft = None,
    profile: opt.Profile = None,
    prompt: Annotated[
        str | None,
        typer.Option(help="Text to continue.", show_default="a held-out passage"),
    ] = None,
    domain: Annotated[
        Domain, typer.Option(help="Domain of the passage; --seed chooses one.")
    ] = Domain.prose,
    max_new_tokens: opt.MaxNewTokens = 128,
    temperature: opt.Temperature = 0.0,
    no_repeat_ngram: Annotated[
        int, typer.Option(min=0, help="Generate no n-gram of this size twice; 0 allows it.")
    ] = 0,
    seed: opt.Seed = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each.")] = 3,
    as_json: opt.AsJson = False,
) -> None:
    """Generate with plain decoding and with self-speculation, and compare outputs and speed."""
    from selfspec.display.demo import DemoOptions, Writer

    drafting = opt.draft_config(config, draft)
    with reporting(as_json) as console:
        target = load(model, heads, dtype, device, profile, kernels)
        options = DemoOptions(
            draft=_filled_in(target, drafting or target.spec.default_draft),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            no_repeat_ngram_size=no_repeat_ngram,
            seed=seed,
            repeats=repeats,
        )
        passage, source = _passage(prompt, domain, seed)
        writer = Writer(target.spec, target.tokenizer, passage, options)
        head = {**target.to_dict(), "options": options.model_dump(), "prompt": passage}
        console.print(_headline(head, source))
        figures, held = _show_demo(console, writer)
    if as_json:
        print_json({**head, **figures})
    if not held:
        raise typer.Exit(1)


def _filled_in(target: Loaded, draft: DraftConfig) -> DraftConfig:
    """The draft with the exit that will be used, if the drafter has one."""
    if draft.drafter not in _AT_ONE_EXIT:
        return draft
    head = target.spec.engine.head(draft)
    chosen = {"exit_layer": head.exit_layer, "head": head.kind}
    return draft.model_copy(update={**chosen, "num_draft_tokens": draft.most_tokens})


def _passage(prompt: str | None, domain: Domain, seed: int) -> tuple[str, str]:
    """The prompt and its source."""
    from selfspec.display.demo import load_prompts

    if prompt is not None:
        return prompt, "your prompt"
    passages = load_prompts(domain.value)
    passage = passages[seed % len(passages)]
    return passage.text, f"{passage.source}, held out of training"


def _headline(head: dict[str, Any], source: str) -> str:
    draft = head["options"]["draft"]
    strategy = draft["drafter"]
    if strategy in _AT_ONE_EXIT:
        strategy += f", exit after layer {draft['exit_layer']} ({draft['head']} head)"
        strategy += f", drafts a round: {draft['num_draft_tokens']}"
    return (
        f"{head['model']} · {head['layers']} layers · {head['dtype']} · {head['device']}, "
        f"threads: {head['threads']}\n{strategy}\nfrom {source}"
    )


def _show_demo(console: Console, writer: Writer) -> tuple[dict[str, Any], bool]:
    """Stream the output, then compare both outputs and their speed."""
    from selfspec.display import OriginStreamer, legend
    from selfspec.display.demo import run_demo, verdict

    streamer = None
    if not console.quiet:
        console.print(Rule())
        console.print(Text(writer.prompt, "dim"), end="", soft_wrap=True)
        streamer = OriginStreamer(console, writer.tokenizer)
    result = run_demo(writer, streamer, lambda: progress().status("timing"))
    console.print(Rule())
    said = verdict(len(result.plain[0].tokens), result.equal, result.exact, result.divergence)
    console.print(legend(console), said, sep="\n")
    console.print(demo_table(result), exits_table(result))
    return result.to_dict(), not (result.exact and not result.equal)


def demo_table(result: DemoResult) -> Table:
    """The demo's figures."""
    figures = result.figures()
    table = _table(len(result.plain))
    table.add_column()
    table.add_column("plain", justify="right")
    table.add_column("self-speculation", justify="right")
    for label, key, form in ROWS:
        plain = figures.get(f"plain_{key}")
        ours = form.format(figures[key])
        table.add_row(label, "" if plain is None else form.format(plain), ours)
    return table


def exits_table(result: DemoResult) -> Table:
    """How often each exit predicts the target's own token."""
    table = _table()
    for column in ("exit head", "after layer", "agrees with the target"):
        table.add_column(column, justify="left" if column == "exit head" else "right")
    for each in result.exits:
        table.add_row(each.head, str(each.exit_layer), f"{each.share:.3f}")
    table.caption = "on the passages in the package; `shared` needs no fitting"
    return table


def _table(runs: int | None = None) -> Table:
    caption = runs and f"medians of {runs} interleaved runs"
    return Table(caption=caption or None, caption_justify="left", box=box.SIMPLE_HEAD)
