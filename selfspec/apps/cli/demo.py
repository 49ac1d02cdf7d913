"""`selfspec demo`: plain decoding and self-speculation side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from selfspec.apps.cli import options as opt
from selfspec.apps.cli.common import Loaded, Source, print_json, progress, reporting

if TYPE_CHECKING:
    from selfspec.apps.display.demo import Comparison, DemoPrompt, DemoResult, ExitAgreement
    from selfspec.config import DraftConfig


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
_COLUMNS = ("plain", "speculative")


def demo(
    model: opt.Model = None,
    heads: opt.Heads = None,
    dtype: opt.DtypeOption = "auto",
    device: opt.Device = None,
    kernels: opt.KernelsOption = "auto",
    config: opt.Config = None,
    draft: opt.Draft = None,
    profile: opt.Profile = None,
    prompt: Annotated[
        str | None,
        typer.Option(help="Text to continue.", show_default="a held-out passage"),
    ] = None,
    domain: Annotated[
        Domain | None,
        typer.Option(
            help="Domain of the passage; --seed chooses one.", show_default="prose, then code"
        ),
    ] = None,
    max_new_tokens: opt.MaxNewTokens = 128,
    temperature: opt.Temperature = 0.8,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Decode greedily: the same as --temperature 0.")
    ] = False,
    no_repeat_ngram: Annotated[
        int, typer.Option(min=0, help="Generate no n-gram of this size twice; 0 allows it.")
    ] = 0,
    seed: opt.Seed = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each.")] = 3,
    as_json: opt.AsJson = False,
) -> None:
    """Generate with plain decoding and with self-speculation, and compare outputs and speed.

    Sampling uses the rule `coupled`, with which a seed gives the same text with and without drafts,
    so that both can be compared token by token.
    """
    from selfspec.apps.display.demo import Comparison, DemoOptions, exit_agreements, load_prompts

    drafting = opt.draft_config(config, draft)
    with reporting(as_json) as console:
        target = Source(model, heads, dtype, device, profile, kernels).load()
        temperature = 0.0 if greedy else temperature
        drafting = drafting or target.spec.draft_for(sampled=temperature > 0)
        options = DemoOptions(
            draft=_filled_in(target, drafting),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            no_repeat_ngram_size=no_repeat_ngram,
            seed=seed,
            repeats=repeats,
        )
        head = {**target.to_dict(), "options": options.model_dump()}
        console.print(_headline(head))
        results: dict[str, DemoResult] = {}
        for name, passage in _passages(prompt, domain, seed).items():
            writer = Comparison(target.spec, target.tokenizer, passage.text, options)
            results[name] = _show_demo(console, writer, passage.source)
        exits = exit_agreements(target.spec, target.tokenizer, [p.text for p in load_prompts()])
        console.print(demo_table(results), exits_table(exits))
    if as_json:
        texts = {name: result.to_dict() for name, result in results.items()}
        print_json({**head, "texts": texts, "exits": [each._asdict() for each in exits]})
    if any(result.exact and not result.equal for result in results.values()):
        raise typer.Exit(1)


def _filled_in(target: Loaded, draft: DraftConfig) -> DraftConfig:
    """The draft, completed by the rule and, if the drafter has one, the exit."""
    if "rule" not in draft.model_fields_set:
        draft = draft.model_copy(update={"rule": "coupled"})
    if draft.drafter not in _AT_ONE_EXIT:
        return draft
    head = target.spec.engine.head(draft)
    chosen = {"exit_layer": head.exit_layer, "head": head.kind}
    return draft.model_copy(update={**chosen, "num_draft_tokens": draft.most_tokens})


def _passages(prompt: str | None, domain: Domain | None, seed: int) -> dict[str, DemoPrompt]:
    """The prompts, by name of their columns."""
    from selfspec.apps.display.demo import DemoPrompt, load_prompts

    if prompt is not None:
        return {"": DemoPrompt("prose", "your prompt", prompt)}
    found: dict[str, DemoPrompt] = {}
    chosen: tuple[Domain, ...] = (domain,) if domain else ("prose", "code")
    for each in chosen:
        passages = load_prompts(each)
        passage = passages[seed % len(passages)]
        found[each] = passage._replace(source=f"{passage.source}, held out of training")
    return found


def _headline(head: dict[str, Any]) -> str:
    options = head["options"]
    draft = options["draft"]
    strategy = draft["drafter"]
    if strategy in _AT_ONE_EXIT:
        strategy += f", exit after layer {draft['exit_layer']} ({draft['head']} head)"
        strategy += f", drafts a round: {draft['num_draft_tokens']}"
    choice = "greedy"
    if options["temperature"]:
        choice = f"sampled at temperature {options['temperature']:g} with seed {options['seed']}"
        choice += f", rule {draft['rule']}"
    return (
        f"{head['model']} · {head['layers']} layers · {head['dtype']} · {head['device']}, "
        f"threads: {head['threads']}\n{strategy}\n{choice}"
    )


def _show_demo(console: Console, writer: Comparison, source: str) -> DemoResult:
    """Stream the output, then compare both outputs and their speed."""
    from selfspec.apps.display import OriginStreamer, legend
    from selfspec.apps.display.demo import run_demo, verdict

    streamer = None
    if not console.quiet:
        console.print(Rule(source))
        console.print(Text(writer.prompt, "dim"), end="", soft_wrap=True)
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
    for name, column in ((name, column) for name in results for column in _COLUMNS):
        table.add_column(f"{name}\n{column}".strip(), justify="right")
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
