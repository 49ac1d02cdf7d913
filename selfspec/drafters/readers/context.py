"""The reader of heads that run a block of drafts over features of the verified tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.decoder import Pass
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.drafters.readers.base import ExitReader, chances
from selfspec.drafters.readers.by_row import pick
from selfspec.heads import Confidence, DFlashHead
from selfspec.sampling.draft import Tree


class ContextReader(ExitReader):
    """Draft logits of a head that runs a block of drafts over features of the verified tokens.

    The keys and values that its layers make from features are stored beside the target's, those of
    the newest tokens after every verification. A block's own are stored after them; the features
    of the tokens that were accepted overwrite these.
    """

    def __init__(self, engine: Engine, head: DFlashHead):
        super().__init__(engine, head)
        self._head = head
        self.keep = head.feature_layers
        self._added: dict[int, int] = {}  # the number in the slots of each of its layers
        self._hidden = torch.empty(0)  # [rows, block, hidden] the block's output
        self._drafts: tuple[Tensor, ...] = ()  # [rows, 1, n] each, the logits of the round
        self._memory = torch.empty(0)  # [rows, width, any] of the drafts before the next one
        self._tokens = torch.empty(0)  # [rows, width] the tokens that were read last
        self._level = 0  # index of the next draft
        self._ahead = 1  # drafts of the round

    def prefilled(self, state: State, block: Pass, offset: int, counts: Sequence[int]) -> None:
        """Store keys and values of the prompt."""
        if offset == 0:
            layers = range(self._head.options["num_hidden_layers"])
            self._added = {i: state.slots.add_layer(None, self._head) for i in layers}
        self._remember(state, block.kept, offset)

    def verified(self, state: State, drafted: int, verified: Verified) -> None:
        """Store keys and values of the pending token and the drafts."""
        self._remember(state, verified.hidden_states, 0)

    def _remember(self, state: State, features: list[Tensor], offset: int) -> None:
        slots = state.slots
        with state.stats.clock("head"):
            context = self._head.fuse_features(features)
            with slots.writing(context.shape[1], offset, self._added) as window:
                self._head.remember(context, window.positions.to(context.device), slots)

    def begin(self, most: int) -> None:
        """Read out `most` drafts; the block has the size that it was trained with."""
        self._ahead = most

    def read(
        self,
        state: State,
        tokens: Tensor,
        offset: int,
        tree: Tree | None = None,
        parents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of the next draft, of which a small part depends on the token before it."""
        with state.stats.clock("head"):
            if not offset:
                self._draft_all(state, tokens)
            else:
                self._level += 1
                if parents is not None:
                    self._memory = pick(self._memory, parents)
            self._tokens = tokens
            logits, self._memory = self._head.correct(
                self._drafts[self._level], self._state(), tokens, self._memory
            )
            assert logits is not None
            return self._spread(logits), None

    def _draft_all(self, state: State, pending: Tensor) -> None:
        head, slots = self._head, state.slots
        first = torch.tensor(slots.added_from, device=slots.device)
        with slots.writing(head.block_size, 0, self._added) as window:
            positions = window.positions
            self._hidden = head.run_block(self.decoder, pending, positions, first, slots)
        drafting = self._hidden[:, head.first_row : head.first_row + self._ahead]
        self._drafts = head.logits(self.decoder, drafting).split(1, dim=1)
        self._level = 0
        self._memory = head.first_memory(self._hidden[:, :1], pending)

    def _state(self) -> Tensor:
        """`[rows, 1, hidden]` the output that the next draft is read from."""
        return self._hidden.narrow(1, self._head.first_row + self._level, 1)

    def confidence(self) -> Confidence:
        """As for any head, but of sampled drafts from the confidence output, if there is one."""
        return super().confidence() if self.head.confidence is None else self._predicted

    def _predicted(self, scores: Tensor, probs: Tensor | None, depth: int) -> list[float]:
        if probs is None:
            return super().confidence()(scores, probs, depth)
        return chances(self.head.acceptance_odds(self._state(), self._tokens)[:, 0])
