"""The config of a fit, its target, heads and data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, field_validator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec import DEMO_MODEL, SelfSpecModel
from selfspec.config import StrictConfig
from selfspec.decoder import Decoder
from selfspec.decoder.checkpoints import load_causal_lm, load_config, load_tokenizer
from selfspec.heads import CARD_NAME, ExitHead, heads_card, load_heads, save_heads
from selfspec.heads.hub import DEMO

from ..data import Blocks, Mixture, SourceConfig, pack, tokenize
from ..loop.checkpoint import name_of, write_folder
from ..loop.loop import LoopConfig
from ..loop.optim import OptimizerConfig
from .features import FeaturesConfig
from .measure import MeasureConfig
from .task import DraftLossConfig, HeadConfig, new_head

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


def go_on_from(heads: Sequence[ExitHead], decoder: Decoder, folder: str) -> None:
    """Start heads from the weights of heads of the same kind and exit layer in `folder`.

    A trimmed head keeps its vocabulary.

    Raises:
        FileNotFoundError: there are no heads.
        ValueError: they were fitted to another target, none of them is among `heads`, or one has
            other options; a mask and a confidence output may be new.
    """
    saved = {(head.kind, head.exit_layer): head for head in load_heads(decoder, folder)}
    known = [head for head in heads if (head.kind, head.exit_layer) in saved]
    if not known:
        raise ValueError(f"start: none of the heads to fit is among {sorted(saved)} in {folder}")
    for head in known:
        before = saved[head.kind, head.exit_layer]
        new = {name: v for name, v in head.options.items() if name not in before.options}
        if before.options | new != head.options:
            raise ValueError(
                f"start: {folder} has {head.kind}@{head.exit_layer} with options {before.options}; "
                f"a fit goes on from the same options, got {head.options}"
            )
        if before.vocab_ids is not None:  # the head learned to choose among these tokens
            head.trim(decoder, before.vocab_ids)
        known_weights = before.state_dict()
        weights = {name: known_weights.get(name, own) for name, own in head.state_dict().items()}
        head.load_state_dict(weights)


def write_heads(
    config: FitConfig, heads: Sequence[ExitHead], spec: SelfSpecModel, fitted_by: Path
) -> Path:
    """Save heads, their card and the config of the fit, atomically.

    Args:
        config: the fit.
        heads: the fitted heads.
        spec: the target.
        fitted_by: the fit's config file.
    """
    told = fitted_by.read_text(encoding="utf-8")

    def fill(folder: Path) -> None:
        save_heads(heads, spec.decoder, folder, stored_dtype(config))
        (folder / CARD_NAME).write_text(heads_card(heads, config.target), encoding="utf-8")
        (folder / FIT_NAME).write_text(told, encoding="utf-8")

    write_folder(config.folder, fill)
    return config.folder


def stored_dtype(config: FitConfig) -> torch.dtype | None:
    """The dtype in which the target's weights are stored; heads get the same."""
    dtype = load_config(config.source).dtype
    return dtype if isinstance(dtype, torch.dtype) else None


def heads_of(
    config: FitConfig, spec: SelfSpecModel, weights: Sequence[Mapping[str, Tensor]]
) -> list[ExitHead]:
    """Heads with the fitted weights, gathered from shards."""
    heads: list[ExitHead] = []
    for each, state in zip(config.heads, weights, strict=True):
        head = new_head(spec.decoder, each)
        if "vocab_ids" in state:
            head.trim(spec.decoder, state["vocab_ids"])
        head.load_state_dict(state)
        head.facts["data"] = config.text_summary
        heads.append(head.eval().requires_grad_(False))
    return heads
