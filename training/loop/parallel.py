"""Several processes: rendezvous, DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel


def processes() -> PartialState:
    """This process among those that torchrun or `accelerate launch` started."""
    # Without `cpu`, processes on a machine without accelerator do not find each other.
    return PartialState(cpu=not torch.accelerator.is_available())


def make_accelerator(
    precision: str, trackers: list[str], output: Path, facts: dict[str, Any]
) -> Accelerator:
    """This process's accelerator; trackers get the `facts` of the run."""
    processes()
    # An earlier run of this process may have had another precision.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        mixed_precision=precision,
        log_with=trackers or None,  # pyright: ignore[reportArgumentType]
        project_dir=output,
        step_scheduler_with_optimizer=False,
    )
    if trackers:
        accelerator.init_trackers("selfspec", config=facts)
    return accelerator


def shard(module: nn.Module, accelerator: Accelerator) -> None:
    """Shard a module's weights over the processes (FSDP2), layer by layer.

    Parameters are replaced, so optimizers must be made afterwards.
    """
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    names = {name for model in models for name in model._no_split_modules or ()}
    for layer in [part for part in module.modules() if type(part).__name__ in names]:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)


@contextmanager
def whole_root(module: nn.Module) -> Iterator[None]:
    """Allow calling parts of a sharded module directly.

    Layers gather their weights when they are called; the others (embedding, norm, heads) are
    gathered here.
    """
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """A full copy on the CPU; for a sharded tensor every process must call it."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def placed(tensor: Tensor, place: Tensor) -> Tensor:
    """A full CPU tensor, sharded and moved as `place` is."""
    moved = tensor.to(place.device)
    if not isinstance(place, DTensor):
        return moved
    return distribute_tensor(moved, place.device_mesh, place.placements)
