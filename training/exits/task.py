"""Fitting exit heads as a training task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from typing_extensions import Self

from selfspec.config import StrictConfig
from selfspec.decoder import Decoder
from selfspec.heads import ExitHead
from selfspec.heads.base import trimmed_lm_head
from selfspec.heads.teacher_forcing import is_unrolled

from ..data import Batch
from ..loop.loop import Task
from .drafts import HeldOutDrafts, TargetBatch
from .features import Reader, streams_of, target_reader
from .heads import is_trained
from .losses import LossSchedule, draft_losses


class DraftLossConfig(StrictConfig):
    """The training loss.

    Attributes:
        schedule: which loss is used when.
        depths: unrolled draft steps, for heads that use their own output or masks.
        depth_weights: weight of each depth; empty for equal weights.
        share: random share of the positions at one depth that is trained at the next, as in
            P-EAGLE; less than 1 saves memory and time.
        unroll_from: share of the run before which only the first draft is trained. Later drafts
            read the head's own output, which tells nothing until the first one is learned.
    """

    schedule: LossSchedule = LossSchedule()
    depths: int = Field(default=1, ge=1)
    depth_weights: list[float] = Field(default_factory=list)
    share: float = Field(default=1.0, gt=0, le=1)
    unroll_from: float = Field(default=0.0, ge=0, lt=1)

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

    def weights(self, progress: float) -> list[float]:
        """The weight of each depth that is trained after the share `progress` of the run.

        They add up to 1.
        """
        weights = self.depth_weights or [1.0] * self.depths
        weights = weights if progress >= self.unroll_from else [1.0]
        return [weight / sum(weights) for weight in weights]


class ExitTask(Task):
    """Fits heads jointly on one frozen target, which runs once per batch.

    Args:
        decoder: the target.
        heads: the heads to fit.
        config: the loss.
        held_out: drafts on held-out text.
        reader: provides the target's hidden states; runs the target by default.
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
        self.reader = reader or target_reader(decoder, streams_of(heads))
        # A shared head is only measured.
        self._fitted = [head for head in heads if is_trained(head)]
        self._rows = [self._target_rows(head) for head in self._fitted]
        for head in self._fitted:
            if head.longest is not None and config.depths < head.longest:
                raise ValueError(
                    f"a {head.kind} head that drafts {head.longest} tokens is trained on as many "
                    f"depths; set loss.depths={head.longest}, got {config.depths}"
                )

    def _target_rows(self, head: ExitHead) -> nn.Module | None:
        """The rows of the target's LM head that a head's loss reads; `None` for all of them.

        The divergence over a trimmed vocabulary depends on no other logits.
        """
        everywhere = self.config.schedule.reads_all or head.confidence is not None
        if everywhere or head.vocab_ids is None:
            return None
        return trimmed_lm_head(self.decoder, head.vocab_ids)

    def train(self, mode: bool = True) -> Self:
        """Switch the heads; the frozen target stays in evaluation mode."""
        super().train(mode)
        self.target.eval()
        return self

    def forward(self, batch: Batch, step: int, progress: float) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean of all heads' losses, and each head's own."""
        lesson = TargetBatch.of(batch, self.reader(batch))
        names, losses = self.config.schedule.weights(progress), {}
        every = lesson.target_logits(self.decoder) if None in self._rows else None
        for head, rows in zip(self._fitted, self._rows, strict=True):
            target = every if rows is None else lesson.target_logits(self.decoder, rows)
            assert target is not None
            loss = self._loss(head, lesson, target, names, progress)
            losses[f"loss_{head.kind}_{head.exit_layer}"] = loss
        return torch.stack(list(losses.values())).mean(), losses

    def _loss(
        self,
        head: ExitHead,
        lesson: TargetBatch,
        target_logits: Tensor,
        names: Mapping[str, float],
        progress: float,
    ) -> Tensor:
        """The loss of one head, summed over positions.

        Args:
            head: the head.
            lesson: the positions.
            target_logits: the target's logits there, of all tokens or of the head's.
            names: the losses and their weights.
            progress: share of the run that is done.
        """
        weights = self.config.weights(progress)[: head.longest] if is_unrolled(head) else [1.0]
        share = self.config.share
        vocab_ids = None
        if head.vocab_ids is not None and target_logits.shape[-1] != len(head.vocab_ids):
            vocab_ids = head.vocab_ids
        drafts = lesson.drafts(self.decoder, head, len(weights), share)
        total = target_logits.new_zeros((), dtype=torch.float32)
        for depth, (drafted, weight) in enumerate(zip(drafts, weights, strict=True)):
            logits, there, confidence = drafted
            target, following = target_logits[there], lesson.following[there]
            wanted = names if head.confidence is None else {*names, "acceptance"}
            losses = draft_losses(wanted, target, logits, following, vocab_ids)
            mixed = sum(part * losses[name].sum() for name, part in names.items())
            if head.confidence is not None:
                accepted = losses["acceptance"].detach().neg().exp()
                mixed = mixed + binary_cross_entropy_with_logits(
                    confidence.float(), accepted.float(), reduction="sum"
                )
            total = total + weight / share**depth * mixed
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
