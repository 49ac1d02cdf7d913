"""Acceptance on held-out text, by head and draft depth, and the drafts that calibrators see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.decoder import Decoder
from selfspec.heads import Calibrator, ExitHead
from training.data import Batch, Blocks, collate
from training.features import TargetReader, streams_of
from training.lesson import Lesson
from training.losses import NO_TOKEN, acceptance_rate, agreement


@dataclass
class Drafts:
    """What was drafted over held-out text by one head.

    Attributes:
        agreement: by depth, how often the draft's top token is the target's.
        alpha: by depth, the mean of Σ min(p, q).
        features: `[n, 4]` a calibrator's features of every draft, of all depths; `[n, 0]` unless
            they were asked for.
        agreed: `[n]` whether the top token was the target's, 1 or 0.
        accepted: `[n]` Σ min(p, q).
    """

    agreement: list[float]
    alpha: list[float]
    features: Tensor
    agreed: Tensor
    accepted: Tensor


class _Seen(NamedTuple):
    """Some drafts of one head, as in `Drafts`."""

    agreed: Tensor
    accepted: Tensor
    features: Tensor

    @classmethod
    def all_of(cls, parts: Sequence[_Seen]) -> _Seen:
        return cls(*(torch.cat(column) for column in zip(*parts, strict=True)))


class HeldOutDrafts:
    """Held-out blocks, and how heads draft over them (teacher-forced, own output fed back).

    Args:
        decoder: the target.
        heads: exit heads.
        blocks: held-out text.
        depths: tokens of a draft that are looked at.
        most: blocks that are read, at even distances; 0 reads all.
        rows: blocks of one pass.

    Raises:
        ValueError: no document is long enough for a draft of that depth, or heads that would be
            unrolled stand on a target that does not allow it.
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
        self._reader = TargetReader(decoder, streams_of(heads))
        self._check()

    @property
    def positions(self) -> int:
        """Tokens that are drafted at, at the first depth."""
        return sum(int((block.targets != NO_TOKEN).sum()) for block in self.blocks)

    def _check(self) -> None:
        unrolled = self.depths > 1 and any(head.feature_layers for head in self.heads)
        if unrolled and self.decoder.counts_keys:
            raise ValueError(
                f"heads on a {type(self.decoder.causal_lm).__name__} cannot be unrolled: its "
                f"attention is biased by the number of a key; depths must be 1, got {self.depths}"
            )
        places = torch.cat([block.positions[block.targets != NO_TOKEN] for block in self.blocks])
        if not (places >= self.depths - 1).any():
            raise ValueError(
                f"no held-out document that is read has {self.depths} tokens before one that is "
                f"to be learned, for drafts {self.depths} deep; give more text, or fewer depths"
            )

    @torch.no_grad()
    def measure(self, with_features: bool = False) -> list[Drafts]:
        """The drafts of every head, in their order."""
        seen: list[list[list[_Seen]]] = [[] for _ in self.heads]
        for batch in self._batches():
            lesson = Lesson.of(self.decoder, batch, self._reader.read(batch))
            for parts, head in zip(seen, self.heads, strict=True):
                parts.append(list(self._look(lesson, head, with_features)))
        return [self._sum_up(parts) for parts in seen]

    def _batches(self) -> Iterator[Batch]:
        for start in range(0, len(self.blocks), self.rows):
            yield collate(self.blocks[start : start + self.rows]).to(self.decoder.device)

    def _look(self, lesson: Lesson, head: ExitHead, with_features: bool) -> Iterator[_Seen]:
        drafts = lesson.drafts(self.decoder, head, self.depths)
        for depth, (logits, there) in enumerate(drafts):
            target_logits, logits = lesson.target_logits[there], logits[there]
            features = Calibrator.features(logits, depth) if with_features else logits[:, :0]
            yield _Seen(
                agreement(target_logits, logits, head.vocab_ids).float().cpu(),
                acceptance_rate(target_logits, logits, head.vocab_ids).cpu(),
                features.cpu(),
            )

    def _sum_up(self, parts: Sequence[Sequence[_Seen]]) -> Drafts:
        """All batches' drafts of one head; each part holds one batch's, by depth."""
        by_depth = [_Seen.all_of(depth) for depth in zip(*parts, strict=True)]
        # A head that is not unrolled says the same at every depth.
        repeat = self.depths if len(by_depth) == 1 else 1
        every = _Seen.all_of(by_depth)
        return Drafts(
            agreement=[float(seen.agreed.mean()) for seen in by_depth] * repeat,
            alpha=[float(seen.accepted.mean()) for seen in by_depth] * repeat,
            features=every.features,
            agreed=every.agreed,
            accepted=every.accepted,
        )
