"""Reading a head that looks at nothing but the exit of the token itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.decoder import Pass
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.heads import AcceptanceEstimator, Calibrator, ExitHead
from selfspec.sampling.draft import Tree
from selfspec.schedule.mean import Mean


class ExitReader:
    """Draft logits of a head that looks at nothing but the exit of the token itself.

    Args:
        engine: the target and its passes.
        head: the exit head.

    Attributes:
        keep: residual streams that prefill and verification have to keep for the head.
        shadow: learns how often the head would have drafted the text's next token; `None` where
            nobody asks. While others draft, only a head with a layer of its own finds out.
    """

    keep: tuple[int, ...] = ()
    shadow: Mean | None = None

    def __init__(self, engine: Engine, head: ExitHead):
        self.engine, self.decoder, self.head = engine, engine.decoder, head
        self._trimmed = head.vocab_ids is not None  # a reader is made for one call
        self._judge: AcceptanceEstimator | None = None

    def prefilled(self, state: State, block: Pass, offset: int, counts: Sequence[int]) -> None:
        """See a block of new text, `offset` behind the settled tokens, `counts` of them real."""

    def read(
        self,
        state: State,
        tokens: Tensor,
        place: int,
        tree: Tree | None = None,
        parents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layers below the exit, and the head, over the next tokens of the block.

        Args:
            state: the call.
            tokens: `[rows, width]` the pending token (place 0), or the last drafts.
            place: of the first of them in the block.
            tree: which drafts continue which; `None` for a chain.
            parents: `[rows, width]` of each token, which of the tokens read before it continues;
                `None` for a chain.

        Returns:
            Logits `[rows, width, vocab]`, and the exit's hidden states `[rows, width, hidden]`,
            from which verification resumes; `None` at the embedding, where any pass begins.
        """
        at_exit = self.engine.shallow(
            state, tokens, self.head.exit_layer, place, unembed=self.head.is_plain, tree=tree
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
        """What says how likely a draft of the head is kept; without a fit a plain guess."""
        name = "sampled" if sampled else "greedy"
        fitted = self.head.calibrators[name] if name in self.head.calibrators else Calibrator()
        assert isinstance(fitted, Calibrator)
        with torch.inference_mode(False):  # it stays in the head, beyond this call
            return fitted.to(self.decoder.device)

    def judge(self) -> AcceptanceEstimator:
        """The calibrator for greedy chains."""
        if self._judge is None:
            self._judge = self.calibrator(sampled=False).estimator()
        return self._judge

    def verified(self, state: State, drafted: int, verified: Verified) -> None:
        """See what the target made of a chain, before it settles.

        Args:
            state: the call.
            drafted: how many of its drafts the head proposed; 0 where another drafter did.
            verified: of the pending token and the drafts behind it.
        """

    def select(self, rows: Sequence[int]) -> None:
        """Go on with some rows only."""
