"""Fine-tunes a checkpoint by the LayerSkip recipe, so that its own early exits draft well.

python -m training.finetune_layerskip --config configs/layerskip.yaml [section.field=value ...]

This changes the model: the result is a new checkpoint, which writes other text than the one it was
made from. (Exit heads, by contrast, leave the target as it is.) A table and a JSON file compare
held-out loss before and after, at full depth and after every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from pydantic import Field, field_validator
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.pytorch_utils import Conv1D

from selfspec.config import StrictConfig
from selfspec.decoder.checkpoints import load_causal_lm, load_config, load_tokenizer

from .data import Mixture, SourceConfig
from .language.layerskip import LayerSkip, LayerSkipConfig
from .language.task import HeldOut
from .loop.checkpoint import write_facts
from .loop.loop import Loop, LoopConfig
from .loop.optim import OptimizerConfig
from .loop.parallel import processes, whole
from .loop.script import finish_folder, run_folder, run_script

COMPARISON_NAME = "comparison.json"


class AdapterConfig(StrictConfig):
    """Train LoRA matrices (Hu et al. 2021) instead of all weights; they are merged at the end.

    Attributes:
        r: rank.
        alpha: the update is scaled by `alpha / r`.
        target_modules: names of the modules that get one; `all-linear` takes those in the layers.
    """

    r: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1)
    target_modules: str | list[str] = "all-linear"


class FinetuneConfig(StrictConfig):
    """A LayerSkip fine-tuning.

    Attributes:
        model: checkpoint to start from, a folder or a name on the Hub; it stays as it is.
        output: folder of the run; the new checkpoint lands in `model` in it.
        data: the sources, each with its weight.
        block_size: tokens of a block.
        held_out: text for the comparison, never trained on.
        layerskip: the recipe.
        lora: adapters to train instead of all weights.
        optimizer: what updates the weights.
        loop: how long, in what portions.
    """

    model: str
    output: str
    data: list[SourceConfig] = Field(min_length=1)
    block_size: int = Field(default=512, ge=2)
    held_out: HeldOut
    layerskip: LayerSkipConfig = LayerSkipConfig()
    lora: AdapterConfig | None = None
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-4)
    loop: LoopConfig = LoopConfig()

    @field_validator("held_out")
    @classmethod
    def _has_text(cls, held_out: HeldOut) -> HeldOut:
        if not held_out.sources:
            raise ValueError("sources is empty; give text to compare the model on before and after")
        return held_out

    @property
    def identity(self) -> dict[str, Any]:
        """What must stay as it is when the run is resumed."""
        parts = {"model", "data", "block_size", "layerskip", "lora", "optimizer"}
        return {**self.model_dump(mode="json", include=parts), "loop": self.loop.identity}


class Comparison(NamedTuple):
    """Held-out bits per byte of each domain after every layer; the last is the full depth."""

    before: dict[str, list[float]]
    after: dict[str, list[float]]

    def table(self) -> Table:
        """One line per exit."""
        table = Table(title="held-out bits per byte, before → after")
        for heading in ("exit layer", *self.before):
            table.add_column(heading, justify="right")
        pairs = list(zip(self.before.values(), self.after.values(), strict=True))
        depth = len(pairs[0][0])
        for place in range(depth):
            name = f"{depth} (full depth)" if place == depth - 1 else str(place + 1)
            cells = ((old[place], new[place]) for old, new in pairs)
            table.add_row(name, *(f"{a:.3f} → {b:.3f} ({b - a:+.3f})" for a, b in cells))
        return table

    def facts(self) -> dict[str, Any]:
        """The figures as JSON: full depth, and the exits from exit layer 1 upwards."""

        def at(part: int | slice) -> dict[str, dict[str, Any]]:
            pairs = zip(self.before, self.before.values(), self.after.values(), strict=True)
            return {name: {"before": old[part], "after": new[part]} for name, old, new in pairs}

        return {
            "unit": "held-out bits per byte",
            "full_depth": at(-1),
            "exits": at(slice(-1)),
        }


def finetune(config: FinetuneConfig) -> Comparison | None:
    """Run a LayerSkip fine-tuning, or go on with the one in its folder.

    Returns:
        What it did to the held-out loss; None in processes other than the first.

    Raises:
        ValueError: the output would overwrite the input, or the model cannot be trained this way.
    """
    refuse_overwriting(config)
    with run_folder(config, Path(config.output), config.identity) as output:
        return _finetune(config, output)


def _finetune(config: FinetuneConfig, output: Path) -> Comparison | None:
    announce(config)
    tokenizer = load_tokenizer(config.model)
    windows = config.held_out.read(tokenizer)
    data = Mixture.read(config.data, tokenizer, config.block_size, config.loop.seed)
    task = LayerSkip(make_model(config), windows, config.layerskip, config.loop)
    # A model that is to be sharded may fit no device as a whole.
    device = torch.device("cpu") if config.loop.fsdp else processes().device
    before = task.to(device).exit_bits()
    loop = Loop(task, data, config.loop, config.optimizer, output, config.identity)
    loop.run()
    weights = {name: whole(tensor) for name, tensor in task.model.state_dict().items()}
    if not loop.main:
        return None
    result = merged(config, weights)
    after = LayerSkip(result, windows, config.layerskip, config.loop).to(device).exit_bits()
    comparison = Comparison(before, after)
    save(config, result, tokenizer, comparison, loop.progress.step)
    Console(highlight=False).print(comparison.table())
    return comparison


def announce(config: FinetuneConfig) -> None:
    """Say that the result is another model."""
    text = (
        f"LayerSkip changes the model: {config.output}/model will be a new checkpoint, which "
        f"writes other text than {config.model}; that one stays as it is"
    )
    silent = not processes().is_main_process
    Console(highlight=False, quiet=silent, soft_wrap=True).print(text, markup=False)


def refuse_overwriting(config: FinetuneConfig) -> None:
    """Raise ValueError if the checkpoint to start from lies where the run writes."""
    source, output = Path(config.model).resolve(), Path(config.output).resolve()
    if source in (output, output / "model"):
        raise ValueError(
            f"output {config.output} would overwrite the model {config.model}, which LayerSkip "
            "does not change in place; give another output folder"
        )


def make_model(config: FinetuneConfig) -> PreTrainedModel:
    """The model to train, in float32, as it starts: with adapters where they are asked for."""
    if getattr(load_config(config.model), "quantization_config", None):
        raise ValueError(
            f"{config.model} is quantized, and LayerSkip writes its weights anew; give the "
            "checkpoint that it was quantized from"
        )
    model = load_causal_lm(config.model, dtype=torch.float32)
    if getattr(model, "peft_config", None):
        raise ValueError(
            f"{config.model} holds an adapter, and LayerSkip writes the weights of a whole model; "
            "give one into which it was merged (merge_and_unload)"
        )
    if config.lora:
        torch.manual_seed(config.loop.seed)
        add_adapters(model, config.lora)
    return model


def add_adapters(model: PreTrainedModel, config: AdapterConfig) -> PeftModel:
    """Put LoRA matrices into the model and freeze all else."""
    transposed = any(isinstance(module, Conv1D) for module in model.modules())
    adapters = LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,
        target_modules=config.target_modules,
        fan_in_fan_out=transposed,
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, adapters)
    assert isinstance(adapted, PeftModel)
    return adapted


def merged(config: FinetuneConfig, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """The trained model, adapters merged, in float32 but rounded to the dtype it is saved in.

    A new one, for the one that was trained may lie in shards.
    """
    model = load_causal_lm(config.model, dtype=torch.float32)
    adapted = add_adapters(model, config.lora) if config.lora else None
    model.load_state_dict(weights)
    if adapted:
        adapted.merge_and_unload()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(stored_dtype(config)))
    return model


def stored_dtype(config: FinetuneConfig) -> torch.dtype:
    """The dtype of the checkpoint to start from, which the new one gets as well."""
    dtype = load_config(config.model).dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def save(
    config: FinetuneConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    comparison: Comparison,
    steps: int,
) -> None:
    """Write the new checkpoint and, beside it, the comparison."""
    output = Path(config.output)
    facts = {
        "made_from": config.model,
        "recipe": config.layerskip.model_dump(mode="json"),
        "lora": config.lora and config.lora.model_dump(mode="json"),
        "tokens_seen": steps * config.loop.batch_size * config.block_size,
        **comparison.facts(),
    }
    model.to(stored_dtype(config))  # pyright: ignore[reportArgumentType]
    finish_folder(output / "model", model, tokenizer, facts)
    write_facts(output / COMPARISON_NAME, facts)


if __name__ == "__main__":
    run_script(finetune, FinetuneConfig, __doc__)
