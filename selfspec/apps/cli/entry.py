"""The `selfspec` command: its subcommands, and how errors are printed.

Commands import torch and transformers when they run, so `--help` is fast.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from selfspec import __version__
from selfspec.apps.cli.bench import bench, check, tune
from selfspec.apps.cli.chat import chat
from selfspec.apps.cli.common import complain
from selfspec.apps.cli.demo import app, demo
from selfspec.apps.cli.examples import examples
from selfspec.apps.cli.export import export, import_
from selfspec.apps.cli.fit import fit, measure, regenerate
from selfspec.apps.cli.generate import generate
from selfspec.apps.cli.info import info

_EXPECTED = (ValueError, OSError, ImportError)
# The base class of click's usage errors; typer has moved it before.
_UsageError: Any = typer.BadParameter.__base__


class _Commands(TyperGroup):
    """Turns every error into one line on stderr and an exit code."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run; usage errors are one line on stderr and exit code 2."""
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        try:
            code = super().main(*args, standalone_mode=False, **extra)
        except _UsageError as error:
            code = _told_usage(error)
        sys.exit(code or 0)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; other errors are one line on stderr and exit code 1."""
        try:
            return super().invoke(ctx)
        except (_UsageError, typer.Exit, typer.Abort, BrokenPipeError):
            raise  # typer ends quietly if the reader of a pipe is gone
        except KeyboardInterrupt:
            sys.stderr.write("\n")
            raise typer.Exit(128 + signal.SIGINT) from None
        except Exception as error:
            if ctx.params.get("debug"):
                raise
            message, name = str(error), type(error).__name__
            if not isinstance(error, _EXPECTED):
                message = f"{name}: {message} (selfspec --debug shows where)"
            complain(message or name)
            raise typer.Exit(1) from None


def _told_usage(error: Any) -> int:
    """Print a usage error; returns the exit code."""
    from pydantic import ValidationError

    from selfspec.config import given_value

    message = error.format_message()
    if isinstance(error.__cause__, ValidationError):
        message = message.replace("Value error, ", "").rstrip(".")
        message += given_value(error.__cause__.errors()[0])
    if message:  # empty if the help was shown instead
        path = error.ctx.command_path if error.ctx else "selfspec"
        complain(f"{message.rstrip('.')}; see {path} --help")
    return error.exit_code


commands = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="markdown",  # so that paragraphs are filled
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (app, bench, chat, check, demo, fit, generate, info, measure, regenerate, tune):
    commands.command(epilog=examples(command.__name__))(command)
commands.add_typer(export, name="export")
commands.add_typer(import_, name="import")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"selfspec {__version__}")
        raise typer.Exit


@commands.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Self-speculative decoding: one model drafts for itself, and the output does not change.

    Exit code 0: success. 1: a check failed, or an error, which is one line on stderr. 2: wrong
    usage. 130: Ctrl-C.
    """


def main() -> None:
    """The `selfspec` command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal that cannot show a character gets a question mark, not a traceback.
            stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # bars of the libraries are for terminals
    commands()
