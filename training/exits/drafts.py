"""Heads' drafts with teacher forcing: of a training batch, and on held-out text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from selfspec.decoder import Decoder
from selfspec.heads import Calibrator, ExitHead
from selfspec.heads.teacher_forcing import TargetStates, draft_states, runs_targets_layer

from ..data import Batch, Blocks, collate
from .features import streams_of, target_reader
from .losses import NO_TOKEN, acceptance_rate, agreement


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
