"""How long a run is, and where it stands."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from selfspec.config import StrictConfig


class LoopConfig(StrictConfig):
    """How long to train, in what portions, and what is kept.

    Attributes:
        steps: optimizer steps.
        batch_size: blocks a step, over all processes.
        micro_batch_size: blocks that one process takes in one pass; gradients add up over passes.
        precision: `no` is float32; `bf16` and `fp16` are autocast.
        clip: largest norm of the gradient; 0 leaves it.
        seed: of the data's order and of everything random.
        log_every: steps between lines.
        eval_every: steps between evaluations; 0 evaluates at the end only.
        save_every: steps between checkpoints: what a killed run loses at most.
        keep: checkpoints that stay.
        patience: evaluations in a row without a better result that end the run early; 0 never does.
        compile: run the task through torch.compile.
        fsdp: shard the weights over the processes (FSDP2); without, every process holds all of
            them.
        trackers: tensorboard, wandb or trackio, beside the JSON lines.
    """

    steps: int = Field(default=1000, ge=1)
    batch_size: int = Field(default=16, ge=1)
    micro_batch_size: int = Field(default=16, ge=1)
    precision: Literal["no", "bf16", "fp16"] = "bf16"
    clip: float = Field(default=1.0, ge=0)
    seed: int = Field(default=0, ge=0)
    log_every: int = Field(default=10, ge=1)
    eval_every: int = Field(default=0, ge=0)
    save_every: int = Field(default=200, ge=1)
    keep: int = Field(default=2, ge=1)
    patience: int = Field(default=0, ge=0)
    compile: bool = False
    fsdp: bool = False
    trackers: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.patience and not self.eval_every:
            raise ValueError("patience counts evaluations; give eval_every as well")
        if self.fsdp and self.precision == "fp16":
            raise ValueError("fp16 scales gradients, which shards cannot; take bf16 with fsdp")
        return self

    @property
    def identity(self) -> dict[str, Any]:
        """What a run keeps when it is resumed; the rest may change."""
        fixed = {"batch_size", "precision", "clip", "seed"}
        return self.model_dump(mode="json", include=fixed)


@dataclass
class Progress:
    """Where a run stands.

    Attributes:
        step: optimizer steps done.
        best: lowest figure that early stopping has seen.
        worse: evaluations since.
        figures: the last evaluation.
        seconds: time spent in steps and evaluations.
    """

    step: int = 0
    best: float = math.inf
    worse: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def judge(self, figures: dict[str, float], better: str) -> None:
        """Take note of an evaluation."""
        self.figures = figures
        if better in figures:
            self.worse = 0 if figures[better] < self.best else self.worse + 1
            self.best = min(self.best, figures[better])
