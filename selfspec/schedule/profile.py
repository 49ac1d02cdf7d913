"""Profiles: what `selfspec tune` measured on a device, what it predicts, and the draft it chose.

A profile is valid for one target in one dtype on one device; elsewhere it is ignored.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from selfspec.config import DraftConfig, Kernels, StrictConfig, parse
from selfspec.decoder import Decoder
from selfspec.heads.store import differences, fingerprint, replacing


def expected_tokens(alphas: Sequence[float], num_draft_tokens: int) -> float:
    """Tokens that a round of k drafts emits: 1 + Σ_{i≤k} Π_{j≤i} α_j.

    Args:
        alphas: acceptance rate of each draft, given that those before it stand; drafts deeper than
            the last are taken to have its rate.
        num_draft_tokens: k.

    Raises:
        ValueError: there are no rates, or k is negative.
    """
    if not alphas or num_draft_tokens < 0:
        raise ValueError(
            "expected_tokens needs a rate and num_draft_tokens of at least 0, "
            f"got {len(alphas)} rates and {num_draft_tokens}"
        )
    deeper = itertools.chain(alphas, itertools.repeat(alphas[-1]))
    stand = itertools.accumulate(itertools.islice(deeper, num_draft_tokens), lambda a, b: a * b)
    return 1 + sum(stand)


def predict_speedup(
    alphas: Sequence[float],
    num_draft_tokens: int,
    shallow_seconds: float,
    verify_seconds: float,
    plain_seconds: float,
) -> float:
    """Speed of self-speculation over plain decoding (Leviathan et al. 2023, theorem 3.8).

    With one α for all depths, a verification as long as a plain step and a draft token of c of it,
    this is S = (1 - α^{k+1}) / ((1 - α)(kc + 1)).

    Args:
        alphas: acceptance rate by draft depth.
        num_draft_tokens: k, drafted in every round.
        shallow_seconds: of drafting one token.
        verify_seconds: of the rest of a round, the verification of all k drafts.
        plain_seconds: of one token of plain decoding.

    Raises:
        ValueError: there are no rates, or k is negative.
    """
    seconds = num_draft_tokens * shallow_seconds + verify_seconds
    return expected_tokens(alphas, num_draft_tokens) * plain_seconds / seconds


def interpolated(measured: Mapping[int, float], width: int) -> float:
    """Seconds of a pass of any width, on the line through the two measured ones next to it.

    Args:
        measured: seconds by width.
        width: beyond the measured ones the last line goes on, but never below what was measured.

    Raises:
        ValueError: nothing was measured.
    """
    if not measured:
        raise ValueError("interpolated needs a measured width, got none")
    widths = sorted(measured)
    if width in measured or len(widths) == 1:
        return measured.get(width, measured[widths[0]])
    if width < widths[0]:
        return measured[widths[0]]
    above = next((place for place, w in enumerate(widths) if w > width), len(widths) - 1)
    low, high = widths[above - 1], widths[above]
    slope = (measured[high] - measured[low]) / (high - low)
    found = measured[low] + slope * (width - low)
    return found if width < high else max(found, measured[high])


# A profile: what `selfspec tune` measured on a device, and the draft that it chose.

PROFILE_NAME = "selfspec_profile.json"
_FORMAT = 1


class DraftSeconds(StrictConfig):
    """Seconds that a chain from one exit head takes, all that is around its passes included.

    Attributes:
        first: of a round's first draft.
        more: of each further one.
    """

    first: float
    more: float


class Times(StrictConfig):
    """Median seconds of passes with one batch.

    Attributes:
        batch: rows of every pass.
        plain: of a round of plain decoding.
        shallow: of a pass through the layers below an exit, by exit and width.
        verify: of a pass through the layers from an exit on and the LM head, by exit and width;
            exit 0 is the whole target.
        drafts: of drafting, by the name of the exit head.
    """

    batch: int
    plain: float
    shallow: dict[int, dict[int, float]]
    verify: dict[int, dict[int, float]]
    drafts: dict[str, DraftSeconds]

    @property
    def rest(self) -> float:
        """Seconds of a round in which no pass runs."""
        return max(0.0, self.plain - self.verify[0][1])

    def round(self, name: str, exit_layer: int, num_draft_tokens: int) -> float:
        """Seconds of a round with a chain of drafts from the exit head `name`.

        A round without drafts is one of plain decoding.
        """
        if num_draft_tokens == 0:
            return self.plain
        drafts = self.drafts[name]
        # The last draft passes the shallow layers when it is verified.
        verify = interpolated(self.verify[exit_layer], num_draft_tokens + 1)
        passes = interpolated(self.shallow[exit_layer], 1) + verify
        return drafts.first + (num_draft_tokens - 1) * drafts.more + passes + self.rest


class ExitRates(StrictConfig):
    """How often drafts of an exit head are kept.

    Attributes:
        kind: kind of the head.
        exit_layer: layers below it.
        agreement: by depth, how often the draft's top token is the target's, where those before it
            in the draft were.
        alpha: by depth, Σ min(p, q), where the drafts before it were kept.
    """

    kind: str
    exit_layer: int
    agreement: list[float]
    alpha: list[float]

    @property
    def name(self) -> str:
        """What displays call the exit."""
        return exit_name(self.kind, self.exit_layer)


class Prediction(StrictConfig):
    """What rates and times promise of a chain.

    Attributes:
        kind: kind of the head.
        exit_layer: layers below it.
        num_draft_tokens: drafts of a round.
        tokens: emitted in a round.
        speedup: over plain decoding.
    """

    kind: str
    exit_layer: int
    num_draft_tokens: int
    tokens: float
    speedup: float

    @property
    def name(self) -> str:
        """What displays call the exit."""
        return exit_name(self.kind, self.exit_layer)

    @property
    def draft(self) -> DraftConfig:
        """How to draft so."""
        return DraftConfig(
            exit_layer=self.exit_layer, head=self.kind, num_draft_tokens=self.num_draft_tokens
        )


class Validation(StrictConfig):
    """What really drafting in one way brought, on prompts that nothing was measured on.

    Attributes:
        name: what displays call it.
        draft: how it drafts.
        tokens_per_second: median over turns, of whole calls.
        speedup: over plain decoding in the same turns, median.
        predicted: the speedup that was predicted, where one was.
        equal: whether it wrote plain decoding's tokens; `None` where it need not.
        acceptance_rate: accepted over drafted.
        mean_accepted_length: tokens of a round.
    """

    name: str
    draft: DraftConfig
    tokens_per_second: float
    speedup: float
    predicted: float | None = None
    equal: bool | None = None
    acceptance_rate: float = 0.0
    mean_accepted_length: float = 0.0


class Place(StrictConfig):
    """What a profile holds for.

    Attributes:
        device: name of the GPU, or of the processor.
        dtype: of the residual stream.
        threads: of torch, on a CPU.
        target: the target's fingerprint.
        kernels: what computes the layers.
    """

    device: str
    dtype: str
    threads: int
    target: dict[str, Any]
    kernels: Kernels = "eager"

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
        """Tells this position from others; threads, which come and go, do not count."""
        text = json.dumps(self.model_dump(exclude={"threads"}), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Profile(StrictConfig):
    """What was measured, and what was chosen.

    Attributes:
        draft: how to draft, where a call does not say.
        place: what the profile holds for.
        batch: rows that it was made for.
        temperature: that it was made for; 0 is greedy.
        times: one entry a batch.
        rates: one entry an exit head.
        predictions: one entry an exit head and length.
        validation: what was really run, fastest first, plain decoding (`none`) included.
        left_out: why a drafter was not run, by name.
        format_version: of the file.
    """

    draft: DraftConfig
    place: Place
    batch: int = Field(default=1, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    times: list[Times] = Field(default_factory=list)
    rates: list[ExitRates] = Field(default_factory=list)
    predictions: list[Prediction] = Field(default_factory=list)
    validation: list[Validation] = Field(default_factory=list)
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
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no valid JSON ({error}); tune again") from None
        if not isinstance(data, dict):
            raise ValueError(f"{path} must hold a JSON object, got a {type(data).__name__}")
        version = data.get("format_version")
        if version != _FORMAT:
            raise ValueError(
                f"{path} has format_version {version}, this version reads {_FORMAT}; tune again"
            )
        return parse(cls, data, str(path))

    def save(self, path: str | Path) -> None:
        """Write it to `path`, whose folder is made if it is not there."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as scratch:
            scratch.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    def foreign(self, decoder: Decoder) -> str | None:
        """Why it does not hold for a target where that stands; `None` if it does."""
        here = Place.of(decoder)
        for fact in ("device", "dtype", "kernels"):
            there, own = getattr(self.place, fact), getattr(here, fact)
            if there != own:
                return f"it was made for {fact} {there!r}, here it is {own!r}"
        different = differences(here.target, self.place.target)
        return f"it was made for another target: {'; '.join(different)}" if different else None


def exit_name(kind: str, exit_layer: int) -> str:
    """What profiles and displays call an exit head."""
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


# Where profiles lie: beside a target's heads or weights, or among the user's caches.

_PACKAGE = Path(__file__).parents[1]


def default_path(decoder: Decoder, folder: str | Path | None) -> Path:
    """Where the profile of a target goes: beside its files, or else among the user's caches.

    Args:
        decoder: the target.
        folder: of its heads or its weights, if it has one.
    """
    if folder is not None and Path(folder).is_dir() and _takes_files(Path(folder)):
        return Path(folder) / PROFILE_NAME
    return _cached(decoder)


def find_profile(decoder: Decoder, folders: Sequence[str | Path]) -> Path | None:
    """The profile beside the heads or the weights, or among the user's caches, if there is one."""
    beside = [Path(folder) / PROFILE_NAME for folder in folders]
    found = [path for path in beside if path.is_file()]
    if found or not _cache().is_dir():
        return found[0] if found else None
    path = _cached(decoder)
    return path if path.is_file() else None


def _takes_files(folder: Path) -> bool:
    """Whether files of the user's belong there: the package's own folders are not the user's."""
    return os.access(folder, os.W_OK) and _PACKAGE not in folder.resolve().parents


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "selfspec" / "profiles"


def _cached(decoder: Decoder) -> Path:
    return _cache() / f"{decoder.config.model_type}-{Place.of(decoder).digest}.json"
