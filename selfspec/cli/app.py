"""The commands under one name, and what an error looks like.

A command imports what is heavy (torch, transformers) when it runs, so `--help` is quick.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from selfspec import __version__
from selfspec.cli.bench import bench
from selfspec.cli.check import check
from selfspec.cli.demo import demo
from selfspec.cli.export import export
from selfspec.cli.generate import generate
from selfspec.cli.info import info
from selfspec.cli.tune import tuning

_INTERRUPTED = 130  # what shells give a process that Ctrl-C ended


class _Commands(TyperGroup):
    """Turns what a user can set right into one line on stderr and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.stderr.write("\n")
            raise typer.Exit(_INTERRUPTED) from None
        except BrokenPipeError:
            raise  # whoever read our output has gone: typer ends quietly
        except (ValueError, OSError, ImportError) as error:
            if ctx.params.get("debug"):
                raise
            message = " ".join(str(error).split()) or type(error).__name__
            Console(stderr=True, soft_wrap=True, highlight=False).print(
                f"selfspec: {message}", markup=False
            )
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(bench)
app.command()(check)
app.command()(demo)
app.command()(generate)
app.command()(info)
app.add_typer(tuning, name="tune")
app.add_typer(export, name="export")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"selfspec {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Self-speculative decoding: one model drafts for itself, its output unchanged."""


def main() -> None:
    """The `selfspec` command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal that cannot show a character gets a question mark, not a traceback.
            stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    app()
