"""Checkpoints of a run, checked against the config that made them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from selfspec.decoder import Decoder
from selfspec.heads.files import read_object, refuse_changes, replace_text
from selfspec.heads.hub import DEMO
from selfspec.heads.store import fingerprint

from .parallel import placed, whole


def target_facts(decoder: Decoder) -> dict[str, Any]:
    """Facts of the target: shape, dtype, and a hash of samples of its weights."""
    facts = fingerprint(decoder)
    dtype = str(decoder.dtype).removeprefix("torch.")
    return {**facts, "weights": digest(facts["weights"]), "dtype": dtype}


def name_of(target: str) -> str:
    """The target's id, or the absolute path of its folder or file, which has one spelling only."""
    path = Path(target).expanduser()
    is_path = path.exists() and target != DEMO
    return os.path.normpath(path.absolute()) if is_path else target


def digest(data: Any) -> str:
    """SHA-256 of JSON data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def read_facts(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file; `None` if there is no file.

    Raises:
        ValueError: the file is damaged.
    """
    if not path.exists():
        return None
    return read_object(path, f"delete {path.parent} to start afresh")


def write_facts(path: Path, facts: Mapping[str, Any]) -> None:
    """Write a JSON object atomically."""
    replace_text(path, json.dumps(facts, indent=1) + "\n")


_FOLDER, _TENSORS, _FACTS = "checkpoints", "state.safetensors", "state.json"


def write_folder(folder: Path, fill: Callable[[Path], object]) -> None:
    """Write a folder atomically: fill a temporary one, then replace `folder`.

    Raises:
        OSError: it could not be written; `folder` is unchanged.
    """
    scratch, former = (folder.with_name(f".{folder.name}.{word}") for word in ("tmp", "old"))
    for left_over in (scratch, former):
        shutil.rmtree(left_over, ignore_errors=True)
    try:
        scratch.mkdir(parents=True)
        fill(scratch)
        if folder.exists():
            folder.replace(former)
        scratch.replace(folder)
    except SafetensorError as error:  # on a full disk
        raise OSError(f"{folder} could not be written: {error}") from error
    finally:
        for left_over in (scratch, former):
            shutil.rmtree(left_over, ignore_errors=True)


class Checkpoints:
    """The checkpoints of a run, one folder per step.

    Args:
        output: folder of the run.
        keep: number of checkpoints to keep.
    """

    def __init__(self, output: Path, keep: int = 2):
        self.folder, self.keep = output / _FOLDER, keep

    def steps(self) -> list[int]:
        """Steps that can be resumed from, oldest first."""
        found = (path.name.removeprefix("step_") for path in self.folder.glob("step_*"))
        return sorted(int(number) for number in found if number.isdigit())

    def last_good(self) -> str:
        """For messages: the checkpoint from which the run can be resumed."""
        steps = self.steps()
        if not steps:
            return "there is no checkpoint yet"
        return f"the last good checkpoint is step {steps[-1]} in {self.folder}"

    def save(self, step: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Write a checkpoint and delete all but the newest `keep`.

        Raises:
            OSError: it could not be written; earlier ones are kept.
        """

        def fill(folder: Path) -> None:
            save_file(tensors, folder / _TENSORS)
            (folder / _FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")

        try:
            write_folder(self._path(step), fill)
        except OSError as error:
            message = f"step {step} could not be saved ({error}); {self.last_good()}"
            raise OSError(message) from error
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self._path(old))

    def load(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Read a checkpoint: tensors and facts.

        Raises:
            ValueError: a file is damaged.
        """
        try:
            return load_file(self._path(step) / _TENSORS), self._facts(step)
        except (OSError, SafetensorError) as error:
            raise self._damaged(step, error) from None

    def check_identity(self, identity: Mapping[str, Any]) -> None:
        """Check that the run on disk, if there is one, is the same.

        Args:
            identity: facts that must not change when a run is resumed. Those that the checkpoint
                lacks are not compared.

        Raises:
            ValueError: a fact differs, or the checkpoint is damaged.
        """
        steps = self.steps()
        if not steps:
            return
        saved = self._facts(steps[-1])["identity"]
        given = json.loads(json.dumps(identity))
        both = sorted(saved.keys() & given)
        refuse_changes(
            {name: saved[name] for name in both},
            {name: given[name] for name in both},
            f"{self.folder.parent} holds a run",
            "give a new output folder, or delete that one to start afresh",
        )

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def _facts(self, step: int) -> dict[str, Any]:
        try:
            facts = json.loads((self._path(step) / _FACTS).read_text(encoding="utf-8"))
            if not isinstance(facts, dict) or not isinstance(facts.get("identity"), dict):
                raise ValueError(f"{_FACTS} lacks the run's identity")
        except (OSError, ValueError) as error:
            raise self._damaged(step, error) from None
        return facts

    def _damaged(self, step: int, error: Exception) -> ValueError:
        return ValueError(
            f"the checkpoint {self._path(step)} cannot be read ({error}); delete that folder to "
            "resume from the one before it"
        )


def gather_state(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Trained weights, buffers and optimizer state, on the CPU, gathered from shards.

    Every process must call it.
    """
    frozen = _frozen(module)
    tensors = {
        f"model.{name}": whole(tensor)
        for name, tensor in module.state_dict().items()
        if name not in frozen
    }
    for prefix, optimizer, parameter in _updated(module, optimizers):
        state = optimizer.state[parameter]
        tensors |= {f"{prefix}{key}": whole(value) for key, value in state.items()}
    return tensors


def restore_state(
    module: nn.Module, optimizers: Sequence[Optimizer], tensors: Mapping[str, Tensor]
) -> None:
    """Restore the state from `gather_state`.

    Raises:
        ValueError: the tensors are not those of the module.
    """
    places, weights = module.state_dict(), _below(tensors, "model.")
    shapes = {name: tensor.shape for name, tensor in places.items() if name not in _frozen(module)}
    found = {name: tensor.shape for name, tensor in weights.items()}
    if shapes != found:
        names = sorted(name for name, _ in shapes.items() ^ found.items())
        raise ValueError(f"the checkpoint holds other weights than the run: {', '.join(names)}")
    with torch.no_grad():
        for name, tensor in weights.items():
            places[name].copy_(placed(tensor, places[name]))
    for prefix, optimizer, parameter in _updated(module, optimizers):
        optimizer.state[parameter] = {
            # Counters are not sharded and stay on the CPU.
            key: placed(value, parameter) if value.shape == parameter.shape else value
            for key, value in _below(tensors, prefix).items()
        }


def _updated(
    module: nn.Module, optimizers: Sequence[Optimizer]
) -> Iterator[tuple[str, Optimizer, nn.Parameter]]:
    """Every parameter of every optimizer, with the prefix of its state's names."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield f"optimizer{number}.state.{names[parameter]}.", optimizer, parameter


def _frozen(module: nn.Module) -> set[str]:
    parameters = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in parameters if not parameter.requires_grad}


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
