"""Fitting exit heads as a training task, and their acceptance on held-out text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from typing_extensions import Self

from selfspec.config import StrictConfig
from selfspec.decoder import Decoder
from selfspec.heads import Calibrator, ExitHead, build_head, check_distinct, head_class
from selfspec.heads.base import trimmed_lm_head
from selfspec.heads.teacher_forcing import (
    TargetStates,
    draft_states,
    is_unrolled,
    runs_targets_layer,
)

from ..data import Batch, Blocks, collate
from ..loop.loop import Task
from .features import Reader, streams_of, target_reader
from .losses import NO_TOKEN, LossSchedule, acceptance_rate, agreement, draft_losses


class DraftsAtDepth(NamedTuple):
    """The drafts of one head at one depth.

    Attributes:
        logits: `[m, head's vocabulary]` draft logits.
        there: `[n]` which of a lesson's positions they are: those with at least `depth` tokens of
            the document before them.
        confidence: `[m]` log odds of acceptance by the head's own output, `[0]` if it has none.
            They train that output alone.
    """

    logits: Tensor
    there: Tensor
    confidence: Tensor


class TargetBatch(NamedTuple):
    """The `n` positions of a batch with a target token.

    Attributes:
        reading: the target's hidden states for the batch.
        learned: `[rows, width]` whether a position is one of them.
        following: `[n]` the next tokens of the text.
    """

    reading: TargetStates
    learned: Tensor
    following: Tensor

    @classmethod
    def of(cls, batch: Batch, reading: TargetStates) -> TargetBatch:
        """The lesson of a batch."""
        learned = batch.targets != NO_TOKEN
        return cls(reading, learned, batch.targets[learned])

    @torch.no_grad()
    def target_logits(self, decoder: Decoder, lm_head: nn.Module | None = None) -> Tensor:
        """The target's logits `[n, vocab]` there, or `[n, rows]` of some rows of its LM head."""
        return decoder.unembed(self.reading.normed[self.learned][None], lm_head)[0]

    def drafts(
        self, decoder: Decoder, head: ExitHead, depths: int, share: float = 1.0
    ) -> Iterator[DraftsAtDepth]:
        """A head's drafts at these positions, by depth; one depth if it is not unrolled.

        Args:
            decoder: the target.
            head: the exit head.
            depths: number of depths.
            share: random share of the positions at one depth that is used at the next.
        """
        tokens = self.reading.tokens[self.learned]
        positions = self.reading.packing.positions[self.learned]
        for depth, state in enumerate(draft_states(decoder, head, self.reading, depths)):
            there = positions >= depth + head.skips_first
            if share < 1 and depth:
                there &= torch.rand(there.shape, device=there.device) < share**depth
            state = state[self.learned][there][None]
            logits = head.draft_logits(decoder, state, depth, tokens[there][None])[0]
            confidence = logits.new_zeros(0)
            if head.confidence is not None:
                confidence = head.acceptance_odds(state, tokens[there][None])[0]
            yield DraftsAtDepth(logits, there, confidence)


@dataclass
class Drafts:
    """The drafts of one head on held-out text.

    Attributes:
        agreement: by depth, how often the draft's top token is the target's.
        alpha: by depth, the mean of Σ min(p, q).
        features: `[n, 4]` the calibrator's features of every draft; `[n, 0]` unless asked for.
        agreed: `[n]` whether the top token was the target's, 1 or 0.
        accepted: `[n]` Σ min(p, q).
        confidence: `[n]` what the head's own output predicts of the last; `[0]` without it.
    """

    agreement: list[float]
    alpha: list[float]
    features: Tensor
    agreed: Tensor
    accepted: Tensor
    confidence: Tensor


class _HeldOutPart(NamedTuple):
    """Some drafts of one head, as in `Drafts`."""

    agreed: Tensor
    accepted: Tensor
    features: Tensor
    confidence: Tensor

    @classmethod
    def all_of(cls, parts: Sequence[_HeldOutPart]) -> _HeldOutPart:
        return cls(*(torch.cat(column) for column in zip(*parts, strict=True)))


class HeldOutDrafts:
    """Heads' drafts on held-out blocks, with teacher forcing and the heads' own output fed back.

    Args:
        decoder: the target.
        heads: exit heads.
        blocks: held-out text.
        depths: number of draft positions.
        most: number of evenly spaced blocks to read; 0 reads all.
        rows: blocks of one pass.

    Raises:
        ValueError: no document is long enough, or the target does not support unrolling.
    """

    def __init__(
        self,
        decoder: Decoder,
        heads: Sequence[ExitHead],
        blocks: Blocks,
        depths: int,
        most: int = 0,
        rows: int = 8,
    ):
        self.decoder, self.heads, self.depths, self.rows = decoder, heads, depths, rows
        count = len(blocks)
        chosen = range(0, count, -(-count // most) if most else 1)
        self.blocks = [blocks[number] for number in chosen]
        self._read = target_reader(decoder, streams_of(heads))
        self._check()

    @property
    def positions(self) -> int:
        """Number of positions at the first depth."""
        return sum(int((block.targets != NO_TOKEN).sum()) for block in self.blocks)

    def _check(self) -> None:
        biased = self.decoder.counts_keys and any(map(runs_targets_layer, self.heads))
        if biased and self.depths > 1:
            raise ValueError(
                f"heads on a {type(self.decoder.causal_lm).__name__} cannot be unrolled: its "
                f"attention is biased by the index of a key; depths must be 1, got {self.depths}"
            )
        places = torch.cat([block.positions[block.targets != NO_TOKEN] for block in self.blocks])
        fewest = self.depths - 1 + any(head.skips_first for head in self.heads)
        if not (places >= fewest).any():
            raise ValueError(
                f"no held-out document that is read has {fewest + 1} tokens before one that is "
                f"to be learned, for drafts {self.depths} deep; give more text, or fewer depths"
            )

    @torch.no_grad()
    def measure(self, with_features: bool = False) -> list[Drafts]:
        """The drafts of every head, in order."""
        seen: list[list[list[_HeldOutPart]]] = [[] for _ in self.heads]
        for batch in self._batches():
            lesson = TargetBatch.of(batch, self._read(batch))
            every = lesson.target_logits(self.decoder)
            for parts, head in zip(seen, self.heads, strict=True):
                parts.append(list(self._measure_batch(lesson, every, head, with_features)))
        return [self._sum_up(parts) for parts in seen]

    def _batches(self) -> Iterator[Batch]:
        for start in range(0, len(self.blocks), self.rows):
            yield collate(self.blocks[start : start + self.rows]).to(self.decoder.device)

    def _measure_batch(
        self, lesson: TargetBatch, every: Tensor, head: ExitHead, with_features: bool
    ) -> Iterator[_HeldOutPart]:
        drafts = lesson.drafts(self.decoder, head, self.depths)
        for depth, (logits, there, confidence) in enumerate(drafts):
            target_logits = every[there]
            features = Calibrator.features(logits, depth) if with_features else logits[:, :0]
            yield _HeldOutPart(
                agreement(target_logits, logits, head.vocab_ids).float().cpu(),
                acceptance_rate(target_logits, logits, head.vocab_ids).cpu(),
                features.cpu(),
                confidence.float().sigmoid().cpu(),
            )

    def _sum_up(self, parts: Sequence[Sequence[_HeldOutPart]]) -> Drafts:
        """Join the drafts of one head; each part holds those of a batch, by depth."""
        by_depth = [_HeldOutPart.all_of(depth) for depth in zip(*parts, strict=True)]
        # A head without features predicts the same at every depth; a Medusa head drafts no token
        # beyond its last position.
        repeat = self.depths if len(by_depth) == 1 else 1
        beyond = [0.0] * (self.depths - repeat * len(by_depth))
        every = _HeldOutPart.all_of(by_depth)
        return Drafts(
            agreement=[float(seen.agreed.mean()) for seen in by_depth] * repeat + beyond,
            alpha=[float(seen.accepted.mean()) for seen in by_depth] * repeat + beyond,
            features=every.features,
            agreed=every.agreed,
            accepted=every.accepted,
            confidence=every.confidence,
        )


class HeadConfig(StrictConfig):
    """An exit head to fit.

    Attributes:
        kind: `lens`, `lora`, `block`, `fused`, `eagle3`, `dflash`, `eagle`, `medusa` or `mtp`;
            `shared` has nothing to fit and is only measured.
        exit_layer: number of layers below the exit; 0 for the last four.
        options: options of the kind: `rank`, `place`, `feature_layers`, `heads` and so on.
        vocab_size: size of the draft vocabulary, the most frequent tokens of the training text; 0
            for all tokens.
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


def build_heads(decoder: Decoder, configs: Sequence[HeadConfig]) -> list[ExitHead]:
    """The untrained heads, in float32 and over all tokens.

    Raises:
        ValueError: a head does not fit the target, or is there twice.
    """
    heads = [new_head(decoder, config) for config in configs]
    check_distinct(heads)
    return heads


def new_head(decoder: Decoder, config: HeadConfig) -> ExitHead:
    """An untrained head, in float32 and over all tokens.

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
    """Restrict heads to the most frequent tokens of a text, as `configs` ask for.

    A head that goes on from a trimmed one has its vocabulary already.

    Raises:
        ValueError: a vocabulary is not smaller than the target's, or has another size than that
            of the head to continue from.
    """
    for head, config in zip(heads, configs, strict=True):
        known = None if head.vocab_ids is None else len(head.vocab_ids)
        if known not in (None, config.vocab_size):
            raise ValueError(
                f"start: {head.kind}@{head.exit_layer} drafts {known} tokens, and heads ask for "
                f"vocab_size={config.vocab_size}; give vocab_size={known}, or begin anew"
            )
        if config.vocab_size and known is None:
            head.trim(decoder, frequent_tokens(text, decoder.vocab_size, config.vocab_size))


def is_trained(head: ExitHead) -> bool:
    """Whether there is anything to fit."""
    return any(parameter.requires_grad for parameter in head.parameters())


def frequent_tokens(text: Sequence[Blocks], vocab_size: int, count: int) -> Tensor:
    """The ids of the `count` most frequent target tokens of a text, rising.

    Raises:
        ValueError: the vocabulary is no larger than that.
    """
    if count >= vocab_size:
        raise ValueError(
            f"a trimmed vocabulary must be smaller than the target's {vocab_size}, got {count}; "
            "0 keeps all of it"
        )
    learned = torch.cat([blocks.tokens[blocks.trained] for blocks in text]).long()
    # Ties go to the lower id, which a byte-level vocabulary learned earlier.
    seen = learned.bincount(minlength=vocab_size)
    return seen.argsort(descending=True, stable=True)[:count].sort().values


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
