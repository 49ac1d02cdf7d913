"""`selfspec export` and `selfspec import`: fitted heads for other programs, and theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec.apps.cli.common import Reporter, Source, command, in_units, resolve
from selfspec.apps.cli.examples import examples

if TYPE_CHECKING:  # which imports torch
    from selfspec.heads import ExitHead

_draft = partial(typer.Option, rich_help_panel="Draft")
_stored = partial(command, source=("model", "heads", "dtype"))

export = typer.Typer(
    no_args_is_help=True, help="Export exit heads for transformers, serving engines and the hub."
)

import_ = typer.Typer(no_args_is_help=True, help="Convert published heads to safetensors.")

Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.", show_default=False)]
NumDraftTokens = Annotated[
    int,
    _draft(
        "--num-draft-tokens", "-k", min=1, metavar="K", help="Drafts a round, in the launch lines."
    ),
]


@export.command("hf-draft", epilog=examples("export hf-draft"))
@_stored
def hf_draft(
    console: Reporter,
    out: Out,
    source: Source,
    exit_layer: Annotated[
        int | None,
        _draft(
            "--exit-layer",
            "-e",
            metavar="N",
            help="Layers below the exit that is folded.",
            show_default="the heads' own",
        ),
    ] = None,
    head: Annotated[
        str | None,
        _draft(
            help="Kind of the exit head: block, lora, lens or shared.",
            show_default="the one fitted at that exit",
        ),
    ] = None,
    num_draft_tokens: NumDraftTokens = 4,
) -> None:
    """Fold an exit into a standard checkpoint, a draft model for serving engines."""
    from selfspec.apps.export.draft_model import check_foldable, export_draft
    from selfspec.apps.export.guides import check_free
    from selfspec.config import DraftConfig

    check_free(out)
    target = replace(source, device="cpu").load()
    engine = target.spec.engine
    asked = {"exit_layer": exit_layer, "head": head}
    draft = DraftConfig.of({name: value for name, value in asked.items() if value is not None})
    chosen = engine.head(draft)
    check_foldable(chosen, engine.heads)
    exported = export_draft(
        engine.decoder,
        chosen,
        out,
        target=str(resolve(source.model)[1]),
        tokenizer=target.tokenizer,
        num_draft_tokens=num_draft_tokens,
    )
    what = (
        f"{exported.architecture}, {exported.layers} layers, "
        f"{in_units(exported.parameters)} parameters "
        f"({exported.head} head after layer {exported.exit_layer} of {target.name})"
    )
    _tell(console, out, what, exported)


@export.command("eagle3", epilog=examples("export eagle3"))
@_stored
def eagle3(
    console: Reporter, out: Out, source: Source, num_draft_tokens: NumDraftTokens = 4
) -> None:
    """Write an eagle3 head in the layouts of EAGLE and of speculators, for serving engines."""
    from selfspec.apps.export import export_eagle3
    from selfspec.heads import Eagle3Head

    write = partial(export_eagle3, num_draft_tokens=num_draft_tokens)
    _export_head(console, out, source, Eagle3Head, write)


@export.command("dflash", epilog=examples("export dflash"))
@_stored
def dflash(console: Reporter, out: Out, source: Source) -> None:
    """Write a dflash head in the layout of speculators, for vLLM."""
    from selfspec.apps.export import export_dflash
    from selfspec.heads import DFlashHead

    _export_head(console, out, source, DFlashHead, export_dflash)


def _export_head(
    console: Reporter,
    out: Path,
    source: Source,
    head_type: type[ExitHead],
    write: Callable[..., Any],
) -> None:
    """Write the target's head of a type in a published layout."""
    from selfspec.apps.export.guides import check_free

    check_free(out)
    name, path = resolve(source.model)
    engine = replace(source, device="cpu").load_spec().engine
    head = next((head for head in engine.heads if isinstance(head, head_type)), None)
    if head is None:
        have = ", ".join(head.kind for head in engine.heads) or "none"
        raise ValueError(
            f"there is no {head_type.kind} head here (heads: {have}); give the folder of one with "
            "--heads, or fit one: selfspec fit MODEL --text FILES "
            f"heads='[{{kind: {head_type.kind}, exit_layer: 0}}]'"
        )
    exported = write(engine.decoder, head, out, target=str(path))
    kind = getattr(exported, "algorithm", "EAGLE-3")
    what = f"{kind} head of {in_units(exported.parameters)} parameters for {name}"
    _tell(console, out, what, exported)


def _tell(console: Reporter, out: Path, what: str, exported: Any) -> None:
    """Say what was written, and where the lines are that launch it."""
    console.print(f"{out}: {what}; {out / 'README.md'} has the lines that launch it")
    console.answer({"folder": str(out), **asdict(exported)})


@export.command("custom-generate", epilog=examples("export custom-generate"))
@partial(command, source=("model", "heads"))
def custom_generate(
    console: Reporter,
    out: Out,
    source: Source,
    repo_id: Annotated[
        str | None, typer.Option(metavar="USER/NAME", help="Hub repository for the folder.")
    ] = None,
) -> None:
    """Make a folder for model.generate(custom_generate="OUT", trust_remote_code=True).

    The heads in --heads, or else those beside --model, are copied into the folder.
    """
    from selfspec.apps.export import export_custom_generate
    from selfspec.apps.export.guides import check_free

    check_free(out)
    has_target = source.model is not None or source.heads is not None
    spec = replace(source, device="cpu").load_spec() if has_target else None
    export_custom_generate(out, spec=spec, repo_id=repo_id)
    console.print(f'{out}: model.generate(custom_generate="{repo_id or out}", ...)')
    kinds = [[head.kind, head.exit_layer] for head in spec.heads] if spec else []
    console.answer({"folder": str(out), "repo_id": repo_id, "heads": kinds})


@import_.callback()
def _group() -> None:
    """Keeps `heads` a subcommand while it is the only one."""


@import_.command("heads", epilog=examples("import heads"))
@command
def import_heads(
    console: Reporter,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="config.json and a .bin, .pt or .pth file.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.")],
) -> None:
    """Convert a head whose weights are a pickle; load the result with --heads OUT.

    The pickle is loaded with torch.load(weights_only=True), which runs no code of the file.
    """
    from selfspec.apps.export.guides import check_free
    from selfspec.heads.formats.files import convert

    check_free(out)
    weights = convert(folder, out)
    console.print(f"{weights}: load it with heads={str(out)!r}, or --heads {out}")
    console.answer({"folder": str(out), "weights": str(weights)})
