"""The one training loop, over accelerate: fit, checkpoint, evaluate, stop.

accelerate rather than the transformers Trainer: what is trained here is a few modules on a frozen
model with losses over several unrolled steps, which the Trainer's one-model-one-forward shape would
have to be bent for; accelerate gives the same precision, DDP and FSDP2 underneath, and leaves the
step in plain sight. Its own checkpoints hold pickles, so `training.checkpoint` writes them instead.

Every choice a step makes is a function of the seed and the step's number, so a resumed run goes on
as if it had never stopped.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, set_seed
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from selfspec.config import StrictConfig
from training.checkpoint import Checkpoints, gather_state, restore_state
from training.data import Batch, Mixture
from training.metrics import Display, MetricsLog, check_trackers
from training.optim import OptimizerConfig, make_optimizers, rate_scale, set_rate


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
        patience: evaluations without a better result before the run stops early; 0 never stops.
        compile: run the task through torch.compile.
        fsdp: shard the target over the processes (FSDP2); without, every process holds all of it.
        trackers: tensorboard, wandb or trackio, beside the JSON lines.
    """

    steps: int = Field(default=1000, ge=1)
    batch_size: int = Field(default=16, ge=1)
    micro_batch_size: int = Field(default=16, ge=1)
    precision: Literal["no", "bf16", "fp16"] = "bf16"
    clip: float = Field(default=1.0, ge=0)
    seed: int = 0
    log_every: int = Field(default=10, ge=1)
    eval_every: int = Field(default=0, ge=0)
    save_every: int = Field(default=200, ge=1)
    keep: int = Field(default=2, ge=1)
    patience: int = Field(default=0, ge=0)
    compile: bool = False
    fsdp: bool = False
    trackers: list[str] = Field(default_factory=list)


class Task(nn.Module):
    """What is trained: a module whose forward is the loss of a batch.

    Attributes:
        name: what displays call it.
        better: the metric of `evaluate` that early stopping looks at; lower is better.
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
        """Figures on held-out text."""
        return {}

    def sharded_layers(self) -> list[nn.Module]:
        """Modules that FSDP2 shards one by one."""
        return []


class Loop:
    """A run of a task, from its last checkpoint if there is one.

    Args:
        task: what to train.
        data: blocks in their order.
        config: how long, in what portions.
        optimizer: what updates the weights.
        output: folder of checkpoints and metrics.
        identity: facts of the run that must not change between a checkpoint and its resumption.

    Raises:
        ValueError: the batch does not divide, or `output` holds another run.
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
        self.config, self.rates, self.data, self.output = config, optimizer, data, output
        self.identity = dict(identity)
        self.accelerator = make_accelerator(config, output)
        world = self.accelerator.num_processes
        share = config.micro_batch_size * world
        if config.batch_size % share:
            raise ValueError(
                f"batch_size {config.batch_size} must be a multiple of micro_batch_size "
                f"{config.micro_batch_size} times {world} processes"
            )
        self.passes = config.batch_size // share
        set_seed(config.seed)
        self.task = task
        prepared = self.accelerator.prepare(task, *make_optimizers(task, optimizer))
        self.module, self.optimizers = prepared[0], list(prepared[1:])
        self.forward = torch.compile(self.module) if config.compile else self.module
        self.checkpoints = Checkpoints(output / "checkpoints", config.keep)
        self.best, self.worse = float("inf"), 0
        self.done = 0

    @property
    def main(self) -> bool:
        """Whether this process writes and speaks."""
        return self.accelerator.is_main_process

    @property
    def _bare_optimizers(self) -> list[Optimizer]:
        return [optimizer.optimizer for optimizer in self.optimizers]

    # The run

    def run(self) -> dict[str, float]:
        """Train to the end and return the last evaluation.

        Raises:
            FloatingPointError: the loss is not finite; the last checkpoint stays.
            OSError: a checkpoint could not be written; the one before it stays.
        """
        self._resume()
        log = MetricsLog(self.output, self.done) if self.main else None
        display = Display(self.task.name, self.config.steps, self.done, silent=not self.main)
        figures: dict[str, float] = {}
        with display:
            while self.done < self.config.steps:
                values = self._step(self.done)
                self.done += 1
                last = self.done == self.config.steps
                if self._due(self.config.eval_every) or last:
                    figures = self._evaluate(display)
                    values |= figures
                    last = last or bool(self.config.patience and self.worse > self.config.patience)
                self._report(display, log, values, last)
                if self._due(self.config.save_every) or last:
                    self._save(display)
                if last:
                    break
        self.accelerator.end_training()
        return figures

    def _due(self, every: int) -> bool:
        return bool(every) and self.done % every == 0

    def _step(self, step: int) -> dict[str, Any]:
        start = time.perf_counter()
        scale = rate_scale(self.rates, step, self.config.steps)
        set_rate(self.optimizers, scale)
        batches = [self._batch(step, number) for number in range(self.passes)]
        terms = torch.stack([self.task.terms(batch) for batch in batches]).sum()
        total = self.accelerator.reduce(terms, "sum").clamp(min=1)  # pyright: ignore
        sums: dict[str, Tensor] = {}
        for number, batch in enumerate(batches):
            for name, value in self._backward(batch, step, total, number + 1 == len(batches)):
                sums[name] = sums.get(name, torch.zeros_like(value)) + value
        names = list(sums)
        reduced: Tensor = self.accelerator.reduce(torch.stack(list(sums.values())), "sum")  # pyright: ignore
        values = dict(zip(names, (reduced / total).tolist(), strict=True))
        self._check_finite(values["loss"], step)
        self._update()
        spent = time.perf_counter() - start
        speed = self.config.batch_size * batches[0].tokens.shape[1] / spent
        return {**values, "lr_scale": scale, "tokens_per_second": speed}

    def _batch(self, step: int, number: int) -> Batch:
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        first = step * self.config.batch_size + number * self.config.micro_batch_size * world + rank
        batch = self.data.batch(first, self.config.micro_batch_size, stride=world)
        return batch.to(self.accelerator.device)

    def _backward(
        self, batch: Batch, step: int, total: Tensor, last: bool
    ) -> list[tuple[str, Tensor]]:
        together = nullcontext() if last else self.accelerator.no_sync(self.module)
        with together, self.accelerator.autocast():
            loss, metrics = self.forward(batch, step, step / self.config.steps)
            # Processes' gradients are averaged, the loss is a mean over all terms of the step.
            self.accelerator.backward(loss * self.accelerator.num_processes / total)
        summed = {"loss": loss, **metrics}
        return [(name, value.detach().float()) for name, value in summed.items()]

    def _update(self) -> None:
        if self.config.clip:
            trained = [p for p in self.module.parameters() if p.requires_grad]
            self.accelerator.clip_grad_norm_(trained, self.config.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def _check_finite(self, loss: float, step: int) -> None:
        if loss == loss and abs(loss) != float("inf"):
            return
        size = self.config.batch_size
        raise FloatingPointError(
            f"the loss of step {step} is {loss} (blocks {step * size} to {(step + 1) * size - 1} "
            f"of the data's order); {self._last_good()}; a lower learning rate, or precision 'no', "
            "usually helps"
        )

    def _last_good(self) -> str:
        steps = self.checkpoints.steps()
        if not steps:
            return "there is no checkpoint yet"
        return f"the last good checkpoint is step {steps[-1]} in {self.checkpoints.folder}"

    # Evaluation, display, checkpoints

    def _evaluate(self, display: Display) -> dict[str, float]:
        self.module.eval()
        with torch.no_grad(), self.accelerator.autocast():
            figures = self.task.evaluate()
        self.module.train()
        if self.task.better in figures:
            better = figures[self.task.better] < self.best
            self.best = min(self.best, figures[self.task.better])
            self.worse = 0 if better else self.worse + 1
        if figures:
            text = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
            display.say(f"held out, step {self.done}: {text}")
        return figures

    def _report(
        self, display: Display, log: MetricsLog | None, values: dict[str, Any], last: bool
    ) -> None:
        shown = {k: values[k] for k in ("loss", "tokens_per_second")}
        display.step(self.done, shown, line=last or self._due(self.config.log_every))
        if log is not None:
            log.write(self.done - 1, values)
        if self.config.trackers:
            self.accelerator.log(values, step=self.done - 1)

    def _save(self, display: Display) -> None:
        tensors, values = gather_state(self.module, self._bare_optimizers)
        if self.main:
            facts = {
                "step": self.done,
                "best": self.best,
                "worse": self.worse,
                "identity": self.identity,
                "values": values,
            }
            try:
                self.checkpoints.save(self.done, tensors, facts)
            except OSError as error:
                display.say(f"step {self.done} could not be saved: {error}; {self._last_good()}")
                raise
        self.accelerator.wait_for_everyone()

    def _resume(self) -> None:
        steps = self.checkpoints.steps()
        if not steps:
            return
        tensors, facts = self.checkpoints.load(steps[-1])
        changed = [k for k, v in self.identity.items() if facts["identity"].get(k) != v]
        if changed:
            raise ValueError(
                f"{self.output} holds a run with another {', '.join(changed)}; give a new output "
                "folder, or delete that one to start afresh"
            )
        restore_state(self.module, self._bare_optimizers, tensors, facts["values"])
        self.done, self.best, self.worse = facts["step"], facts["best"], facts["worse"]


def make_accelerator(config: LoopConfig, output: Path) -> Accelerator:
    """accelerate's view of this process among the others."""
    plugin = None
    if config.fsdp:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, use_orig_params=True)
    accelerator = Accelerator(
        mixed_precision=config.precision,
        log_with=config.trackers or None,  # pyright: ignore
        project_dir=output,
        fsdp_plugin=plugin,
        step_scheduler_with_optimizer=False,
    )
    if config.trackers:
        accelerator.init_trackers("selfspec", config=config.model_dump(mode="json"))
    return accelerator
