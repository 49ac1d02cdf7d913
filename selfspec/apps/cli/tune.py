"""`selfspec tune`: finds the fastest draft on this device and writes a profile."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from selfspec.apps.cli import options as opt
from selfspec.apps.cli.common import (
    Loaded,
    Source,
    make_folder_of,
    print_json,
    progress_bar,
    read_prompts,
    reporting,
    resolve,
)

if TYPE_CHECKING:
    from selfspec.schedule.profile import Profile

Texts = Annotated[
    list[Path] | None,
    typer.Option(
        "--text",
        "-t",
        metavar="FILE",
        help='Text similar to your prompts: plain, or JSON lines with a "prompt" each; may be '
        "repeated.",
        show_default="prose, code and maths in the package",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="YAML file with keys of the tuning; --set overrides it."),
]
Fields = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="A key of the tuning: batch=4, temperature=1, exits=[2,4], …; may be repeated.",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="File to write the profile to.",
        show_default="beside the heads or the model, else the user's cache",
    ),
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Measure again what an earlier tuning has measured.")
]


def tune(
    model: opt.Model = None,
    heads: opt.Heads = None,
    dtype: opt.DtypeOption = "auto",
    device: opt.Device = None,
    kernels: opt.KernelsOption = "auto",
    text: Texts = None,
    config: ConfigFile = None,
    fields: Fields = None,
    output: Output = None,
    fresh: Fresh = False,
    as_json: opt.AsJson = False,
) -> None:
    """Find the fastest draft on this device, and write the profile that generate uses."""
    from selfspec.apps.bench.tune import TuneConfig
    from selfspec.config import load_config
    from selfspec.heads.files import one_run

    wanted = load_config(TuneConfig, config, fields or ())
    texts = read_texts(text)
    with reporting(as_json) as console:
        target = Source(model, heads, dtype, device, kernels=kernels).load()
        output = output or _output(target, model, heads)
        make_folder_of(output)
        folder = output.with_suffix(".work")
        with one_run(folder):
            work = folder / "runs.jsonl"
            if fresh:
                work.unlink(missing_ok=True)
            profile = _tuned(target, texts, wanted, work)
            profile.save(output)
            _show(console, profile, output)
    if as_json:
        print_json({**target.to_dict(), "output": str(output), **profile.model_dump(mode="json")})


def read_texts(files: Sequence[Path] | None) -> list[str]:
    """The texts in some files, none if there are none.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file is empty, or a line is not a JSON object with a prompt.
    """
    return [text for file in files or () for text in read_prompts(None, file)]


def _output(target: Loaded, model: str | None, heads: str | None) -> Path:
    from selfspec.schedule.profile import default_path

    return default_path(target.spec.decoder, heads or resolve(model)[1])


def _tuned(target: Loaded, texts: Sequence[str], config: Any, work: Path) -> Profile:
    from selfspec.apps.bench.tune import tune as measure

    lines = Console(stderr=True, highlight=False, soft_wrap=True)
    with progress_bar() as bar:

        def show(part: str, done: int, of: int) -> None:
            bar(part, done, of)
            if not done and not lines.is_terminal:
                lines.print(part, markup=False)

        return measure(target.spec, target.tokenizer, texts, config, work, show)


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
