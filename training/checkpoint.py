"""The state of a run on disk: safetensors and JSON, written whole or not at all, never a pickle."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

_TENSORS, _FACTS = "state.safetensors", "state.json"
_GATHERED = StateDictOptions(
    full_state_dict=True,
    cpu_offload=True,
    ignore_frozen_params=True,
    flatten_optimizer_state_dict=True,
    strict=False,
)


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder beside `folder` and put it in its place once it is whole."""
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        fill(scratch)
        if folder.exists():
            shutil.rmtree(folder)
        scratch.replace(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they lie, one folder a step.
        keep: how many of the newest stay.
    """

    def __init__(self, folder: Path, keep: int = 2):
        self.folder, self.keep = folder, keep

    def steps(self) -> list[int]:
        """Steps that can be resumed from, oldest first."""
        found = (path.name.removeprefix("step_") for path in self.folder.glob("step_*"))
        return sorted(int(number) for number in found if number.isdigit())

    def save(self, step: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Write a checkpoint and drop those beyond the newest `keep`."""

        def fill(folder: Path) -> None:
            save_file(tensors, folder / _TENSORS)
            (folder / _FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")

        write_folder(self.folder / f"step_{step:08d}", fill)
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.folder / f"step_{old:08d}")

    def load(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Read a checkpoint.

        Raises:
            ValueError: a file is damaged.
        """
        folder = self.folder / f"step_{step:08d}"
        try:
            facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
            return load_file(folder / _TENSORS), facts
        except (OSError, SafetensorError, json.JSONDecodeError) as error:
            raise ValueError(
                f"the checkpoint {folder} cannot be read ({error}); delete that folder to resume "
                "from the one before it"
            ) from None


def gather_state(
    module: nn.Module, optimizers: list[Optimizer]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Trained weights, optimizer state and random state as flat tensors and plain values.

    Every process has to call it; only the first gets the state when weights are sharded.
    """
    weights = get_model_state_dict(module, options=_GATHERED)
    tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
    values: dict[str, Any] = {}
    for number, optimizer in enumerate(optimizers):
        state = get_optimizer_state_dict(module, optimizer, options=_GATHERED)
        for name, value in state.items():
            key = f"optimizer{number}.{name}"
            if isinstance(value, Tensor):
                tensors[key] = value
            else:
                values[key] = value
    tensors["random"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random_cuda"] = torch.cuda.get_rng_state()
    # Tied weights and views share memory, which safetensors refuses.
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, values


def restore_state(
    module: nn.Module,
    optimizers: list[Optimizer],
    tensors: dict[str, Tensor],
    values: dict[str, Any],
) -> None:
    """Put back what `gather_state` took."""
    state = {**tensors, **values}
    set_model_state_dict(module, _below(state, "model."), options=_GATHERED)
    for number, optimizer in enumerate(optimizers):
        part = _below(state, f"optimizer{number}.")
        set_optimizer_state_dict(module, optimizer, part, options=_GATHERED)
    torch.set_rng_state(tensors["random"])
    if "random_cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random_cuda"])


def _below(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
