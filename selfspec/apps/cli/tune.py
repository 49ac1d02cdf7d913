"""`selfspec tune`: finds the fastest draft on this device and writes a profile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from selfspec.apps.cli.common import (
    Reporter,
    Source,
    command,
    make_folder_of,
    progress_bar,
    read_prompts,
    resolve,
)

if TYPE_CHECKING:
    from selfspec.schedule.profile import Profile


@partial(command, source=("model", "heads", "dtype", "device", "kernels"))
def tune(
    console: Reporter,
    source: Source,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            "-t",
            metavar="FILE",
            help='Text similar to your prompts: plain, or JSON lines with a "prompt" each; may be '
            "repeated.",
            show_default="prose, code and maths in the package",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML file with keys of the tuning; --set overrides it."),
    ] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            "-s",
            metavar="KEY=VALUE",
            help="A key of the tuning: batch=4, temperature=1, exits=[2,4], …; may be repeated.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File to write the profile to.",
            show_default="beside the heads or the model, else the user's cache",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again what an earlier tuning has measured.")
    ] = False,
) -> None:
    """Find the fastest draft on this device, and write the profile that generate uses."""
    from selfspec.apps.bench.tune import TuneConfig
    from selfspec.apps.bench.tune import tune as measure
    from selfspec.config import load_config
    from selfspec.heads.files import one_run
    from selfspec.schedule.profile import default_path

    wanted = load_config(TuneConfig, config, fields or ())
    texts = [each for path in text or () for each in read_prompts(None, path)]
    target = source.load()
    output = output or default_path(target.spec.decoder, source.heads or resolve(source.model)[1])
    make_folder_of(output)
    folder = output.with_suffix(".work")
    with one_run(folder), _shown_parts() as show:
        if fresh:
            (folder / "runs.jsonl").unlink(missing_ok=True)
        profile = measure(target.spec, target.tokenizer, texts, wanted, folder, show)
        profile.save(output)
    _show(console, profile, output)
    console.answer({**target.to_dict(), "output": str(output), **profile.model_dump(mode="json")})


@contextmanager
def _shown_parts() -> Iterator[Callable[[str, int, int], None]]:
    """As `progress_bar`; where there is no terminal, every part begins with a line."""
    begun: set[str] = set()
    with progress_bar() as bar:

        def show(part: str, done: int, of: int) -> None:
            bar(part, done, of)
            if part not in begun and not sys.stderr.isatty():
                typer.echo(part, err=True)
            begun.add(part)

        yield show


def _show(console: Console, profile: Profile, output: Path) -> None:
    from selfspec.apps.bench.plots import write_picture
    from selfspec.apps.display import speedup_map, speedup_table, validation_table

    console.print(speedup_table(profile), validation_table(profile), sep="\n")
    for name, reason in profile.left_out.items():
        console.print(f"{name} was left out: {reason}")
    console.print(f"profile: {output}")
    picture = output.with_suffix(".png")
    try:
        write_picture(picture, "", partial(speedup_map, profile))
    except ImportError as error:
        console.print(f"the map as a picture: {error}")
    else:
        console.print(f"map: {picture}")
