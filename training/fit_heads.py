"""Fits exit heads to a frozen target, measures them on held-out text, and saves them.

python -m training.fit_heads --config configs/fit_lens.yaml [section.field=value ...]
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from pydantic import Field
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from selfspec import DEMO_MODEL, SelfSpecModel
from selfspec.config import StrictConfig
from selfspec.heads import save_heads
from training.checkpoint import write_folder
from training.data import Blocks, Mixture, SourceConfig, pack, tokenize
from training.exits import DraftLossConfig, ExitTask, HeadConfig, build_heads
from training.held_out import HeldOutDrafts
from training.loop import Loop, LoopConfig
from training.measure import MeasureConfig, calibrate, measure
from training.metrics import MetricsLog
from training.optim import OptimizerConfig
from training.report import figures_table, write_report
from training.script import CONFIG_NAME, run_script, start_output


class FitConfig(StrictConfig):
    """A fit of exit heads.

    Attributes:
        output: folder of the run; the heads land in `heads` in it.
        target: a checkpoint's folder or model id; `demo` is the one in the package.
        heads: the heads to fit, jointly.
        data: training text, each source with its weight.
        block_size: tokens of a block.
        loss: what is minimised.
        optimizer: what updates the heads.
        loop: how long, in what portions.
        held_out: text for calibration and figures, by domain; never trained on.
        measure: what is measured on it.
    """

    output: str
    target: str = "demo"
    heads: list[HeadConfig] = Field(min_length=1)
    data: list[SourceConfig] = Field(min_length=1)
    block_size: int = Field(default=256, ge=8)
    loss: DraftLossConfig = DraftLossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loop: LoopConfig = LoopConfig()
    held_out: dict[str, SourceConfig] = Field(min_length=1)
    measure: MeasureConfig = MeasureConfig()


def fit(config: FitConfig) -> Path:
    """Run a fit; returns the folder of the heads."""
    output = Path(config.output)
    target = str(DEMO_MODEL) if config.target == "demo" else config.target
    identity = config.model_dump(
        mode="json", include={"target", "heads", "data", "block_size", "loss", "optimizer"}
    )
    start_output(config, output, identity)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(target)
    spec = SelfSpecModel(model.eval())
    decoder = spec.engine.decoder
    text = [read_blocks(config, source, tokenizer) for source in config.data]
    held_out = {
        name: read_blocks(config, source, tokenizer) for name, source in config.held_out.items()
    }
    torch.manual_seed(config.loop.seed)
    heads = build_heads(decoder, config.heads, text)
    spec.engine.heads = heads
    first = next(iter(held_out.values()))
    watched = HeldOutDrafts(decoder, heads, first, config.measure.depths, config.measure.watched)
    task = ExitTask(decoder, heads, config.loss, watched)
    data = Mixture(text, [source.weight for source in config.data], config.loop.seed)
    loop = Loop(task, data, config.loop, config.optimizer, output, identity)
    loop.run()
    if loop.main:
        finish(config, spec, held_out, output)
    return output / "heads"


def read_blocks(
    config: FitConfig, source: SourceConfig, tokenizer: PreTrainedTokenizerBase
) -> Blocks:
    """The text of a source in blocks."""
    return pack(tokenize(source, tokenizer), config.block_size, source.name)


def finish(
    config: FitConfig, spec: SelfSpecModel, held_out: dict[str, Blocks], output: Path
) -> None:
    """Calibrate, measure, report and save."""
    console = Console(highlight=False)
    for head in spec.heads:
        head.eval().requires_grad_(False)
    console.print("calibrating and measuring on held-out text", markup=False)
    reliability = calibrate(spec, held_out, config.measure)
    figures = {name: measure(spec, blocks, config.measure) for name, blocks in held_out.items()}

    def fill(folder: Path) -> None:
        save_heads(spec.heads, spec.engine.decoder, folder)
        shutil.copy(output / CONFIG_NAME, folder / "fit.yaml")

    write_folder(output / "heads", fill)
    history = MetricsLog(output, config.loop.steps).read()
    for name, exits in figures.items():
        console.print(figures_table(exits, title=name))
        write_report(output / "report" / name, exits, history, reliability, console.print)
    console.print(f"heads: {output / 'heads'}", markup=False)


if __name__ == "__main__":
    run_script(fit, FitConfig, __doc__)
