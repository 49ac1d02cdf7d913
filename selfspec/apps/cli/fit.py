"""`selfspec fit`, `measure` and `regenerate`: fit exit heads, and generate text to fit them to."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from selfspec.apps.cli.common import Reporter, command, in_units, quiet_transformers, resolve

if TYPE_CHECKING:
    from selfspec.apps.bench.forecast import Advice
    from selfspec.config import JsonObject


@dataclass(frozen=True)
class Given:
    """The keys of a config, by the command line and a file."""

    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [KEY=VALUE]...",
            help="Folder or Hugging Face id of a causal language model; and keys of the config, "
            "such as loop.steps=500, with YAML values.",
            show_default="the small model in the package",
        ),
    ] = None
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            "-t",
            metavar="FILES",
            help="Files of text, or of records with a `text` or a chat each (JSON lines, parquet, "
            "also compressed), or a quoted pattern such as 'texts/*.txt'; may be repeated.",
            show_default="for the model in the package, a novel",
        ),
    ] = None
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="DIR", help="Folder of the run.")
    ] = None
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML file with any of the config's keys.")
    ] = None

    def read(self) -> JsonObject:
        """The keys; those of the command line override the file's."""
        from selfspec.config import read_config

        model, keys = _split(self.words, "model")
        given = read_config(self.config, keys)
        if model is not None:
            given["target"] = str(resolve(model)[1])
        if self.text:
            given["data"] = [{"files": self.text}]
        return given if self.output is None else {**given, "output": self.output}


@command
def fit(
    console: Reporter,
    asked: Given,
    held_out: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILES",
            help="Text to measure on, which is never trained on; same formats as --text.",
            show_default="the last twentieth of the text",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Fit a head even if none is expected to pay here.")
    ] = False,
) -> None:
    """Fit an exit head to a frozen model, measure it on held-out text, and save it.

    The head is the one that is expected to be the fastest on this device, which is measured first.
    Steps and batch depend on the size of the text and the available memory; any key of the config
    can be set. The same command resumes a stopped run.
    """
    from selfspec.heads.files import check_free

    given = asked.read()
    if held_out:
        given["held_out"] = {"held out": {"files": held_out}}
    quiet_transformers()
    defaults = _training("exits.defaults")
    check_free(Path(given.get("output", defaults.OUTPUT)))  # before the text is read
    settings = defaults.complete(
        given,
        str(asked.config or "fit"),
        show=lambda advice: console.print(forecast_table(advice)),
        force=force,
    )
    checkpoints = _training("loop.checkpoint").Checkpoints(Path(settings.output))
    checkpoints.check_identity(settings.identity)  # before anything is printed
    head, loop = settings.heads[0], settings.loop
    console.print(
        f"{head.kind} head, exit {head.exit_layer}, for {settings.target}: {loop.steps} steps "
        f"of {loop.batch_size * settings.block_size:,} tokens; config in {settings.output}"
    )
    _training("fit_heads").fit(settings)
    console.answer(_result(settings))


_MEASURED = ("target", "data", "held_out", "measure")  # keys of a fit that measuring reads, too


@command
def measure(
    console: Reporter,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DIR] [KEY=VALUE]...",
            help="Folder of the fit; and keys of its config that are about the target, the text or "
            "the measurements, such as measure.prompts=16.",
            show_default="outputs/fit",
        ),
    ] = None,
) -> None:
    """Calibrate and measure fitted heads again, and write their report."""
    from selfspec.config import load_config

    folder, keys = _split(words, "folder")
    folder = Path(folder or "outputs/fit")
    if not (folder / "config.yaml").is_file():
        raise FileNotFoundError(f"no fit in {folder}; give the folder that selfspec fit wrote")
    config = _training("exits.fitting").FitConfig
    own = f"output={json.dumps(str(folder))}"  # quoted: YAML reads the name 2026 as a number
    settings = load_config(config, folder / "config.yaml", [own, *keys])
    for key in keys:
        if key.partition("=")[0].partition(".")[0] not in _MEASURED:
            raise ValueError(
                f"{key!r} is for the fit, and the heads are fitted; measuring reads "
                f"{', '.join(_MEASURED)}"
            )
    quiet_transformers()
    _training("measure_heads").measure_heads(settings)
    console.answer(_result(settings))


@command
def regenerate(console: Reporter, asked: Given) -> None:
    """Have a model continue prompts cut from a text, which makes the best text to fit heads to.

    The model drafts with its heads, if it has any. The same command resumes a stopped run.
    """
    from selfspec.config import parse

    module = _training("regenerate")
    given = {"output": "outputs/regenerated", **asked.read()}
    given.setdefault("data", _training("exits.defaults").default_text(given).get("data"))
    settings = parse(module.RegenerateConfig, given, str(asked.config or "regenerate"))
    quiet_transformers()
    console.answer({"texts": str(module.regenerate(settings))})


def forecast_table(advice: Advice) -> Table:
    """The best candidates, now and after an hour."""
    from selfspec.apps.bench.forecast import HOUR

    caption = f"run: after the {in_units(advice.tokens)} tokens of this run; hour: after an hour"
    if max(head.speedup for head in (*advice.now, *advice.then)) <= 1:
        caption += f"; with far more text {max(head.speedup for head in advice.most):.2f}x"
    title = "expected of a head here, over plain decoding"
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=0)
    told = ("head", "vocabulary", "in text", "draft")
    for name in (*told, "α, run", "speed", "tokens, hour", "α", "speed"):
        table.add_column(f" {name}", justify="right")
    for head, later in list(zip(advice.now, advice.then, strict=True))[:5]:
        size = f"{head.vocab_size:,}" if head.vocab_size else "all"
        told = (f"{head.kind} at {head.exit_layer}", size, f"{head.coverage:.0%}")
        run = (f"{head.cost:.2f}", f"{head.rates[0]:.2f}", f"{head.speedup:.2f}x")
        hour = (in_units(head.fit_rate * HOUR), f"{later.rates[0]:.2f}", f"{later.speedup:.2f}x")
        table.add_row(*told, *run, *hour)
    return table


def _split(words: list[str] | None, what: str) -> tuple[str | None, list[str]]:
    """Split words into the one without a value, if any, and keys with values."""
    names = [word for word in words or () if "=" not in word]
    if len(names) > 1:
        raise typer.BadParameter(
            f"give one {what}, got {', '.join(names)}; texts go behind a --text each, or in a "
            "quoted pattern: --text 'texts/*.txt'"
        )
    return next(iter(names), None), [word for word in words or () if "=" in word]


def _training(module: str) -> ModuleType:
    """Import a module of the training code, which in a wheel is inside the package."""
    if find_spec("selfspec.training"):
        return import_module(f"selfspec.training.{module}")
    own, found = Path(__file__).parents[3] / "training" / "__init__.py", find_spec("training")
    origin = found and found.origin
    if origin is None or Path(origin).resolve() != own.resolve():
        raise ImportError(
            f"Python finds {origin or 'nothing'} as the module `training`, expected {own}; start "
            "the command where no other `training` comes first on the path, and install selfspec "
            "from its checkout (pip install -e .)"
        )
    return import_module(f"training.{module}")


def _result(settings: Any) -> JsonObject:
    """The folder of the heads, the code that loads them, and the measurements."""
    report = json.loads((Path(settings.output) / "report.json").read_text(encoding="utf-8"))
    return {"heads": str(settings.folder), "code": settings.code, "domains": report["domains"]}
