"""Acceptance on held-out text, by head and draft depth, and the drafts that calibrators see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from selfspec.decoder import Decoder
from selfspec.forcing import Reading, draft_states, needs, read_text
from selfspec.heads import Calibrator, ExitHead
from training.data import Blocks, collate
from training.losses import acceptance_rate, agreement


@dataclass
class Drafts:
    """What was drafted over held-out text by one head.

    Attributes:
        agreement: by depth, how often the draft's top token is the target's.
        alpha: by depth, the mean of Σ min(p, q).
        features: `[n, 4]` a calibrator's features of every draft, where they were asked for.
        agreed: `[n]` whether the top token was the target's.
        accepted: `[n]` Σ min(p, q).
    """

    agreement: list[float]
    alpha: list[float]
    features: Tensor = field(default_factory=lambda: torch.empty(0, 4))
    agreed: Tensor = field(default_factory=lambda: torch.empty(0))
    accepted: Tensor = field(default_factory=lambda: torch.empty(0))


class HeldOutDrafts:
    """Held-out blocks, and how heads draft over them (teacher-forced, own output fed back).

    Args:
        decoder: the target.
        heads: exit heads.
        blocks: held-out text.
        depths: tokens of a draft that are looked at.
        most: blocks that are read, at even distances; 0 reads all.
        rows: blocks of one pass.
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
        self._streams = sorted({layer for head in heads for layer in needs(head)})

    @torch.no_grad()
    def measure(self, with_features: bool = False) -> list[Drafts]:
        """The drafts of every head, in their order."""
        parts: list[list[list[Tensor]]] = [[] for _ in self.heads]
        for start in range(0, len(self.blocks), self.rows):
            batch = collate(self.blocks[start : start + self.rows]).to(self.decoder.device)
            reading = read_text(self.decoder, batch.tokens, batch.documents, self._streams)
            learned = batch.targets != -100
            target_logits = self.decoder.unembed(reading.normed[learned][None])[0]
            for part, head in zip(parts, self.heads, strict=True):
                part.extend(self._drafts(head, reading, learned, target_logits, with_features))
        return [self._sum_up(part, with_features) for part in parts]

    def _drafts(
        self,
        head: ExitHead,
        reading: Reading,
        learned: Tensor,
        target_logits: Tensor,
        with_features: bool,
    ) -> Iterator[list[Tensor]]:
        """Per depth: the depth, what agreed, what is accepted, and features."""
        states = draft_states(self.decoder, head, reading, self.depths)
        for depth, state in enumerate(states):
            there = reading.packing.positions[learned] >= depth
            logits = head.logits(self.decoder, state[learned][None])[0][there]
            compared = target_logits[there]
            yield [
                torch.tensor(depth),
                agreement(compared, logits, head.vocab_ids).float().cpu(),
                acceptance_rate(compared, logits, head.vocab_ids).cpu(),
                Calibrator.features(logits, depth).cpu() if with_features else torch.empty(0, 4),
            ]

    def _sum_up(self, parts: list[list[Tensor]], with_features: bool) -> Drafts:
        by_depth: dict[int, list[list[Tensor]]] = {}
        for depth, *rest in parts:
            by_depth.setdefault(int(depth), []).append(rest)
        joined = [
            [torch.cat(column) for column in zip(*by_depth[depth], strict=True)]
            for depth in sorted(by_depth)
        ]
        agreed, alpha = ([float(row[i].mean()) for row in joined] for i in (0, 1))
        # A head that is not unrolled says the same at every depth.
        repeat = self.depths if len(joined) == 1 else 1
        drafts = Drafts(agreed * repeat, alpha * repeat)
        if with_features:
            drafts.agreed, drafts.accepted, drafts.features = (
                torch.cat([row[i] for row in joined]) for i in range(3)
            )
        return drafts
