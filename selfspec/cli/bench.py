"""`selfspec bench`: methods compared on one target in one run."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from selfspec.cli import options as opt
from selfspec.cli.load import Loaded, load
from selfspec.cli.output import print_json, progress, reporting

if TYPE_CHECKING:
    from selfspec.bench import BenchConfig, Progress, Report


def bench(
    fields: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Fields of the config, such as max_new_tokens=64 or target=path; YAML values.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML file with target, prompts, methods, settings.",
            show_default="the model in the package against its peers",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="Where runs and report go; runs there are kept.")
    ] = Path("outputs/bench"),
    as_json: opt.AsJson = False,
) -> None:
    """Compare methods on one target: speed, acceptance, equality of texts, in one run."""
    from selfspec.bench import NOTES, BenchConfig
    from selfspec.config import load_config

    wanted = load_config(BenchConfig, config, fields or ())
    with reporting(as_json) as console:
        report = run_bench(wanted, output)
        written = _write(report, output)
        console.print(*report.tables(), *report.failures, NOTES, sep="\n")
        console.print(f"\nwritten to {output}: {', '.join(written)}")
    if as_json:
        print_json(report.to_dict())
    if report.failed:
        raise typer.Exit(1)


def run_bench(config: BenchConfig, output: Path) -> Report:
    """Make the runs that are missing, and report all."""
    import torch

    from selfspec.bench import Bench, Report, RunFile, summarise

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    dtype = opt.Dtype(config.dtype)
    target = load(config.target, config.heads, dtype, config.device, config.profile)
    where = {
        **target.to_dict(),
        "gpu": _gpu(target),
        **_versions(),
        "default draft": target.spec.default_draft.model_dump(mode="json", exclude_defaults=True),
    }
    bench = Bench(target.spec, target.tokenizer, config)
    file = RunFile(output, {"config": config.model_dump(mode="json"), "where": where})
    with _bar() as show:
        bench.run(file, show)
    lengths = {name: _lengths(prompts) for name, prompts in bench.prompts.items()}
    head = {
        "command": " ".join(["selfspec", *sys.argv[1:]]),
        **where,
        "machine": f"{platform.machine()}, {platform.system()}",
        "prompts": lengths,
        "new tokens": config.max_new_tokens,
        "repeats": config.repeats,
    }
    return Report(head, summarise(bench, file))


def _write(report: Report, output: Path) -> list[str]:
    """Write the report and its plots; returns the names of the files."""
    from selfspec.bench import write_plots

    report.write(output)
    names = ["results.md", "results.json", "runs.jsonl"]
    try:
        return names + [path.name for path in write_plots(report.rows, output)]
    except ImportError as error:
        return [*names, f"no plots ({error})"]


def _lengths(prompts: list[Any]) -> str:
    widths = [prompt.shape[1] for prompt in prompts]
    return f"{len(widths)} of {min(widths)} to {max(widths)} tokens"


def _gpu(target: Loaded) -> str | None:
    import torch

    device = target.spec.engine.decoder.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def _versions() -> dict[str, str]:
    import torch
    import transformers

    from selfspec import __version__

    return {
        "selfspec": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }


@contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    """A progress bar on stderr, where that is a terminal."""
    console = progress()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Bar(*columns, TimeRemainingColumn(), console=console, disable=console.quiet)
    with bar:
        task = bar.add_task("", total=None)
        yield lambda at: bar.update(task, completed=at.done, total=at.total, description=at.doing)
