"""`selfspec bench`: compares methods on one target in one run."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec.apps.cli.common import (
    Reporter,
    Source,
    command,
    in_units,
    progress_bar,
    quiet_transformers,
)

if TYPE_CHECKING:
    from selfspec.apps.bench import Bench, BenchConfig, Report
    from selfspec.apps.bench.run import Write


@command
def bench(
    console: Reporter,
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
            show_default="selfspec and transformers' own methods on the model in the package",
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME_OR_CONFIG",
            help="A published size with random weights instead of a model: its name, or the path "
            "of a config.json. Acceptance is planted. On a CPU this takes minutes.",
            show_default=False,
        ),
    ] = None,
    acceptance: Annotated[
        str | None,
        typer.Option(
            metavar="RATES",
            help="Acceptance rates to plant in a shape's drafts, such as 0.6,0.7,0.8.",
            show_default="0.7",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of runs and report; existing runs are kept.",
            show_default="outputs/bench, and outputs/bench-NAME for a shape",
        ),
    ] = None,
) -> None:
    """Compare methods on one target: speed, acceptance and equality of outputs, in one run."""
    from selfspec.apps.bench import BenchConfig
    from selfspec.apps.bench.results import NOTES
    from selfspec.config import load_config
    from selfspec.heads.files import one_run

    chosen = [] if shape is None else [f"shape={shape}"]
    chosen += [] if acceptance is None else [f"acceptance=[{acceptance}]"]
    wanted = load_config(BenchConfig, config, [*(fields or ()), *chosen])
    output = output or _folder(wanted.shape)
    with one_run(output):
        report = run_bench(wanted, output)
        written = report.write(output)
    console.print(*(grid.table(console.width) for grid in report.grids), *report.failures, sep="\n")
    console.print(NOTES)
    console.print(f"\nwritten to {output}: runs.jsonl, {', '.join(written)}")
    console.answer(report.to_dict())
    if report.failed:
        raise typer.Exit(1)


def _folder(shape: str | None) -> Path:
    """The default folder; shapes have one each, as a folder holds the runs of one benchmark."""
    if shape is None:
        return Path("outputs/bench")
    path = Path(shape).resolve()
    name = path.parent.name if path.name == "config.json" else path.name.removesuffix(".json")
    return Path(f"outputs/bench-{name}")


def run_bench(
    config: BenchConfig, output: Path, others: Mapping[str, Write] | None = None
) -> Report:
    """Make the missing runs, and report all.

    Args:
        config: the benchmark.
        output: the folder of the runs.
        others: functions that generate with other programs, by the names of their methods.
    """
    from selfspec.apps.bench import Report, RunFile, summarise

    bench, where = _made(config, others)
    config = bench.config
    identity = {"config": config.model_dump(mode="json"), "where": where}
    file = RunFile(output, identity)
    if len(file.runs) < bench.total:
        _announce(bench, len(file.runs))
    with progress_bar() as show:
        bench.run(file, show)
    facts = {
        "command": " ".join(["selfspec", *sys.argv[1:]]),
        **where,
        **bench.measured,
        "prompts": {name: _lengths(prompts) for name, prompts in bench.prompts.items()},
        "new tokens": config.max_new_tokens,
        "repeats": config.repeats,
        "batch sizes": list(config.batch_sizes),
    }
    return Report(facts, summarise(bench, file))


def _announce(bench: Bench, done: int) -> None:
    """Say on stderr how much there is to do."""
    decoder = bench.spec.decoder
    parameters = sum(parameter.numel() for parameter in decoder.causal_lm.parameters())
    is_slow = bench.config.shape is not None and decoder.device.type == "cpu"
    slow = "; on a CPU this takes minutes" * is_slow
    typer.echo(
        f"{in_units(parameters)} parameters on {decoder.device}: {bench.total - done} of "
        f"{bench.total} timed calls to make, each of up to {bench.config.max_new_tokens} new "
        f"tokens a row{slow}",
        err=True,
    )


def _made(config: BenchConfig, others: Mapping[str, Write] | None) -> tuple[Bench, dict[str, Any]]:
    """The benchmark, and the settings that its runs depend on."""
    from selfspec.apps.bench import Bench
    from selfspec.apps.bench.shapes import ShapeBench

    if config.threads is not None:
        import torch

        torch.set_num_threads(config.threads)
    if config.shape is not None:
        quiet_transformers()
        bench = ShapeBench(config)
        return bench, {**bench.facts, **_versions()}
    from selfspec.schedule.profile import device_name

    target = Source(
        config.target,
        config.heads,
        config.dtype,
        config.device,
        config.kernels,
        config.kv_cache_dtype,
        config.profile,
    ).load()
    draft = target.spec.default_draft.model_dump(mode="json", exclude_defaults=True)
    processor = device_name(target.spec.decoder.device)
    where = {**target.to_dict(), "processor": processor, **_versions(), "default draft": draft}
    return Bench(target.spec, target.tokenizer, config, others), where


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
