"""Exit heads as a task: drafts of a frozen target, compared with what the target says itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import Self

from selfspec.config import StrictConfig
from selfspec.decoder import Decoder
from selfspec.forcing import Reading, draft_states, needs, read_text
from selfspec.heads import ExitHead, check_exit_layer, head_class
from training.data import Batch, Blocks
from training.held_out import HeldOutDrafts
from training.losses import LossSchedule, draft_losses
from training.task import Task


class HeadConfig(StrictConfig):
    """An exit head to fit.

    Attributes:
        kind: `lens`, `lora`, `block` or `fused` (`shared` has nothing to fit, and can be measured).
        exit_layer: number of layers below the exit.
        options: what the kind takes: `rank`, `place`, `feature_layers`.
        vocab_size: tokens that it can draft, the most frequent of the training text; 0 for all.
    """

    kind: str
    exit_layer: int = Field(ge=0)
    options: dict[str, Any] = Field(default_factory=dict)
    vocab_size: int = Field(default=0, ge=0)


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
        return self

    @property
    def weights(self) -> list[float]:
        """The weight of each depth; they add up to 1."""
        weights = self.depth_weights or [1.0] * self.depths
        return [weight / sum(weights) for weight in weights]


def build_heads(
    decoder: Decoder, configs: Sequence[HeadConfig], text: Sequence[Blocks]
) -> list[ExitHead]:
    """The heads to fit, as they are before training, in float32.

    Args:
        decoder: the target.
        configs: what to build.
        text: training text, whose most frequent tokens a trimmed vocabulary keeps.

    Raises:
        ValueError: a kind is unknown, an exit is out of range, or one stands there twice.
    """
    heads: list[ExitHead] = []
    for config in configs:
        if any((h.kind, h.exit_layer) == (config.kind, config.exit_layer) for h in heads):
            raise ValueError(
                f"heads: {config.kind} at exit_layer {config.exit_layer} stands there twice; "
                "give each exit one head of a kind"
            )
        trimmed = config.vocab_size > 0
        vocab_ids = (
            frequent_tokens(text, decoder.vocab_size, config.vocab_size) if trimmed else None
        )
        heads.append(new_head(decoder, config, vocab_ids))
    return heads


def new_head(decoder: Decoder, config: HeadConfig, vocab_ids: Tensor | None) -> ExitHead:
    """A head before training, in float32, that drafts `vocab_ids` (all tokens without).

    Raises:
        ValueError: the kind is unknown, or the exit is out of range.
    """
    kind = head_class(config.kind)
    check_exit_layer(decoder, config.exit_layer, kind.lowest_exit)
    head = kind.build(decoder, config.exit_layer, **config.options)
    if vocab_ids is not None:
        head.trim(decoder, vocab_ids)
    return head.float()


def frequent_tokens(text: Sequence[Blocks], vocab_size: int, count: int) -> Tensor:
    """The `count` most frequent tokens of a text, rising.

    Raises:
        ValueError: the vocabulary is no larger than that.
    """
    if count >= vocab_size:
        raise ValueError(
            f"a trimmed vocabulary must be smaller than the target's {vocab_size}, got {count}; "
            "0 keeps all of it"
        )
    seen = sum(torch.bincount(blocks.tokens.long(), minlength=vocab_size) for blocks in text)
    assert isinstance(seen, Tensor)
    # Among equals the lower id, which a byte-level vocabulary learnt earlier.
    return seen.argsort(descending=True, stable=True)[:count].sort().values


class ExitTask(Task):
    """Fits heads jointly on one frozen target, which reads every batch once for all of them.

    Args:
        decoder: the target.
        heads: the heads to fit.
        config: what is minimised.
        held_out: figures on held-out text.
    """

    name = "fitting"
    better = "rejected"

    def __init__(
        self,
        decoder: Decoder,
        heads: Sequence[ExitHead],
        config: DraftLossConfig,
        held_out: HeldOutDrafts,
    ):
        super().__init__()
        self.target = decoder.causal_lm.requires_grad_(False).eval()
        self.heads = nn.ModuleList(heads)
        self.decoder, self.config, self.held_out = decoder, config, held_out
        self._streams = sorted({layer for head in heads for layer in needs(head)})

    def train(self, mode: bool = True) -> Self:
        """Heads alone switch; the frozen target has no dropout."""
        super().train(mode)
        self.target.eval()
        return self

    def forward(self, batch: Batch, step: int, progress: float) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean of all heads' losses, and each head's own."""
        reading = read_text(self.decoder, batch.tokens, batch.documents, self._streams)
        learned = batch.targets != -100
        with torch.no_grad():
            target_logits = self.decoder.unembed(reading.normed[learned][None])[0]
        following = batch.targets[learned]
        losses = {
            f"loss_{head.kind}_{head.exit_layer}": self._loss(
                head, reading, learned, target_logits, following, progress
            )
            for head in self.heads
            if isinstance(head, ExitHead)
        }
        return torch.stack(list(losses.values())).mean(), losses

    def _loss(
        self,
        head: ExitHead,
        reading: Reading,
        learned: Tensor,
        target_logits: Tensor,
        following: Tensor,
        progress: float,
    ) -> Tensor:
        names = self.config.schedule.weights(progress)
        depths = self.config.depths if head.feature_layers else 1
        weights = self.config.weights if depths > 1 else [1.0]
        states = draft_states(self.decoder, head, reading, depths)
        total = target_logits.new_zeros((), dtype=torch.float32)
        for depth, (state, weight) in enumerate(zip(states, weights, strict=True)):
            logits = head.logits(self.decoder, state[learned][None])[0]
            losses = draft_losses(names, target_logits, logits, following, head.vocab_ids)
            # A draft this deep needs as many tokens of its document before it.
            there = reading.packing.positions[learned] >= depth
            mixed = sum(share * losses[name] for name, share in names.items())
            total = total + weight * (mixed * there).sum()
        return total

    def evaluate(self) -> dict[str, float]:
        """α by head and depth, and their mean rejection."""
        figures: dict[str, float] = {}
        rejected: list[float] = []
        for head, drafts in zip(self.heads, self.held_out.measure(), strict=True):
            assert isinstance(head, ExitHead)
            name = f"{head.kind}_{head.exit_layer}"
            ends = {1: drafts.alpha[0], len(drafts.alpha): drafts.alpha[-1]}
            figures |= {f"alpha_{name}_{depth}": value for depth, value in ends.items()}
            figures[f"top1_{name}"] = drafts.agreement[0]
            rejected.append(1 - sum(drafts.alpha) / len(drafts.alpha))
        return {**figures, "rejected": sum(rejected) / len(rejected)}
