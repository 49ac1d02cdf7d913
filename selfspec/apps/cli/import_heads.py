"""`selfspec import`: heads of others that are not stored as safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from selfspec.apps.cli.common import Reporter, command
from selfspec.apps.cli.examples import examples

import_ = typer.Typer(no_args_is_help=True, help="Convert published heads to safetensors.")


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
    from selfspec.apps.export import check_free
    from selfspec.heads.formats.files import convert

    check_free(out)
    weights = convert(folder, out)
    console.print(f"{weights}: load it with heads={str(out)!r}, or --heads {out}")
    console.answer({"folder": str(out), "weights": str(weights)})
