"""A profile: what `selfspec tune` measured on a device, and the draft that it chose.

It holds for one target in one dtype on one device; anywhere else it is left alone.
"""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from selfspec.config import DraftConfig, Kernels, StrictConfig, parse
from selfspec.decoder import Decoder
from selfspec.heads.store import differences, fingerprint, replacing
from selfspec.schedule.prediction import interpolated

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
        """Tells this place from others; threads, which come and go, do not count."""
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
        left_out: why a way to draft was not run, by name.
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
