"""`selfspec bench`, `check` and `tune`: measure methods, test exactness, find the fastest draft."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from selfspec.apps.cli.common import (
    Loaded,
    Reporter,
    Source,
    command,
    in_units,
    make_folder_of,
    progress,
    progress_bar,
    quiet_transformers,
    read_prompts,
    resolve,
)
from selfspec.apps.cli.options import Drafting, MaxNewTokens, Prompts, Seed

if TYPE_CHECKING:
    from selfspec.apps.bench import CheckResult
    from selfspec.apps.bench.config import BenchConfig
    from selfspec.apps.bench.results import Report
    from selfspec.apps.bench.run import Bench, Write
    from selfspec.config import JsonObject
    from selfspec.schedule.profile import Profile


@dataclass(frozen=True)
class Compared:
    """What `selfspec bench` compares."""

    fields: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Fields of the config, such as max_new_tokens=64 or target=path; YAML values.",
            show_default=False,
        ),
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML file with target, prompts, methods, modes, batch_sizes.",
            show_default="selfspec and transformers' own methods on the model in the package",
        ),
    ] = None
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME_OR_CONFIG",
            help="A published size with random weights instead of a model: its name, or the path "
            "of a config.json. Acceptance is planted. On a CPU this takes minutes.",
            show_default=False,
        ),
    ] = None
    acceptance: Annotated[
        str | None,
        typer.Option(
            metavar="RATES",
            help="Acceptance rates to plant in a shape's drafts, such as 0.6,0.7,0.8.",
            show_default="0.7",
        ),
    ] = None

    def read(self) -> BenchConfig:
        """The whole config."""
        from selfspec.apps.bench.config import BenchConfig
        from selfspec.config import load_config

        chosen = [] if self.shape is None else [f"shape={json.dumps(self.shape)}"]
        chosen += [] if self.acceptance is None else [f"acceptance=[{self.acceptance}]"]
        return load_config(BenchConfig, self.config, [*(self.fields or ()), *chosen])


@command
def bench(
    console: Reporter,
    compared: Compared,
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
    from selfspec.apps.bench.results import NOTES
    from selfspec.heads.files import one_run

    wanted = compared.read()
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

    `others` generate with other programs, by the names of their methods.
    """
    from selfspec.apps.bench.results import Report, summarise
    from selfspec.apps.bench.run import RunFile, refuse_another

    identity: JsonObject = {"config": config.model_dump(mode="json")}
    refuse_another(output, identity)  # before the model is read
    bench, where = _made(config, others)
    config = bench.config
    file = RunFile(output, {**identity, "where": where})
    if left := bench.total - len(file.runs):
        device = bench.spec.decoder.device
        slow = config.shape is not None and device.type == "cpu"
        typer.echo(
            f"{in_units(bench.spec.causal_lm.num_parameters())} parameters on {device}: {left} of "
            f"{bench.total} timed calls to make, each of up to {config.max_new_tokens} new tokens "
            f"a row{'; on a CPU this takes minutes' if slow else ''}",
            err=True,
        )
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


def _made(config: BenchConfig, others: Mapping[str, Write] | None) -> tuple[Bench, JsonObject]:
    """The benchmark, and the settings that its runs depend on."""
    from selfspec.apps.bench.run import Bench
    from selfspec.apps.bench.shapes import ShapeBench

    if config.threads is not None:
        import torch

        torch.set_num_threads(config.threads)
    if config.shape is not None:
        quiet_transformers()
        bench = ShapeBench(config)
        return bench, {**bench.facts, **_versions()}
    from selfspec.schedule.profile import device_name

    names = ("target", "heads", "dtype", "device", "kernels", "kv_cache_dtype", "profile")
    target = Source(*(getattr(config, name) for name in names)).load()
    draft = target.spec.default_draft.model_dump(mode="json", exclude_defaults=True)
    processor = device_name(target.spec.decoder.device)
    where = {**target.to_dict(), "processor": processor, **_versions(), "default draft": draft}
    return Bench(target.spec, target.tokenizer, config, others), where


def _lengths(prompts: Sequence[Sized]) -> str:
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


@command
def check(
    console: Reporter,
    source: Source,
    drafting: Drafting,
    file: Prompts = None,
    max_new_tokens: MaxNewTokens = 64,
    samples: Annotated[
        int, typer.Option(min=0, help="Sampled continuations per prompt; 0 skips the test.")
    ] = 1024,
    seed: Seed = 0,
) -> None:
    """Test exactness: greedy outputs equal the model's own, samples follow its distribution.

    Prompts are those of --file, or else prose, code and maths in the package.

    Exit code 1: an output differs by more than rounding, or the distribution is wrong.
    """
    from selfspec.apps.bench import Sampling, check_exactness
    from selfspec.apps.display.demo import load_prompts

    chosen = drafting.chosen
    target = source.load()
    draft = chosen or target.spec.default_draft
    texts = read_prompts(None, file) if file else [prompt.text for prompt in load_prompts()]
    encoded = [target.tokenizer(text, return_tensors="pt").input_ids for text in texts]
    prompts = [ids.to(target.spec.decoder.device) for ids in encoded]
    sampling = Sampling(samples=samples) if samples else None
    with progress().status("comparing outputs"):
        result = check_exactness(target.spec, draft, prompts, max_new_tokens, sampling, seed)
    console.print(*_verdicts(target, result), sep="\n")
    console.answer({**target.to_dict(), "draft": draft.model_dump(), **result.to_dict()})
    if not result.passed:
        raise typer.Exit(1)


def _verdicts(target: Loaded, result: CheckResult) -> list[str]:
    """The results in sentences."""
    equal = result.texts - len(result.divergences)
    lines = [f"greedy: {equal} of {result.texts} outputs are equal"]
    for number, found in result.divergences.items():
        excuse = " (rounding)" if found.rounding else ""
        lines.append(f"  output {number} differs at {found.describe(target.tokenizer)}{excuse}")
    if not result.wide and result.divergences:
        lines.append("  half precision rounds passes of different width differently")
    if result.p_values:
        rate = f"{result.acceptance_rate:.2f} of drafts accepted"
        lines.append(f"sampled: least p-value {min(result.p_values):.3g}, {rate}")
    return [*lines, "passed" if result.passed else "FAILED"]


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
            help="Text similar to your prompts, in the form of --file of selfspec check; may be "
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
    begun: set[str] = set()
    with one_run(folder), progress_bar() as bar:

        def show(part: str, done: int, of: int) -> None:
            bar(part, done, of)
            if part not in begun and not sys.stderr.isatty():
                typer.echo(part, err=True)
            begun.add(part)

        if fresh:
            (folder / "runs.jsonl").unlink(missing_ok=True)
        profile = measure(target.spec, target.tokenizer, texts, wanted, folder, show)
        profile.save(output)
    _show(console, profile, output)
    console.answer({**target.to_dict(), "output": str(output), **profile.model_dump(mode="json")})


def _show(console: Console, profile: Profile, output: Path) -> None:
    from selfspec.apps.bench.plots import write_picture
    from selfspec.apps.display.plots import speedup_map, speedup_table, validation_table

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
