"""Where weights are: several devices, offloaded, or sharded over processes."""

from __future__ import annotations

import copy
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TypeVar

import torch
from accelerate.utils import align_module_device
from torch import Tensor, distributed, nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)

# Attributes that accelerate and transformers set on a hooked module.
_HOOKED = ("forward", "_old_forward", "_hf_hook", "_is_hooked")


def device_of(module: nn.Module) -> torch.device:
    """The device a module computes on; torch's default device for one without weights."""
    for part in module.modules():
        hooked = getattr(getattr(part, "_hf_hook", None), "execution_device", None)
        if hooked is not None:
            return torch.device(hooked)
        for tensor in part.parameters(recurse=False):
            return tensor.device
    return torch.get_default_device()


def usable_device(name: str | None) -> torch.device:
    """The device of a name; without one the GPU if there is one, else the CPU.

    Raises:
        ValueError: torch cannot compute on it here.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (AssertionError, RuntimeError):  # by the kind of device
        raise ValueError(
            f"torch has no device {name!r} here; leave it out, or say cpu, or cuda, cuda:1 or mps "
            "where there is one"
        ) from None
    return device


def fitting_device() -> torch.device:
    """The device that heads are fitted on: an accelerator if there is one, else the CPU."""
    # Built for CUDA, torch names a GPU where there is none.
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a `DTensor`, of which each process holds a shard."""
    return hasattr(tensor, "full_tensor")  # not every build of torch has the class


def at_hand(module: nn.Module) -> bool:
    """Whether a module's weights are in memory, neither offloaded nor sharded."""
    return not any(tensor.is_meta or is_sharded(tensor) for tensor in module.parameters())


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from all processes; each has to call."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # pyright: ignore


@torch.no_grad()
def weight_of(module: nn.Module, name: str) -> Tensor:
    """A module's full weight, on the device that the module computes on."""
    with align_module_device(module):
        return whole(getattr(module, name))


def weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The full weights in a module, by name."""
    for path, part in module.named_modules():
        for name, _ in part.named_parameters(path, recurse=False):
            yield name, weight_of(part, name.rpartition(".")[2])


def bare_copy(module: ModuleT) -> ModuleT:
    """A deep copy with full weights on the original's device, without hooks."""
    with ExitStack() as stack:
        for part in module.modules():
            stack.enter_context(align_module_device(part))
        memo: dict[int, object] = {}
        for part in module.modules():
            hook = getattr(part, "_hf_hook", None)
            if hook is not None:  # it knows the weights of the whole model
                memo[id(hook)] = hook
            for tensor in part.parameters(recurse=False):
                if is_sharded(tensor):
                    alone = whole(tensor.detach()).clone()
                    memo[id(tensor)] = nn.Parameter(alone, requires_grad=tensor.requires_grad)
        copied = copy.deepcopy(module, memo)
    for part in copied.modules():
        for name in _HOOKED:
            part.__dict__.pop(name, None)
    return copied


class Ranks:
    """The processes that hold one sharded model; a single one for a model that is not sharded.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module):
        shard = next((tensor for tensor in model.parameters() if is_sharded(tensor)), None)
        self._group = self._device = None
        if shard is not None:
            self._group = shard.device_mesh.get_group()  # pyright: ignore
            self._device = shard.device
            self._first = distributed.get_global_rank(self._group, 0)

    def first(self, values: Tensor) -> Tensor:
        """The first process's values; every process has to call."""
        if self._group is None:
            return values
        sent = values.to(self._device)
        distributed.broadcast(sent, src=self._first, group=self._group)
        return sent.to(values.device)

    def clock(self) -> float:
        """The first process's `time.perf_counter()`, in seconds."""
        return self.agreed(time.perf_counter())

    def agreed(self, value: float) -> float:
        """The first process's value."""
        if self._group is None:
            return value
        return float(self.first(torch.tensor(value, dtype=torch.float64)))

    def draw_alike(self, generator: torch.Generator | None, device: torch.device) -> None:
        """Set every process's generator to the state of the first one's.

        Args:
            generator: the source of the draws; `None` for torch's global one.
            device: where it draws.
        """
        if self._group is None:
            return
        if generator is not None:
            generator.set_state(self.first(generator.get_state()))
        elif device.type == "cpu":
            torch.set_rng_state(self.first(torch.get_rng_state()))
        else:
            source = torch.get_device_module(device)
            source.set_rng_state(self.first(source.get_rng_state(device)), device)

    def check_alike(self, tokens: Tensor) -> None:
        """Raise ValueError, in every process, unless all have the same tokens."""
        if self._group is None:
            return
        sum_of = zlib.crc32(repr(tokens.tolist()).encode())
        ends = torch.tensor([sum_of, -sum_of], device=self._device)
        distributed.all_reduce(ends, distributed.ReduceOp.MIN, group=self._group)
        if ends.sum() != 0:
            raise ValueError(
                "the processes of a tensor parallel model were given different prompts; they "
                "generate one text together; give all of them the same prompt"
            )
