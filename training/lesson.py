"""What a batch of text has to teach an exit head: the target's distributions, and the drafts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.decoder import Decoder
from selfspec.heads import ExitHead
from selfspec.heads.teacher_forcing import TargetStates, draft_states
from training.data import Batch
from training.losses import NO_TOKEN


class Lesson(NamedTuple):
    """The positions of a batch whose next token is to be learned; `n` of them.

    Attributes:
        reading: the target's view of the batch.
        learned: `[rows, width]` which positions they are.
        target_logits: `[n, vocab]` what the target says there.
        following: `[n]` the text's next tokens.
    """

    reading: TargetStates
    learned: Tensor
    target_logits: Tensor
    following: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, decoder: Decoder, batch: Batch, reading: TargetStates) -> Lesson:
        """The lesson of a batch that the target has read."""
        learned = batch.targets != NO_TOKEN
        target_logits = decoder.unembed(reading.normed[learned][None])[0]
        return cls(reading, learned, target_logits, batch.targets[learned])

    def drafts(
        self, decoder: Decoder, head: ExitHead, depths: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """What a head drafts at these positions, by depth; one depth if it is not unrolled.

        Yields:
            Draft logits `[n, head's vocabulary]`, and `[n]` whether the position has as many tokens
            of its document before it as the draft is deep: without, its logits mean nothing.
        """
        positions = self.reading.packing.positions[self.learned]
        for depth, state in enumerate(draft_states(decoder, head, self.reading, depths)):
            yield head.logits(decoder, state[self.learned][None])[0], positions >= depth
