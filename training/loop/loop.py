"""The training loop, and the interface of a task."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast_object_list
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import Self

from selfspec.config import StrictConfig
from selfspec.decoder.devices import fitting_device
from selfspec.decoder.kernels.prepacked import has_kernels

from ..data import Batch, Mixture
from .checkpoint import Checkpoints, gather_state, restore_state
from .metrics import Display, MetricsLog, check_trackers
from .optim import OptimizerConfig, make_optimizers, rate_scale, set_rate
from .parallel import make_accelerator, shard, whole_root


class Task(nn.Module):
    """A training task: a module whose forward is the loss of a batch.

    Randomness must be a function of seed and step, or come from torch's global generator, which the
    loop seeds every step. The loop switches between training and evaluation mode; a task with a
    frozen part overrides `train`.

    Attributes:
        name: its name in displays.
        better: the metric of `evaluate` for early stopping; lower is better.
    """

    name: str = "training"
    better: str = "loss"

    def forward(self, batch: Batch, step: int, progress: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss, and metrics, each summed over the batch's terms.

        Args:
            batch: packed blocks.
            step: number of the optimizer step.
            progress: share of the run that is done, in [0, 1).
        """
        raise NotImplementedError

    def terms(self, batch: Batch) -> Tensor:
        """Number of terms that the loss of a batch sums over."""
        return (batch.targets != -100).sum()

    def evaluate(self) -> dict[str, float]:
        """Figures on held-out text. Every process computes them; the first one's are reported."""
        return {}


def _fast_precision() -> Literal["no", "bf16"]:
    """A CPU without kernels for bfloat16 takes several times as long with it."""
    return "bf16" if has_kernels(fitting_device(), torch.bfloat16) else "no"


# YAML reads a bare `no` as false.
Precision = Annotated[
    Literal["no", "bf16", "fp16"], BeforeValidator(lambda given: "no" if given is False else given)
]


class LoopConfig(StrictConfig):
    """Length, batches and checkpoints of a run.

    Attributes:
        steps: optimizer steps.
        batch_size: blocks per step, over all processes.
        micro_batch_size: blocks per forward pass of a process; gradients are accumulated.
        precision: `no` is float32; `bf16` and `fp16` are autocast. The default is `bf16`, or `no`
            on a CPU without kernels for bfloat16.
        clip: largest norm of the gradient; 0 does not clip.
        seed: seed of the data's order and of everything random.
        log_every: steps between lines.
        eval_every: steps between evaluations; 0 evaluates at the end only.
        save_every: steps between checkpoints, which a killed run loses at most.
        keep: number of checkpoints to keep.
        patience: evaluations without improvement that end the run early; 0 disables it.
        compile: run the task through torch.compile.
        fsdp: shard the weights over the processes (FSDP2); otherwise every process holds all.
        trackers: tensorboard, wandb or trackio, beside the JSON lines.
    """

    steps: int = Field(default=1000, ge=1)
    batch_size: int = Field(default=16, ge=1)
    micro_batch_size: int = Field(default=16, ge=1)
    precision: Precision = Field(default_factory=_fast_precision)
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
        """Settings that must not change when a run is resumed."""
        fixed = {"batch_size", "precision", "clip", "seed"}
        return self.model_dump(mode="json", include=fixed)

    def passes(self, processes: int) -> int:
        """Forward passes of each process in a step; ValueError if the batch does not divide."""
        size, part = self.batch_size, self.micro_batch_size
        if size % (part * processes):
            raise ValueError(
                f"batch_size {size} must be a multiple of micro_batch_size {part} times "
                f"{processes} processes"
            )
        return size // (part * processes)


@dataclass
class Progress:
    """Progress of a run.

    Attributes:
        step: optimizer steps done.
        best: best figure of early stopping.
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
        """Record an evaluation."""
        self.figures = figures
        if better in figures:
            self.worse = 0 if figures[better] < self.best else self.worse + 1
            self.best = min(self.best, figures[better])


class DistributedTask:
    """A task on all processes, with the optimizers of its weights.

    Args:
        task: the task.
        config: precision, clipping, compilation and sharding.
        optimizer: the optimizer.
        accelerator: this process's accelerator.

    Raises:
        ValueError: nothing is trained.
    """

    def __init__(
        self, task: Task, config: LoopConfig, optimizer: OptimizerConfig, accelerator: Accelerator
    ):
        self._task, self._config, self._accelerator = task, config, accelerator
        self._module, self._optimizers = self._place(optimizer)
        self._bare_optimizers = [each.optimizer for each in self._optimizers]
        self._forward = torch.compile(self._module) if config.compile else self._module

    def _place(self, optimizer: OptimizerConfig) -> tuple[nn.Module, list[AcceleratedOptimizer]]:
        if self._config.fsdp and self._accelerator.num_processes > 1:
            shard(self._task, self._accelerator)
            optimizers = make_optimizers(self._task, optimizer)
            return self._task, [self._accelerator.prepare(each) for each in optimizers]
        optimizers = make_optimizers(self._task, optimizer)
        module, *prepared = self._accelerator.prepare(self._task, *optimizers)
        return module, prepared

    def accumulate(self, batches: Sequence[Batch], step: int) -> dict[str, float]:
        """Compute a step's gradients over one batch for each forward pass of this process.

        Returns:
            Means of the loss and of the metrics over all processes, and the gradient's norm.
        """
        self._module.train()
        total = self._over_processes(torch.stack([self._task.terms(b) for b in batches]).sum())
        total = total.clamp(min=1)
        sums: dict[str, Tensor] = {}
        for number, batch in enumerate(batches):
            for name, value in self._backward(batch, step, total, number + 1 == len(batches)):
                sums[name] = sums.get(name, torch.zeros_like(value)) + value
        means = self._over_processes(torch.stack(list(sums.values()))) / total
        return {**dict(zip(sums, means.tolist(), strict=True)), "grad_norm": self._clip()}

    def update(self, scale: float) -> None:
        """Update the weights, with learning rates of `scale` times their peak."""
        set_rate(self._optimizers, scale)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def evaluate(self) -> dict[str, float]:
        """Figures on held-out text."""
        self._module.eval()
        with torch.no_grad(), self._accelerator.autocast(), whole_root(self._module):
            # All processes use the first one's figures: they must stop together.
            (figures,) = broadcast_object_list([self._task.evaluate()])
        return figures

    def state(self) -> dict[str, Tensor]:
        """What `restore` needs to resume; see `gather_state`."""
        return gather_state(self._task, self._bare_optimizers)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; ValueError if it is that of another task."""
        restore_state(self._task, self._bare_optimizers, tensors)

    def _over_processes(self, sums: Tensor) -> Tensor:
        return self._accelerator.reduce(sums, "sum")  # pyright: ignore[reportReturnType]

    def _backward(
        self, batch: Batch, step: int, total: Tensor, last: bool
    ) -> list[tuple[str, Tensor]]:
        together = nullcontext() if last else self._accelerator.no_sync(self._module)
        with together, self._accelerator.autocast():
            loss, metrics = self._forward(batch, step, step / self._config.steps)
            # Processes' gradients are averaged, the loss is a mean over all terms of the step.
            self._accelerator.backward(loss * self._accelerator.num_processes / total)
        summed = {"loss": loss, **metrics}
        return [(name, value.detach().float()) for name, value in summed.items()]

    def _clip(self) -> float:
        trained = [p for p in self._module.parameters() if p.requires_grad]
        norm = self._accelerator.clip_grad_norm_(trained, self._config.clip or math.inf)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)  # pyright: ignore


class Loop:
    """A training run with accelerate, resumed from its last checkpoint if there is one.

    Args:
        task: the task.
        data: blocks in their order.
        config: length, batches and checkpoints.
        optimizer: the optimizer.
        output: folder of checkpoints and metrics.
        identity: facts that must not change when the run is resumed.

    Attributes:
        progress: progress of the run.

    Raises:
        ValueError: the batch does not divide, `output` holds another run, a tracker is unknown, or
            nothing is trained.
        ImportError: a tracker is not installed.
    """

    def __init__(
        self,
        task: Task,
        data: Mixture,
        config: LoopConfig,
        optimizer: OptimizerConfig,
        output: Path,
        identity: Mapping[str, Any],
    ):
        check_trackers(config.trackers)
        self.identity = {**identity, "loop": config.identity}
        self.checkpoints = Checkpoints(output, config.keep)
        self.checkpoints.check_identity(self.identity)
        self.task, self.data, self.config, self.optimizer_config = task, data, config, optimizer
        self.output, self.progress = output, Progress()
        facts = config.model_dump(mode="json", exclude={"trackers"})
        self.accelerator = make_accelerator(config.precision, config.trackers, output, facts)
        self.passes = config.passes(self.accelerator.num_processes)
        self.distributed = DistributedTask(task, config, optimizer, self.accelerator)

    @property
    def main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.accelerator.is_main_process

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to train."""
        patience = self.config.patience
        stopped = patience > 0 and self.progress.worse >= patience
        return stopped or self.progress.step >= self.config.steps

    # The run

    def run(self) -> dict[str, float]:
        """Train to the end and return the last evaluation.

        Raises:
            FloatingPointError: the loss or its gradient is not finite; the last checkpoint is kept.
            OSError: a checkpoint could not be written; the one before it is kept.
            ValueError: the checkpoint to resume from is damaged.
        """
        self._resume()
        progress, steps = self.progress, self.config.steps
        display = Display(self.task.name, steps, progress.step, silent=not self.main)
        if self.finished:
            display.say(f"the run in {self.output} is complete at step {progress.step} of {steps}")
            return progress.figures
        if progress.step:
            display.say(f"resuming the run in {self.output} after step {progress.step} of {steps}")
        log = MetricsLog(self.output, progress.step) if self.main else None
        with display:
            try:
                while not self.finished:
                    self._advance(display, log)
            except KeyboardInterrupt:
                again = "goes on from there" if self.checkpoints.steps() else "begins anew"
                last = self.checkpoints.last_good()
                display.say(f"stopped; {last}; the same command {again}")
                raise
        for tracker in self.accelerator.trackers:
            tracker.finish()
        return progress.figures

    def _advance(self, display: Display, log: MetricsLog | None) -> None:
        began, progress = time.perf_counter(), self.progress
        values = self._step(progress.step)
        progress.step += 1
        if self._due(self.config.eval_every) or self.finished:
            values |= self._evaluate(display)
        self._report(display, log, values)
        progress.seconds += time.perf_counter() - began
        if self._due(self.config.save_every) or self.finished:
            self._save()

    def _due(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0

    # A step

    def _step(self, step: int) -> dict[str, Any]:
        began = time.perf_counter()
        self._seed(step)
        batches = [self._batch(step, number) for number in range(self.passes)]
        values = self.distributed.accumulate(batches, step)
        self._check_finite(values, step)
        scale = rate_scale(self.optimizer_config, step, self.config.steps)
        self.distributed.update(scale)
        tokens = self.config.batch_size * batches[0].tokens.shape[1]
        speed = tokens / (time.perf_counter() - began)
        return {**values, "lr_scale": scale, "tokens_per_second": speed}

    def _seed(self, step: int) -> None:
        source = np.random.SeedSequence((self.config.seed, step, self.accelerator.process_index))
        torch.manual_seed(int(source.generate_state(1)[0]))

    def _batch(self, step: int, number: int) -> Batch:
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        first = step * self.config.batch_size + number * self.config.micro_batch_size * world + rank
        batch = self.data.batch(first, self.config.micro_batch_size, stride=world)
        return batch.to(self.accelerator.device)

    def _check_finite(self, values: dict[str, float], step: int) -> None:
        # fp16 skips steps whose gradient overflows, and reduces its scale.
        checked = ["loss"] if self.accelerator.scaler else ["loss", "grad_norm"]
        wrong = [name for name in checked if not math.isfinite(values[name])]
        if wrong:
            size = self.config.batch_size
            raise FloatingPointError(
                f"{wrong[0]} of step {step} is {values[wrong[0]]} (blocks {step * size} to "
                f"{(step + 1) * size - 1} of the data's order); {self.checkpoints.last_good()}; a "
                "lower learning rate, or precision 'no', usually helps"
            )

    def _check_weights(self, tensors: dict[str, Tensor]) -> None:
        # An update may make weights infinite although loss and gradient are finite.
        trained = {name for name, p in self.task.named_parameters() if p.requires_grad}
        for name in sorted(trained & {key.removeprefix("model.") for key in tensors}):
            if not bool(tensors[f"model.{name}"].isfinite().all()):
                raise FloatingPointError(
                    f"step {self.progress.step} left {name} not finite; "
                    f"{self.checkpoints.last_good()}; a lower learning rate usually helps"
                )

    # Evaluation, display, checkpoints

    def _evaluate(self, display: Display) -> dict[str, float]:
        figures = self.distributed.evaluate()
        self.progress.judge(figures, self.task.better)
        if figures:
            text = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
            display.say(f"held out, step {self.progress.step}: {text}")
        return figures

    def _report(self, display: Display, log: MetricsLog | None, values: dict[str, Any]) -> None:
        step, last = self.progress.step, self.finished
        shown = {k: values[k] for k in ("loss", "tokens_per_second")}
        display.step(step, shown, line=last or self._due(self.config.log_every))
        if log is not None:
            log.write(step - 1, values)
        if self.config.trackers:
            self.accelerator.log(values, step=step - 1)

    def _save(self) -> None:
        tensors = self.distributed.state()
        self._check_weights(tensors)
        if self.main:
            facts = {**asdict(self.progress), "identity": self.identity}
            self.checkpoints.save(self.progress.step, tensors, facts)
        self.accelerator.wait_for_everyone()

    def _resume(self) -> None:
        steps = self.checkpoints.steps()
        if not steps:
            return
        tensors, facts = self.checkpoints.load(steps[-1])
        self.distributed.restore(tensors)
        known = {f.name for f in fields(Progress)} & facts.keys()
        self.progress = Progress(**{name: facts[name] for name in known})
