"""What the tests of training share: small tasks, blocks of tokens, runs and what they leave."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import torch
import yaml
from conftest import ROOT, VOCAB, tiny_llama
from safetensors.torch import load_file
from torch import Tensor

from training.data import Batch, Blocks, Mixture
from training.language.task import LanguageModelling, Windows
from training.loop.loop import Loop, LoopConfig, Task
from training.loop.optim import OptimizerConfig

BLOCK = 12


def blocks(count: int = 24, seed: int = 0) -> Blocks:
    """Random tokens in random documents, of which not all is to be learned."""
    source = torch.Generator().manual_seed(seed)
    length = count * BLOCK
    tokens = torch.randint(1, VOCAB, (length,), generator=source)
    documents = (torch.rand(length, generator=source) < 0.1).cumsum(0)
    trained = torch.rand(length, generator=source) < 0.7
    return Blocks(tokens, documents, trained, BLOCK)


def mixture(seed: int = 0) -> Mixture:
    return Mixture([blocks(seed=1), blocks(7, seed=2)], [2.0, 1.0], seed)


def language_task(**config) -> LanguageModelling:
    """A tiny Llama and a window of held-out tokens; dropout, so that randomness matters."""
    shape = {"num_hidden_layers": 2, "attention_dropout": 0.1, "spread": 0.1}
    model = tiny_llama("seldom", **(shape | config))
    held_out = torch.randint(1, VOCAB, (2, 8), generator=torch.Generator().manual_seed(9))
    return LanguageModelling(model, {"words": Windows(held_out, 40)})


class Line(Task):
    """Fits one number; `events` says what happens at a step, `figures` what evaluations find."""

    name, better = "line", "distance"

    def __init__(self, events=None, figures=()):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3, 3))
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.events, self.figures = events or {}, list(figures)
        self.steps: list[int] = []
        self.evaluations = 0

    def forward(self, batch: Batch, step: int, progress: float) -> tuple[Tensor, dict[str, Tensor]]:
        self.steps.append(step)
        loss = (self.weight - 0.3).square().sum() * self.terms(batch)
        return self.events.get(step, lambda loss: loss)(loss), {"double": 2 * loss}

    def evaluate(self) -> dict[str, float]:
        self.evaluations += 1
        return {"distance": self.figures.pop(0)} if self.figures else {}


class Stopped(Exception):
    """What ends a run from outside, in a test."""


def stop(loss):
    raise Stopped


def make_loop(task: Task, output: Path, *, optimizer="adamw", identity=None, **config) -> Loop:
    """A loop of 10 steps over `mixture`, checkpoint every 3."""
    usual = {"steps": 10, "batch_size": 4, "micro_batch_size": 2, "precision": "no"}
    settings = LoopConfig(**(usual | {"save_every": 3} | config))
    rates = OptimizerConfig(name=optimizer, lr=1e-2, weight_decay=0.1)
    data = mixture(settings.seed)
    return Loop(task, data, settings, rates, output, {"task": task.name} | (identity or {}))


def metrics(output: Path) -> list[dict]:
    """The entries of a run's metrics, without what a clock measured."""
    lines = (output / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return [{k: v for k, v in e.items() if k != "tokens_per_second"} for e in entries]


def saved(output: Path, step: int) -> dict[str, Tensor]:
    """Tensors of a checkpoint."""
    return load_file(output / "checkpoints" / f"step_{step:08d}" / "state.safetensors")


def kept_steps(output: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step_")) for p in (output / "checkpoints").iterdir())


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """The same tensors, bit for bit."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest difference between two checkpoints' numbers."""
    assert left.keys() == right.keys()
    return max(float((left[k].double() - right[k].double()).abs().max()) for k in left)


# Whole scripts


def write_text(folder: Path, words: int = 1500, seed: int = 0) -> Path:
    """A file of sentences with some order in them."""
    source = random.Random(seed)
    syllables = ["ta", "ri", "mo", "ke", "lu", "san", "der", "pin"]
    known = ["".join(source.choices(syllables, k=number % 3 + 1)) for number in range(60)]
    chosen = ["the", *source.choices(known, k=words)]
    text = " ".join(word + "." * (place % 9 == 8) for place, word in enumerate(chosen))
    path = folder / "text.txt"
    path.write_text(text, encoding="utf-8")
    return path


def pretrain_config(folder: Path, **changes) -> dict:
    """A pretraining of seconds on the text in `folder`; sections of `changes` are merged in."""
    text = {"files": [str(folder / "*.txt")]}
    config = {
        "output": str(folder / "run"),
        "model": {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
        },
        "tokenizer": {"vocab_size": 320, "megabytes": 0.01},
        "data": [text],
        "block_size": 32,
        "held_out": {"window": 16, "windows": 3, "sources": {"words": text}},
        "optimizer": {"name": "adamw"},
        "loop": {"steps": 4, "batch_size": 4, "micro_batch_size": 2, "precision": "no"},
    }
    for key, value in changes.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    return config


def command(
    config: dict, folder: Path, processes: int = 1, script: str = "training.pretrain"
) -> list[str]:
    """The command line of a script, on one process or several."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    launcher = [sys.executable]
    if processes > 1:
        several = ["--standalone", f"--nproc-per-node={processes}"]
        launcher += ["-m", "torch.distributed.run", *several]
    return [*launcher, "-m", script, "--config", str(path)]


def start(arguments: list[str]) -> subprocess.Popen[str]:
    """Start a script on one thread a process, on CPUs alone."""
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        arguments,
        cwd=ROOT,
        env={**os.environ, **quiet},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
