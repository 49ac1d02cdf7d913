"""Trains a small decoder from a config and text, from scratch or from another checkpoint.

python -m training.pretrain --config configs/pretrain_demo.yaml [section.field=value ...]
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, field_validator
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from selfspec.config import StrictConfig, unknown_name

from .data import Mixture, SourceConfig
from .language.layerskip import LayerSkip, LayerSkipConfig
from .language.task import HeldOut, LanguageModelling
from .language.vocabulary import TokenizerConfig, carry_over, train_tokenizer
from .loop.checkpoint import Checkpoints
from .loop.loop import Loop, LoopConfig
from .loop.optim import OptimizerConfig
from .loop.parallel import processes, whole
from .loop.script import finish_folder, run_folder, run_script


class PretrainConfig(StrictConfig):
    """A pretraining run.

    Attributes:
        output: folder of the run; the model lands in `model` in it.
        model: the model's configuration, as transformers names its fields (`model_type` included).
        init_from: a checkpoint of the same shape to start from instead of random weights; rows of
            tokens that its vocabulary lacks start as the mean of its tokens for the same text.
        tokenizer: the vocabulary that is trained on the mixture.
        data: the sources, each with its weight.
        block_size: tokens of a block.
        held_out: text for the figures, never trained on.
        optimizer: what updates the weights.
        loop: how long, in what portions.
        layerskip: train by the LayerSkip recipe (`dropout: rising` from scratch).
    """

    output: str
    model: dict[str, Any]
    init_from: str | None = None
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: list[SourceConfig] = Field(min_length=1)
    block_size: int = Field(default=512, ge=2)
    held_out: HeldOut
    optimizer: OptimizerConfig = OptimizerConfig(name="muon")
    loop: LoopConfig = LoopConfig()
    layerskip: LayerSkipConfig | None = None

    @field_validator("model")
    @classmethod
    def _has_known_fields(cls, fields: dict[str, Any]) -> dict[str, Any]:
        model_type = fields.get("model_type", "")
        if model_type not in CONFIG_MAPPING:
            raise ValueError(unknown_name("model_type", model_type, list(CONFIG_MAPPING)))
        plain = CONFIG_MAPPING[model_type]()
        known = {*plain.to_dict(), *plain.attribute_map, "rope_theta", "rope_scaling"}
        for name in fields:
            if name not in known:
                what = f"field of a {model_type} configuration"
                raise ValueError(unknown_name(what, name, sorted(known)))
        return fields

    @property
    def identity(self) -> dict[str, Any]:
        """What must stay as it is when the run is resumed."""
        parts = {"model", "init_from", "tokenizer", "data", "block_size", "optimizer", "layerskip"}
        return {**self.model_dump(mode="json", include=parts), "loop": self.loop.identity}


def pretrain(config: PretrainConfig) -> dict[str, float]:
    """Run a pretraining, or go on with the one in its folder, and return its held-out figures."""
    with run_folder(config, Path(config.output), config.identity) as output:
        return _pretrain(config, output)


def _pretrain(config: PretrainConfig, output: Path) -> dict[str, float]:
    tokenizer = get_tokenizer(config, output)
    held_out = config.held_out.read(tokenizer)
    data = Mixture.read(config.data, tokenizer, config.block_size, config.loop.seed)
    model = make_model(config, tokenizer)
    task = (
        LanguageModelling(model, held_out)
        if config.layerskip is None
        else LayerSkip(model, held_out, config.layerskip, config.loop)
    )
    loop = Loop(task, data, config.loop, config.optimizer, output, config.identity)
    figures = loop.run()
    weights = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    if loop.main:
        facts = {
            "held_out": figures,
            "tokens_seen": loop.progress.step * config.loop.batch_size * config.block_size,
            "tokens_of_text": data.tokens,
            "minutes": round(loop.progress.seconds / 60, 1),
        }
        finish_folder(output / "model", in_bfloat16(model, weights), tokenizer, facts)
    return figures


def make_model(config: PretrainConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The model to train, in float32, as it starts.

    Raises:
        ValueError: `model` names no known type or a field that its type does not have, or
            `init_from` has another shape.
    """
    torch.manual_seed(config.loop.seed)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    fields = {**ends, **config.model, "vocab_size": len(tokenizer)}
    model_config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    if config.init_from:
        source = AutoModelForCausalLM.from_pretrained(config.init_from, dtype=torch.float32)
        carry_over(source, AutoTokenizer.from_pretrained(config.init_from), model, tokenizer)
    return model


def in_bfloat16(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """A copy of a model to save: its own weights may lie in shards."""
    copy = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    copy.load_state_dict(weights)
    return copy


def get_tokenizer(config: PretrainConfig, output: Path) -> PreTrainedTokenizerBase:
    """The run's tokenizer, trained by the first process when the run begins and kept beside it."""
    folder = output / "tokenizer"
    begins = not Checkpoints(output).steps()
    if processes().is_main_process and begins:
        train_tokenizer(config.tokenizer, config.data, folder)
    processes().wait_for_everyone()
    return AutoTokenizer.from_pretrained(folder)


if __name__ == "__main__":
    run_script(pretrain, PretrainConfig, __doc__)
