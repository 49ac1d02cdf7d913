"""`selfspec export`: fitted heads for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from selfspec.apps.cli import options as opt
from selfspec.apps.cli.common import Source, in_units, print_json, reporting, resolve
from selfspec.apps.cli.examples import examples

if TYPE_CHECKING:  # which imports torch
    from selfspec.drafters.engine import Engine
    from selfspec.heads import ExitHead

HeadT = TypeVar("HeadT", bound="ExitHead")

export = typer.Typer(
    no_args_is_help=True, help="Export exit heads for transformers, serving engines and the hub."
)

Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.", show_default=False)]
ExitLayer = Annotated[
    int | None,
    typer.Option(
        "--exit-layer",
        "-e",
        metavar="N",
        help="Layers below the exit that is folded.",
        show_default="the heads' own",
        rich_help_panel="Draft",
    ),
]
HeadKind = Annotated[
    str | None,
    typer.Option(
        "--head",
        help="Kind of the exit head: block, lora, lens or shared.",
        show_default="the one fitted at that exit",
        rich_help_panel="Draft",
    ),
]
NumDraftTokens = Annotated[
    int,
    typer.Option(
        "--num-draft-tokens",
        "-k",
        min=1,
        metavar="K",
        help="Drafts a round, in the launch lines.",
        rich_help_panel="Draft",
    ),
]


@export.command("hf-draft", epilog=examples("export hf-draft"))
def hf_draft(
    out: Out,
    model: opt.Model = None,
    heads: opt.Heads = None,
    dtype: opt.DtypeOption = "auto",
    exit_layer: ExitLayer = None,
    head: HeadKind = None,
    num_draft_tokens: NumDraftTokens = 4,
    as_json: opt.AsJson = False,
) -> None:
    """Fold an exit into a standard checkpoint, a draft model for serving engines."""
    from dataclasses import asdict

    from selfspec.apps.export import check_foldable, check_free, export_draft
    from selfspec.config import DraftConfig

    with reporting(as_json) as console:
        check_free(out)
        target = Source(model, heads, dtype, "cpu").load()
        engine = target.spec.engine
        asked = {"exit_layer": exit_layer, "head": head}
        draft = DraftConfig.of({name: value for name, value in asked.items() if value is not None})
        chosen = engine.head(draft)
        check_foldable(chosen, engine.heads)
        exported = export_draft(
            engine.decoder,
            chosen,
            out,
            target=str(resolve(model)[1]),
            tokenizer=target.tokenizer,
            num_draft_tokens=num_draft_tokens,
        )
        console.print(
            f"{out}: {exported.architecture}, {exported.layers} layers, "
            f"{in_units(exported.parameters)} parameters "
            f"({exported.head} head after layer {exported.exit_layer} of {target.name}); "
            f"{out / 'README.md'} has the lines that launch it"
        )
    if as_json:
        print_json({"folder": str(out), **asdict(exported)})


@export.command("eagle3", epilog=examples("export eagle3"))
def eagle3(
    out: Out,
    model: opt.Model = None,
    heads: opt.Heads = None,
    dtype: opt.DtypeOption = "auto",
    num_draft_tokens: NumDraftTokens = 4,
    as_json: opt.AsJson = False,
) -> None:
    """Write an eagle3 head in the layouts of EAGLE and of speculators, for serving engines."""
    from dataclasses import asdict

    from selfspec.apps.export import check_free, export_eagle3
    from selfspec.heads import Eagle3Head

    with reporting(as_json) as console:
        check_free(out)
        engine = Source(model, heads, dtype, "cpu").load_spec().engine
        head = _head_of(engine, Eagle3Head)
        name, path = resolve(model)
        exported = export_eagle3(
            engine.decoder, head, out, target=str(path), num_draft_tokens=num_draft_tokens
        )
        console.print(
            f"{out}: an EAGLE-3 head of {in_units(exported.parameters)} parameters for {name}; "
            f"{out / 'README.md'} has the lines that launch it"
        )
    if as_json:
        print_json({"folder": str(out), **asdict(exported)})


@export.command("dflash", epilog=examples("export dflash"))
def dflash(
    out: Out,
    model: opt.Model = None,
    heads: opt.Heads = None,
    dtype: opt.DtypeOption = "auto",
    as_json: opt.AsJson = False,
) -> None:
    """Write a dflash head in the layout of speculators, for vLLM."""
    from dataclasses import asdict

    from selfspec.apps.export import check_free, export_dflash
    from selfspec.heads import DFlashHead

    with reporting(as_json) as console:
        check_free(out)
        engine = Source(model, heads, dtype, "cpu").load_spec().engine
        head = _head_of(engine, DFlashHead)
        name, path = resolve(model)
        exported = export_dflash(engine.decoder, head, out, target=str(path))
        console.print(
            f"{out}: a {exported.algorithm} head of {in_units(exported.parameters)} parameters for "
            f"{name}; {out / 'README.md'} has the lines that launch it"
        )
    if as_json:
        print_json({"folder": str(out), **asdict(exported)})


def _head_of(engine: Engine, head_type: type[HeadT]) -> HeadT:
    """The engine's head of a kind; ValueError says how to get one."""
    for head in engine.heads:
        if isinstance(head, head_type):
            return head
    have = ", ".join(head.kind for head in engine.heads) or "none"
    raise ValueError(
        f"there is no {head_type.kind} head here (heads: {have}); give the folder of one with "
        "--heads, or fit one: selfspec fit MODEL --text FILES "
        f"heads='[{{kind: {head_type.kind}, exit_layer: 0}}]'"
    )


@export.command("custom-generate", epilog=examples("export custom-generate"))
def custom_generate(
    out: Out,
    model: opt.Model = None,
    heads: opt.Heads = None,
    repo_id: Annotated[
        str | None,
        typer.Option(metavar="USER/NAME", help="Hub repository for the folder."),
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Make a folder for model.generate(custom_generate="OUT", trust_remote_code=True).

    The heads in --heads, or else those beside --model, are copied into the folder.
    """
    from selfspec.apps.export import check_free, export_custom_generate

    with reporting(as_json) as console:
        check_free(out)
        has_target = model is not None or heads is not None
        spec = Source(model, heads, device="cpu").load_spec() if has_target else None
        export_custom_generate(out, spec=spec, repo_id=repo_id)
        console.print(f'{out}: model.generate(custom_generate="{repo_id or out}", ...)')
    if as_json:
        kinds = [[head.kind, head.exit_layer] for head in spec.heads] if spec else []
        print_json({"folder": str(out), "repo_id": repo_id, "heads": kinds})
