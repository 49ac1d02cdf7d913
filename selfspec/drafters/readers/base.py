"""The interface of a reader, and the reader of heads without a layer of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from selfspec.decoder import Pass
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.heads import Calibrator, Confidence, ExitHead
from selfspec.sampling.draft import Tree


class ExitReader:
    """Draft logits of a head that reads only the exit's hidden state of the token itself.

    Args:
        engine: the target and its passes.
        head: the exit head.

    Attributes:
        keep: hidden states that prefill and verification keep for the head.
    """

    keep: tuple[int, ...] = ()

    def __init__(self, engine: Engine, head: ExitHead):
        self.engine, self.decoder, self.head = engine, engine.decoder, head
        self._trimmed = head.vocab_ids is not None
        self._confidence: Confidence | None = None

    @property
    def depth(self) -> int:
        """Number of layers below the states that verification resumes from; 0 if there are none."""
        return 0 if self.decoder.approximates_layers else self.head.exit_layer

    def prefilled(self, state: State, block: Pass, offset: int, counts: Sequence[int]) -> None:
        """Called after each block of the prefill; see `Drafter.prefilled`."""

    def begin(self, most: int) -> None:
        """Begin a round that drafts at most `most` tokens in sequence."""

    def read(
        self,
        state: State,
        tokens: Tensor,
        offset: int,
        tree: Tree | None = None,
        parents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layers below the exit, and the head, over the next tokens of the block.

        Args:
            state: the call.
            tokens: `[rows, width]` the pending token (offset 0), or the last drafts.
            offset: slots between the pending token's and the first of theirs.
            tree: the token tree; `None` for a chain, and for the pending token.
            parents: `[rows, width]` index of each token's parent in the last call; `None` for a
                chain, and for the pending token.

        Returns:
            Logits `[rows, width, vocab]`, and the exit's hidden states `[rows, width, hidden]`,
            from which verification resumes; `None` if the exit is at the embeddings, or if the
            layers did not run over these tokens.
        """
        at_exit = self.engine.shallow(
            state, tokens, self.head.exit_layer, offset, unembed=self.head.is_plain, tree=tree
        )
        if self.head.is_plain:
            return at_exit.output, at_exit.hidden
        with state.stats.clock("head"):
            return self._logits(at_exit.hidden), at_exit.hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._spread(self.head.logits(self.decoder, hidden))

    def _spread(self, logits: Tensor) -> Tensor:
        return self.head.expand_logits(logits, self.decoder) if self._trimmed else logits

    def calibrator(self, sampled: bool) -> Calibrator:
        """The head's calibrator; an unfitted one if the head has none."""
        name = "sampled" if sampled else "greedy"
        fitted = self.head.calibrators[name] if name in self.head.calibrators else Calibrator()
        assert isinstance(fitted, Calibrator)
        with torch.inference_mode(False):  # the calibrator outlives this call
            return fitted.to(self.decoder.device)

    def confidence(self) -> Confidence:
        """The confidence in the last draft, from its scores by the head's calibrator."""
        if self._confidence is None:
            self._confidence = self.calibrator(sampled=False).confidence()
        return self._confidence

    def verified(self, state: State, drafted: int, verified: Verified) -> None:
        """Called after verification of a chain, before it is committed.

        Args:
            state: the call.
            drafted: number of drafts that the head proposed; 0 if another drafter did.
            verified: results at the pending token and the drafts.
        """

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""

    def join(self, other: Any) -> None:
        """Append the rows of another reader of the same head."""


def chances(odds: Tensor) -> list[float]:
    """Probabilities of log odds `[rows]`; 0 for NaN."""
    # `max(0.0, nan)` is 0.0; in the other order it would be NaN.
    return [max(0.0, chance) for chance in odds.float().sigmoid().tolist()]
