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
    from rich.console import Console

    from selfspec.bench import Bench as Benchmark
    from selfspec.bench import BenchConfig, Findings, Limits, Progress, Report, RunFile

Say = Callable[["Progress"], None]


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
            help="YAML file with target, prompts, methods, modes, batch_sizes.",
            show_default="the model in the package against its peers",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="Where runs and report go; runs there are kept.")
    ] = Path("outputs/bench"),
    limit: Annotated[
        bool, typer.Option("--limit", help="Say also what this device allows, and an oracle.")
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Measure memory instead: peak, and growth.")
    ] = False,
    scaling: Annotated[
        bool,
        typer.Option(
            "--scaling",
            help="Measure instead how a round's cost grows with batch, context and depth, on "
            "random tiny models.",
        ),
    ] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Compare methods on one target: speed, acceptance, equality of texts, in one run."""
    from selfspec.bench import BenchConfig
    from selfspec.config import load_config

    if limit + memory + scaling > 1:
        raise ValueError("--limit, --memory and --scaling are measurements of their own; give one")
    wanted, failed = load_config(BenchConfig, config, fields or ()), False
    with reporting(as_json) as console:
        if memory or scaling:
            found = (run_memory if memory else run_scaling)(wanted, output, console)
        else:
            found, failed = run_methods(wanted, output, limit, console)
    if as_json:
        print_json(found)
    if failed:
        raise typer.Exit(1)


def run_methods(
    config: BenchConfig, output: Path, limit: bool, console: Console
) -> tuple[dict[str, Any], bool]:
    """Compare methods; returns the report's values, and whether texts differ that must not."""
    report = run_bench(config, output, limit)
    written = [*report.write(output), "runs.jsonl", *_pictures(report, output)]
    console.print(*(grid.table() for grid in report.grids), *report.failures, sep="\n")
    console.print(report.notes)
    console.print(f"\nwritten to {output}: {', '.join(written)}")
    return report.to_dict(), report.failed


def run_bench(config: BenchConfig, output: Path, limit: bool = False) -> Report:
    """Make the runs that are missing, and report all."""
    from selfspec.bench import Bench, Report, RunFile, check_limits, summarise

    target, head = _loaded(config)
    bench = Bench(target.spec, target.tokenizer, config)
    if limit:
        check_limits(bench)
    draft = target.spec.default_draft.model_dump(mode="json", exclude_defaults=True)
    where = {**head, "default draft": draft}
    identity = {"config": config.model_dump(mode="json"), "where": where}
    file = RunFile(output, identity)
    with _bar() as show:
        bench.run(file, show)
        limits = _limits(bench, file, identity, show) if limit else None
    facts = {
        "command": " ".join(["selfspec", *sys.argv[1:]]),
        **where,
        "prompts": {name: _lengths(prompts) for name, prompts in bench.prompts.items()},
        "new tokens": config.max_new_tokens,
        "repeats": config.repeats,
        "batch sizes": list(config.batch_sizes),
    }
    return Report(facts, summarise(bench, file), limits)


def _limits(bench: Benchmark, file: RunFile, identity: dict[str, Any], show: Say) -> Limits:
    from selfspec.bench import Progress, measure_limits
    from selfspec.bench.tune.work import WorkFile

    work = WorkFile(file.folder / "work.jsonl", identity)
    return measure_limits(bench, file, work, lambda part: show(Progress(0, 1, part)))


def run_memory(config: BenchConfig, output: Path, console: Console) -> dict[str, Any]:
    """Measure peak memory of the target, and growth of a tiny one; returns the values."""
    from selfspec.bench import Progress, measure_memory

    target, head = _loaded(config)
    with _bar() as show:
        found = measure_memory(target.spec, say=lambda part: show(Progress(0, 1, part)))
    return _written(output, "memory", "Memory", head, found, found.plots, console)


def run_scaling(config: BenchConfig, output: Path, console: Console) -> dict[str, Any]:
    """Measure how a round's cost grows; returns the values."""
    import torch

    from selfspec.bench import Progress, measure_scaling
    from selfspec.bench.tune.work import WorkFile
    from selfspec.schedule.profile import device_name

    _set_threads(config)
    device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    head = {"device": device_name(device), "threads": torch.get_num_threads(), **_versions()}
    work = WorkFile(output / "work.jsonl", head)
    with _bar() as show:
        say: Any = lambda part, done, of: show(Progress(done, of, part))  # noqa: E731
        found = measure_scaling(work, device, say=say)
    return _written(output, "scaling", "Scaling", head, found, found.plots, console)


def _written(
    output: Path,
    name: str,
    title: str,
    head: dict[str, Any],
    found: Findings,
    plots: Callable[[Path], list[Path]],
    console: Console,
) -> dict[str, Any]:
    """Write and show what was found."""
    from selfspec.bench import write_findings

    output.mkdir(parents=True, exist_ok=True)
    head = {"command": " ".join(["selfspec", *sys.argv[1:]]), **head}
    written = write_findings(output, name, title, head, found)
    written += _drawn(plots, output)
    console.print(*(grid.table() for grid in found.grids), found.notes, sep="\n")
    console.print(f"\nwritten to {output}: {', '.join(written)}")
    return {**head, **found.to_dict()}


def _pictures(report: Report, output: Path) -> list[str]:
    from selfspec.bench import write_plots

    return _drawn(lambda folder: write_plots(report.rows, folder, report.limits), output)


def _drawn(plots: Callable[[Path], list[Path]], output: Path) -> list[str]:
    """Names of the pictures, or why there are none."""
    try:
        return [path.name for path in plots(output)]
    except ImportError as error:
        return [f"no plots ({error})"]


def _loaded(config: BenchConfig) -> tuple[Loaded, dict[str, Any]]:
    """The target, and what runs where."""
    from selfspec.schedule.profile import device_name

    _set_threads(config)
    dtype = opt.Dtype(config.dtype)
    kernels, kv_cache = opt.Kernels(config.kernels), opt.KVCache(config.kv_cache_dtype)
    place = config.heads, dtype, config.device, config.profile
    target = load(config.target, *place, kernels=kernels, kv_cache=kv_cache)
    processor = device_name(target.spec.engine.decoder.device)
    return target, {**target.to_dict(), "processor": processor, **_versions()}


def _set_threads(config: BenchConfig) -> None:
    import torch

    if config.threads is not None:
        torch.set_num_threads(config.threads)


def _lengths(prompts: list[Any]) -> str:
    widths = [len(prompt) for prompt in prompts]
    return f"{len(widths)} of {min(widths)} to {max(widths)} tokens"


def _versions() -> dict[str, str]:
    import torch
    import transformers

    from selfspec import __version__

    return {
        "selfspec": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "machine": f"{platform.machine()}, {platform.system()}",
    }


@contextmanager
def _bar() -> Iterator[Say]:
    """A progress bar on stderr, where that is a terminal."""
    console = progress()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Bar(*columns, TimeRemainingColumn(), console=console, disable=console.quiet)
    with bar:
        task = bar.add_task("", total=None)
        yield lambda at: bar.update(task, completed=at.done, total=at.total, description=at.doing)
