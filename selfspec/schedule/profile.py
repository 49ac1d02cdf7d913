"""Profiles: what `selfspec tune` measured on a device, and the draft that it chose.

A profile is valid for one target in one dtype on one device; elsewhere it is ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import Field
from transformers import PreTrainedConfig

from selfspec.config import DraftConfig, JsonObject, Kernels, StrictConfig, parse
from selfspec.decoder import Decoder
from selfspec.heads.base import ExitHead
from selfspec.heads.files import read_object, replace_text
from selfspec.heads.store import differences, fingerprint

PROFILE_NAME = "selfspec_profile.json"
_FORMAT = 2


class Measured(StrictConfig):
    """How fast one draft was.

    Attributes:
        name: its name in displays.
        draft: the draft.
        tokens_per_second: median over prompts and repeats, of whole calls.
        speedup: over plain decoding on the same prompts, median.
        equal: whether its output was that of plain decoding; `None` where it need not be.
        acceptance_rate: accepted over drafted.
        mean_accepted_length: tokens of a round.
    """

    name: str
    draft: DraftConfig
    tokens_per_second: float
    speedup: float
    equal: bool | None = None
    acceptance_rate: float = 0.0
    mean_accepted_length: float = 0.0


class Place(StrictConfig):
    """What a profile is valid for.

    Attributes:
        device: name of the GPU, or of the processor.
        dtype: dtype of the hidden states.
        threads: torch's threads on a CPU.
        target: the target's fingerprint.
        kernels: how layers are computed.
    """

    device: str
    dtype: str
    threads: int
    target: JsonObject
    kernels: Kernels = "direct"

    @classmethod
    def of(cls, decoder: Decoder) -> Place:
        """Here and now."""
        dtype = str(decoder.dtype).removeprefix("torch.")
        threads, target = torch.get_num_threads(), fingerprint(decoder)
        return cls(
            device=device_name(decoder.device),
            dtype=dtype,
            threads=threads,
            target=target,
            kernels=decoder.kernels,
        )

    @property
    def digest(self) -> str:
        """Tells this place from others; threads, which change easily, do not count."""
        text = json.dumps(self.model_dump(exclude={"threads"}), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Profile(StrictConfig):
    """The measured speeds, and the chosen draft.

    Attributes:
        draft: the default draft.
        place: what the profile is valid for.
        batch: batch size that it was made for.
        temperature: temperature that it was made for; 0 is greedy.
        screening: chains of drafts, one entry an exit head and length.
        validation: the best of them and other drafters on other prompts, fastest first, plain
            decoding (`none`) included.
        left_out: why a drafter was not run, by name.
        format_version: of the file.
    """

    draft: DraftConfig
    place: Place
    batch: int = Field(default=1, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    screening: list[Measured] = Field(default_factory=list)
    validation: list[Measured] = Field(default_factory=list)
    left_out: dict[str, str] = Field(default_factory=dict)
    format_version: int = _FORMAT

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is damaged, or of another version.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no profile at {path}; `selfspec tune` writes one")
        data = read_object(path, "tune again")
        version = data.get("format_version")
        if version != _FORMAT:
            raise ValueError(
                f"{path} has format_version {version}, this version reads {_FORMAT}; tune again"
            )
        return parse(cls, data, str(path))

    def save(self, path: str | Path) -> None:
        """Write it to `path`, whose folder is made if it is missing."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, self.model_dump_json(indent=2) + "\n")

    def mismatch(self, decoder: Decoder) -> str | None:
        """Why the profile does not hold for a target here; `None` if it does."""
        here = Place.of(decoder)
        for fact in ("device", "dtype", "kernels"):
            there, own = getattr(self.place, fact), getattr(here, fact)
            if there != own:
                return f"it was made for {fact} {there!r}, here it is {own!r}"
        different = differences(here.target, self.place.target)
        return f"it was made for another target: {'; '.join(different)}" if different else None

    def untried(self, heads: Sequence[ExitHead]) -> str | None:
        """The first head that was not tried; `None` if all were, or nothing says what was."""
        tried = [*(ran.name for ran in self.screening), *self.left_out]
        names = (exit_name(head.kind, head.exit_layer) for head in heads if self.screening)
        return next((n for n in names if not any(t.startswith(f"{n} ") for t in tried)), None)


def exit_name(kind: str, exit_layer: int) -> str:
    """The name of an exit head in profiles and displays."""
    return f"{kind} {exit_layer}"


def device_name(device: torch.device) -> str:
    """The name of a GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


_PACKAGE = Path(__file__).parents[1]


def default_path(decoder: Decoder, folder: str | Path | None) -> Path:
    """Where to write a target's profile: beside its files, or else in the user's cache.

    Args:
        decoder: the target.
        folder: folder of its heads or weights, if any.
    """
    if folder is not None and Path(folder).is_dir() and _takes_files(Path(folder)):
        return Path(folder) / PROFILE_NAME
    return _cached(decoder)


def find_profile(decoder: Decoder, folders: Sequence[str | Path]) -> Path | None:
    """The profile beside the heads or the weights, or in the user's cache, if there is one."""
    beside = [Path(folder) / PROFILE_NAME for folder in folders]
    found = [path for path in beside if path.is_file()]
    if found or not _cache().is_dir():
        return found[0] if found else None
    path = _cached(decoder)
    return path if path.is_file() else None


def _takes_files(folder: Path) -> bool:
    """Whether the folder is writable and not part of the package."""
    return os.access(folder, os.W_OK) and _PACKAGE not in folder.resolve().parents


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "selfspec" / "profiles"


def cached_profiles(config: PreTrainedConfig) -> list[Path]:
    """The profiles in the user's cache that may be of a checkpoint with this config."""
    return sorted(_cache().glob(_cached_name(config.get_text_config(decoder=True), "*")))


def _cached(decoder: Decoder) -> Path:
    return _cache() / _cached_name(decoder.config, Place.of(decoder).digest)


def _cached_name(config: PreTrainedConfig, digest: str) -> str:
    return f"{config.model_type}-{digest}.json"
