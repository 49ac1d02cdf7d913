"""The config of a fit, its target and text, and the files of its heads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, field_validator
from transformers import PreTrainedTokenizerBase

from selfspec import DEMO_MODEL, SelfSpecModel
from selfspec.config import StrictConfig
from selfspec.decoder.checkpoints import load_causal_lm, load_config, load_tokenizer
from selfspec.heads import CARD_NAME, ExitHead, heads_card, save_heads
from selfspec.heads.files import replace_text
from selfspec.heads.hub import DEMO

from ..data import Blocks, Mixture, SourceConfig, pack, tokenize
from ..loop.checkpoint import name_of, write_folder
from ..loop.loop import LoopConfig
from ..loop.optim import OptimizerConfig
from .features import FeaturesConfig
from .heads import HeadConfig
from .measure import MeasureConfig
from .task import DraftLossConfig

FIT_NAME = "fit.yaml"


class FitConfig(StrictConfig):
    """A fit of exit heads.

    Attributes:
        output: folder of the run; heads are written to `heads` in it.
        target: a checkpoint's folder or model id; `demo` is the one in the package.
        heads: the heads to fit, jointly.
        start: folder of saved heads; heads that are among them start from their weights, others
            from scratch.
        data: training text, each source with its weight.
        block_size: tokens of a block.
        features: cache of the target's hidden states; without, the target runs over every batch.
        loss: the loss.
        optimizer: the optimizer.
        loop: length, batches and checkpoints.
        held_out: text for calibration and figures, by domain; never trained on.
        held_out_share: without such text, the share of every source, at its end, that is held out.
        measure: what is measured on it.
    """

    output: str
    target: str = "demo"
    heads: list[HeadConfig] = Field(min_length=1)
    start: str | None = None
    data: list[SourceConfig] = Field(min_length=1)
    block_size: int = Field(default=256, ge=8)
    features: FeaturesConfig | None = None
    loss: DraftLossConfig = DraftLossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loop: LoopConfig = LoopConfig()
    held_out: dict[str, SourceConfig] = Field(default_factory=dict)
    held_out_share: float = Field(default=0.05, gt=0, lt=1)
    measure: MeasureConfig = MeasureConfig()

    @field_validator("heads", mode="before")
    @classmethod
    def _is_a_list(cls, heads: object) -> object:
        if not isinstance(heads, list):
            raise ValueError(
                f"must be a list, such as [{{kind: lens, exit_layer: 4}}], got {heads!r:.60}"
            )
        return heads

    @field_validator("heads")
    @classmethod
    def _has_something_to_fit(cls, heads: list[HeadConfig]) -> list[HeadConfig]:
        if all(head.kind == "shared" for head in heads):
            raise ValueError(
                "a shared head has nothing to fit; add a lens, lora, block or fused head, beside "
                "which it is measured"
            )
        return heads

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that must not change when the run is resumed."""
        names = ("target", "heads", "start", "data", "block_size", "loss", "optimizer")
        parts: dict[str, Any] = {**dict.fromkeys(names, True), "features": {"dtype"}}
        told = self.model_dump(mode="json", include=parts)
        return {**told, "target": name_of(self.target), "loop": self.loop.identity}

    @property
    def source(self) -> str:
        """The target's folder or id."""
        return str(DEMO_MODEL) if self.target == DEMO else self.target

    @property
    def folder(self) -> Path:
        """The folder of the heads."""
        return Path(self.output) / "heads"

    @property
    def text_summary(self) -> list[str]:
        """The training text in words."""
        total = sum(source.weight for source in self.data)
        return [f"{source.name} ({source.weight / total:.0%})" for source in self.data]

    @property
    def code(self) -> str:
        """The line of Python that loads the heads, from any working directory."""
        target = "selfspec.DEMO_MODEL" if self.target == DEMO else repr(name_of(self.target))
        arguments = f"{target}, heads={str(self.folder.absolute())!r}"
        return f"import selfspec; spec = selfspec.SelfSpecModel.from_pretrained({arguments})"

    def load_target(self) -> tuple[SelfSpecModel, PreTrainedTokenizerBase]:
        """The frozen target, without heads, and its tokenizer.

        It is in bfloat16 if the fit computes in it, so that no pass converts weights.
        """
        dtype = torch.bfloat16 if self.loop.precision == "bf16" else torch.float32
        model = load_causal_lm(self.source, dtype=dtype)
        return SelfSpecModel(model), load_tokenizer(self.source)

    def read_text(self, tokenizer: PreTrainedTokenizerBase) -> tuple[Mixture, dict[str, Blocks]]:
        """The training text, and the held-out blocks of each domain."""
        data = Mixture.read(self.data, tokenizer, self.block_size, self.loop.seed)
        if self.held_out:
            return data, self.read_held_out(tokenizer)
        data, ends = data.without_ends(self.held_out_share)
        names = ["held out"] if len(ends) == 1 else [f"source {n + 1}" for n in range(len(ends))]
        return data, dict(zip(names, ends, strict=True))

    def read_held_out(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Blocks]:
        """The held-out blocks of each domain."""
        if not self.held_out:
            return self.read_text(tokenizer)[1]
        return {
            name: pack(tokenize(source, tokenizer), self.block_size, source.name)
            for name, source in self.held_out.items()
        }


def write_heads(
    config: FitConfig, heads: Sequence[ExitHead], spec: SelfSpecModel, fitted_by: Path
) -> Path:
    """Save heads, their card and the config of the fit, atomically, in a new folder.

    Args:
        config: the fit.
        heads: the fitted heads.
        spec: the target.
        fitted_by: the fit's config file.
    """
    told = fitted_by.read_text(encoding="utf-8")

    def fill(folder: Path) -> None:
        _write_into(folder, config, heads, spec)
        (folder / FIT_NAME).write_text(told, encoding="utf-8")

    write_folder(config.folder, fill)
    return config.folder


def rewrite_heads(config: FitConfig, heads: Sequence[ExitHead], spec: SelfSpecModel) -> None:
    """Save measured heads and their card anew; what else is in the folder, as a profile, stays."""
    _write_into(config.folder, config, heads, spec)


def _write_into(
    folder: Path, config: FitConfig, heads: Sequence[ExitHead], spec: SelfSpecModel
) -> None:
    save_heads(heads, spec.decoder, folder, stored_dtype(config))
    replace_text(folder / CARD_NAME, heads_card(heads, config.target))


def stored_dtype(config: FitConfig) -> torch.dtype | None:
    """The dtype in which the target's weights are stored; heads get the same."""
    dtype = load_config(config.source).dtype
    return dtype if isinstance(dtype, torch.dtype) else None
