"""Exit heads as a task: drafts of a frozen target, compared with what the target says itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from typing_extensions import Self

from selfspec.config import StrictConfig
from selfspec.decoder import Decoder
from selfspec.heads import ExitHead, build_head, check_distinct, head_class
from training.data import Batch, Blocks
from training.features import Reader, TargetReader, streams_of
from training.held_out import HeldOutDrafts
from training.lesson import Lesson
from training.losses import LossSchedule, draft_losses
from training.task import Task


class HeadConfig(StrictConfig):
    """An exit head to fit.

    Attributes:
        kind: `lens`, `lora`, `block` or `fused`; `shared` has nothing to fit, and is measured
            beside others.
        exit_layer: number of layers below the exit.
        options: what the kind takes: `rank`, `place`, `feature_layers`.
        vocab_size: tokens that it can draft, the most frequent of the training text; 0 for all.
    """

    kind: str
    exit_layer: int = Field(ge=0)
    options: dict[str, Any] = Field(default_factory=dict)
    vocab_size: int = Field(default=0, ge=0)

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        return head_class(kind).kind

    @field_validator("vocab_size")
    @classmethod
    def _leaves_a_choice(cls, size: int) -> int:
        if size == 1:
            raise ValueError("must leave a choice of at least 2 tokens, got 1; 0 keeps all")
        return size


class DraftLossConfig(StrictConfig):
    """What is minimised.

    Attributes:
        schedule: which loss, when.
        depths: tokens of a draft that are unrolled, for heads that feed on their own output.
        depth_weights: weight of each depth's loss; empty weighs all alike.
    """

    schedule: LossSchedule = LossSchedule()
    depths: int = Field(default=1, ge=1)
    depth_weights: list[float] = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_weight_a_depth(self) -> Self:
        if self.depth_weights and len(self.depth_weights) != self.depths:
            raise ValueError(
                f"depth_weights must have one weight for each of {self.depths} depths, "
                f"got {len(self.depth_weights)}"
            )
        if self.depth_weights and (min(self.depth_weights) < 0 or not sum(self.depth_weights)):
            raise ValueError(
                f"depth_weights must be at least 0, and one above, got {self.depth_weights}"
            )
        return self

    @property
    def weights(self) -> list[float]:
        """The weight of each depth; they add up to 1."""
        weights = self.depth_weights or [1.0] * self.depths
        return [weight / sum(weights) for weight in weights]


def build_heads(decoder: Decoder, configs: Sequence[HeadConfig]) -> list[ExitHead]:
    """The heads to fit, as they are before training, in float32 and over all tokens.

    Raises:
        ValueError: a head does not fit the target, or one stands there twice.
    """
    heads = [new_head(decoder, config) for config in configs]
    check_distinct(heads)
    return heads


def new_head(decoder: Decoder, config: HeadConfig) -> ExitHead:
    """A head before training, in float32 and over all tokens.

    Raises:
        ValueError: it does not fit the target.
    """
    return build_head(decoder, config.kind, config.exit_layer, config.options).float()


def trim_heads(
    decoder: Decoder,
    heads: Sequence[ExitHead],
    configs: Sequence[HeadConfig],
    text: Sequence[Blocks],
) -> None:
    """Make heads draft the most frequent tokens of a text alone, as many as `configs` say.

    Raises:
        ValueError: a vocabulary is not smaller than the target's.
    """
    for head, config in zip(heads, configs, strict=True):
        if config.vocab_size:
            head.trim(decoder, frequent_tokens(text, decoder.vocab_size, config.vocab_size))


def is_trained(head: ExitHead) -> bool:
    """Whether there is anything to fit."""
    return any(parameter.requires_grad for parameter in head.parameters())


def frequent_tokens(text: Sequence[Blocks], vocab_size: int, count: int) -> Tensor:
    """The `count` most frequent tokens of what is to be learned of a text, rising.

    Raises:
        ValueError: the vocabulary is no larger than that.
    """
    if count >= vocab_size:
        raise ValueError(
            f"a trimmed vocabulary must be smaller than the target's {vocab_size}, got {count}; "
            "0 keeps all of it"
        )
    learned = torch.cat([blocks.tokens[blocks.trained] for blocks in text]).long()
    # Among equals the lower id, which a byte-level vocabulary learnt earlier.
    seen = learned.bincount(minlength=vocab_size)
    return seen.argsort(descending=True, stable=True)[:count].sort().values


class ExitTask(Task):
    """Fits heads jointly on one frozen target, which reads every batch once for all of them.

    Args:
        decoder: the target.
        heads: the heads to fit.
        config: what is minimised.
        held_out: figures on held-out text.
        reader: what knows the target's view of a batch; runs the target by default.
    """

    name = "fitting"
    better = "rejected"

    def __init__(
        self,
        decoder: Decoder,
        heads: Sequence[ExitHead],
        config: DraftLossConfig,
        held_out: HeldOutDrafts,
        reader: Reader | None = None,
    ):
        super().__init__()
        self.target = decoder.causal_lm.requires_grad_(False).eval()
        self.heads = nn.ModuleList(heads)
        self.decoder, self.config, self.held_out = decoder, config, held_out
        self.reader = reader or TargetReader(decoder, streams_of(heads))
        # A shared head is there to be compared with.
        self._fitted = [head for head in heads if is_trained(head)]

    def train(self, mode: bool = True) -> Self:
        """Heads alone switch; the frozen target has no dropout."""
        super().train(mode)
        self.target.eval()
        return self

    def forward(self, batch: Batch, step: int, progress: float) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean of all heads' losses, and each head's own."""
        lesson = Lesson.of(self.decoder, batch, self.reader.read(batch))
        names = self.config.schedule.weights(progress)
        losses = {
            f"loss_{head.kind}_{head.exit_layer}": self._loss(head, lesson, names)
            for head in self._fitted
        }
        return torch.stack(list(losses.values())).mean(), losses

    def _loss(self, head: ExitHead, lesson: Lesson, names: Mapping[str, float]) -> Tensor:
        """The loss of one head, summed over positions; `names` are the losses and their weights."""
        weights = self.config.weights if head.feature_layers else [1.0]
        drafts = lesson.drafts(self.decoder, head, len(weights))
        total = lesson.target_logits.new_zeros((), dtype=torch.float32)
        for (logits, there), weight in zip(drafts, weights, strict=True):
            losses = draft_losses(
                names, lesson.target_logits, logits, lesson.following, head.vocab_ids
            )
            mixed = sum(share * losses[name] for name, share in names.items())
            total = total + weight * (mixed * there).sum()
        return total

    def evaluate(self) -> dict[str, float]:
        """α by head and depth, and their mean rejection."""
        figures: dict[str, float] = {}
        rejected: list[float] = []
        for head, drafts in zip(self.held_out.heads, self.held_out.measure(), strict=True):
            name = f"{head.kind}_{head.exit_layer}"
            ends = {1: drafts.alpha[0], len(drafts.alpha): drafts.alpha[-1]}
            figures |= {f"alpha_{name}_{depth}": value for depth, value in ends.items()}
            figures[f"top1_{name}"] = drafts.agreement[0]
            if is_trained(head):
                rejected.append(1 - sum(drafts.alpha) / len(drafts.alpha))
        return {**figures, "rejected": sum(rejected) / len(rejected)}
