"""Trains a small decoder from a config and text, from scratch or from another checkpoint.

python -m training.pretrain --config configs/pretrain_demo.yaml [section.field=value ...]
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from selfspec.config import StrictConfig
from training.data import Mixture, SourceConfig, pack, tokenize
from training.language import LanguageModelling, held_out_windows
from training.loop import Loop, LoopConfig
from training.optim import OptimizerConfig
from training.script import finish_folder, read_arguments, start_output
from training.vocabulary import TokenizerConfig, carry_over, train_tokenizer


class HeldOut(StrictConfig):
    """Held-out text by domain.

    Attributes:
        sources: the text of each domain.
        window: tokens of a window.
        windows_per_document: the most that one document gives.
        windows: the most of one domain; 0 takes all.
    """

    sources: dict[str, SourceConfig]
    window: int = Field(default=256, ge=2)
    windows_per_document: int = Field(default=200, ge=1)
    windows: int = Field(default=0, ge=0)


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
    """

    output: str
    model: dict[str, Any]
    init_from: str | None = None
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: list[SourceConfig]
    block_size: int = Field(default=512, ge=2)
    held_out: HeldOut
    optimizer: OptimizerConfig = OptimizerConfig(name="muon")
    loop: LoopConfig = LoopConfig()


def pretrain(config: PretrainConfig) -> dict[str, float]:
    """Run a pretraining and return its held-out figures."""
    began = time.perf_counter()
    output = start_output(config, Path(config.output))
    tokenizer = get_tokenizer(config, output)
    cut = config.held_out
    held_out = {
        name: held_out_windows(source, tokenizer, cut.window, cut.windows_per_document, cut.windows)
        for name, source in cut.sources.items()
    }
    data = mixture(config, tokenizer)
    model = make_model(config, tokenizer)
    task = LanguageModelling(model, held_out)
    identity = config.model_dump(
        mode="json", include={"model", "init_from", "data", "block_size", "optimizer"}
    )
    loop = Loop(task, data, config.loop, config.optimizer, output, identity)
    figures = loop.run()
    if loop.main:
        seen = config.loop.steps * config.loop.batch_size * config.block_size
        facts = {
            "held_out": figures,
            "tokens_seen": seen,
            "tokens_of_text": data.tokens,
            "minutes_of_this_run": round((time.perf_counter() - began) / 60, 1),
        }
        finish_folder(output / "model", model.to(torch.bfloat16), tokenizer, facts)
    return figures


def mixture(config: PretrainConfig, tokenizer: PreTrainedTokenizerBase) -> Mixture:
    """The blocks of every source, in the order that the seed gives."""
    blocks = [
        pack(tokenize(source, tokenizer), config.block_size, source.name) for source in config.data
    ]
    return Mixture(blocks, [source.weight for source in config.data], config.loop.seed)


def make_model(config: PretrainConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The model to train, in float32, as it starts."""
    torch.manual_seed(config.loop.seed)
    fields = dict(config.model)
    if "model_type" not in fields:
        raise ValueError("model needs a model_type, such as llama")
    model_config = AutoConfig.for_model(
        fields.pop("model_type"),
        **{"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id},
        **{**fields, "vocab_size": len(tokenizer)},
    )
    model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    if config.init_from:
        source = AutoModelForCausalLM.from_pretrained(config.init_from, dtype=torch.float32)
        carry_over(source, AutoTokenizer.from_pretrained(config.init_from), model, tokenizer)
    return model


def get_tokenizer(config: PretrainConfig, output: Path) -> PreTrainedTokenizerBase:
    """The run's tokenizer, trained once and kept beside its checkpoints."""
    folder = output / "tokenizer"
    if not folder.is_dir():
        train_tokenizer(config.tokenizer, config.data, folder)
    return AutoTokenizer.from_pretrained(folder)


if __name__ == "__main__":
    pretrain(read_arguments(PretrainConfig, __doc__))
