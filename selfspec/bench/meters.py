"""Peak memory and energy, where the device and the system tell."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

_PROCESS = Path("/proc/self")


class Memory(NamedTuple):
    """What a call needed, in bytes.

    Attributes:
        peak: the most that was held: resident memory of the process, or allocated on the GPU.
        growth: how much of it was not there before the call.
    """

    peak: int
    growth: int


def peak_memory(call: Callable[[], object], device: torch.device) -> Memory | None:
    """Run `call` and say what it needed; `None` where the system does not tell."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        peak = torch.cuda.max_memory_allocated(device)
        return Memory(peak, peak - before)
    before = _resident_from_now_on()
    call()
    peak = _status("VmHWM")
    return None if before is None or peak is None else Memory(peak, max(0, peak - before))


def held_memory(device: torch.device) -> int | None:
    """Bytes held now, what is free given back; `None` where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    _give_back()
    return _status("VmRSS")


def _give_back() -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _resident_from_now_on() -> int | None:
    """Resident bytes, what is free given back to the system and the peak mark set down to it."""
    _give_back()
    try:
        (_PROCESS / "clear_refs").write_text("5")  # proc(5): resets VmHWM
    except OSError:
        return None
    return _status("VmRSS")


def _status(name: str) -> int | None:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB$", (_PROCESS / "status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


class EnergyMeter:
    """Joules that a GPU has used, by NVML; `None` without a GPU that counts them.

    Args:
        device: where the model runs.
    """

    def __init__(self, device: torch.device):
        self._read = _nvml_counter(device)

    def joules(self) -> float | None:
        """The counter's state."""
        return None if self._read is None else self._read() / 1000


def _nvml_counter(device: torch.device) -> Callable[[], int] | None:
    if device.type != "cuda":
        return None
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:
        return None
    return lambda: int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
