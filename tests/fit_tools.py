"""Fits of seconds: a random target on disk, a config, and the command line of the scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from conftest import tiny_llama
from safetensors.torch import load_file
from torch import Tensor
from training_tools import write_text

from selfspec.config import parse
from training.data import Blocks, SourceConfig
from training.exits.fitting import FitConfig
from training.language.vocabulary import TokenizerConfig, train_tokenizer

WORDS = 320
EVERY_KIND: list[dict[str, Any]] = [
    {"kind": "lens", "exit_layer": 2, "options": {"rank": 4}},
    {"kind": "lora", "exit_layer": 2, "options": {"rank": 2}, "vocab_size": 40},
    {"kind": "block", "exit_layer": 1},
    {"kind": "fused", "exit_layer": 2},
    {"kind": "eagle3", "exit_layer": 0, "vocab_size": 40},
    {"kind": "medusa", "exit_layer": 0, "options": {"heads": 1}},
]


def write_target(folder: Path, **config) -> Path:
    """A random Llama of four layers and a tokenizer, and the text it is made for beside them."""
    text = write_text(folder)
    shape = {
        "vocab_size": WORDS,
        "spread": 0.2,
        "dtype": torch.float32,
        "tie_word_embeddings": False,
    }
    model = tiny_llama("seldom", **(shape | config))
    model.save_pretrained(folder / "target")
    settings = TokenizerConfig(vocab_size=WORDS, megabytes=0.01)
    train_tokenizer(settings, [SourceConfig(files=[str(text)])], folder / "tokenizer")
    for file in (folder / "tokenizer").iterdir():
        file.replace(folder / "target" / file.name)
    return folder / "target"


def fit_config(folder: Path, **changes) -> dict[str, Any]:
    """A fit of a few steps to the target in `folder`; sections of `changes` are merged in."""
    text = {"files": [str(folder / "*.txt")]}
    config = {
        "output": str(folder / "run"),
        "target": str(folder / "target"),
        "heads": EVERY_KIND[:1],
        "data": [text],
        "block_size": 32,
        "loss": {"depths": 1},
        "optimizer": {"lr": 0.01},
        "loop": {"steps": 4, "batch_size": 4, "micro_batch_size": 2, "precision": "no"},
        "held_out": {"words": text},
        "measure": {"depths": 2, "blocks": 6, "watched": 2, "prompts": 0},
    }
    for key, value in changes.items():
        merge = isinstance(value, dict) and key != "held_out"
        config[key] = {**config.get(key, {}), **value} if merge else value
    return config


def settings(folder: Path, **changes) -> FitConfig:
    return parse(FitConfig, fit_config(folder, **changes), "test")


def head_weights(output: Path) -> dict[str, Tensor]:
    """Tensors of the heads that a fit left."""
    return load_file(output / "heads" / "exit_heads.safetensors")


def packed(tokens: Tensor, documents: Tensor | None = None, block_size: int = 12) -> Blocks:
    """Blocks of one document, or of several, of which everything is to be learned."""
    documents = torch.zeros_like(tokens) if documents is None else documents
    return Blocks(tokens, documents, torch.ones_like(tokens, dtype=torch.bool), block_size)
