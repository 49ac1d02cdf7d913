"""Calibrates and measures fitted heads on held-out text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from selfspec import SelfSpecModel
from selfspec.heads import load_heads
from selfspec.heads.files import check_free, one_run

from .data import Blocks
from .exits.fitting import FitConfig, rewrite_heads
from .exits.measure import calibrate, measure, open_held_out
from .exits.report import ExitFigures, figures_table, write_report
from .loop.metrics import read_metrics
from .loop.parallel import processes
from .loop.script import run_script


def measure_heads(config: FitConfig) -> dict[str, list[ExitFigures]]:
    """Measure the heads in the fit's folder anew."""
    check_free(Path(config.output))
    spec, tokenizer = config.load_target()
    with one_run(Path(config.output)):
        return measure_saved(config, spec, config.read_held_out(tokenizer))


def measure_saved(
    config: FitConfig, spec: SelfSpecModel, held_out: Mapping[str, Blocks]
) -> dict[str, list[ExitFigures]]:
    """Calibrate the saved heads, measure them, and write the report and the card.

    Args:
        config: the fit.
        spec: its target.
        held_out: held-out blocks by domain.

    Returns:
        The figures of every head, by domain.
    """
    console = Console(highlight=False)
    if not config.loop.fsdp:  # then it may be too large for one device
        spec.model.to(processes().device)
    heads = spec.engine.heads = load_heads(spec.decoder, config.folder)
    opened = open_held_out(spec.decoder, heads, held_out, config.measure)
    console.print("drafting over held-out text", markup=False)
    drafted = {domain: each.measure(with_features=True) for domain, each in opened.items()}
    errors, reliability = calibrate(spec, list(drafted.values()))
    figures: dict[str, list[ExitFigures]] = {}
    for domain, blocks in held_out.items():
        console.print(f"measuring on {domain}", markup=False)
        figures[domain] = measure(spec, blocks, drafted[domain], errors, config.measure)
        console.print(figures_table(figures[domain], title=domain))
    for number, head in enumerate(heads):
        measured = {domain: each[number].to_dict() for domain, each in figures.items()}
        head.facts = {**head.facts, "held_out": measured}
    rewrite_heads(config, heads, spec)
    output = Path(config.output)
    facts = {"target": config.target, "text": "; ".join(config.text_summary), "load": config.code}
    history = read_metrics(output)
    files = write_report(output, figures, history, reliability, facts, console.print)
    for line in (f"heads: {config.folder}", f"report: {files[-1]}", config.code):
        console.print(line, markup=False, soft_wrap=True)
    return figures


if __name__ == "__main__":
    run_script(measure_heads, FitConfig, __doc__)
