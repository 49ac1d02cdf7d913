"""The interface of a drafting strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from selfspec.config import DraftConfig
from selfspec.decoder import Approximation, Decoder, Pass
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.sampling.draft import Draft, Verdict


class Drafter(ABC):
    """Proposes tokens for the rows of one call of `generate`.

    Attributes:
        drafts: whether it drafts at all; only then a round may verify tokens that a grammar forces.
        makes_trees: whether drafts may be trees, which have their own acceptance rules.
        takes_schedule: whether it uses the config's schedule.
        decoders: models that it runs beside the target.
        keep: hidden states, by the number of layers below, that prefill and verification keep for
            the drafter.
        drafting: the model that drafts, as a whole or in part; `None` if none does.
    """

    name: ClassVar[str]
    drafts: ClassVar[bool] = True
    makes_trees: ClassVar[bool] = False
    takes_schedule: ClassVar[bool] = False
    decoders: tuple[Decoder, ...] = ()
    keep: tuple[int, ...] = ()
    drafting: Decoder | None = None
    _approximation: Approximation | None = None

    @classmethod
    @abstractmethod
    def from_config(cls, engine: Engine, config: DraftConfig) -> Drafter:
        """Make the drafter; raises ValueError for settings that cannot work, before any pass."""

    @abstractmethod
    def propose(self, state: State, limit: int) -> Draft:
        """Draft at most `limit` (at least 1) tokens after each row's pending token."""

    def approximate(self, approximation: Approximation) -> None:
        """Draft by approximate passes from now on; its `drafting` model has to be able to."""
        self._approximation = approximation

    def draft(self, state: State, limit: int) -> Draft:
        """Propose, by approximate passes if it was told to `approximate`.

        Raises:
            ValueError: what `propose` returned cannot be verified.
        """
        if self._approximation is None:
            return self._checked(self.propose(state, limit), state, limit)
        assert self.drafting is not None  # `make_drafter` refuses it otherwise
        with self.drafting.approximating(self._approximation):
            return self._checked(self.propose(state, limit), state, limit)

    def _checked(self, draft: Draft, state: State, limit: int) -> Draft:
        problem = _problem(draft, state.rows, limit)
        if problem is not None:
            raise ValueError(f"the drafter {self.name!r} ({type(self).__qualname__}) {problem}")
        return draft

    def unknown_tokens(self, draft: Draft, vocab_size: int) -> str | None:
        """Which drafts are not token ids, as an error message; `None` if all are."""
        tokens = draft.tokens
        outside = tokens[(tokens < 0) | (tokens >= vocab_size)].tolist()
        if not outside:
            return None
        return (
            f"the drafter {self.name!r} ({type(self).__qualname__}) drafted token {outside[0]}, "
            f"expected token ids in [0, {vocab_size - 1}]"
        )

    def prefilled(  # noqa: B027 - optional
        self, state: State, block: Pass, offset: int, counts: Sequence[int]
    ) -> None:
        """Called after each block of the prefill, before it is committed.

        Args:
            state: the call.
            block: the results of the pass.
            offset: slots between the last committed token and the block's first.
            counts: real tokens of each row, in all blocks.
        """

    def commit(  # noqa: B027 - optional
        self, state: State, draft: Draft, verified: Verified, verdict: Verdict
    ) -> None:
        """Called after verification, before the round is committed.

        The draft is empty in rounds whose tokens came from elsewhere: after `pause`, a round may
        verify tokens that a grammar forces, of which the verdict may have accepted some.

        The accepted branch of a tree is already in consecutive slots. A drafter that keeps nothing
        need not override this.
        """

    def select(self, rows: Sequence[int]) -> None:  # noqa: B027 - optional
        """Keep only some rows. A drafter that keeps nothing per row need not override this."""

    def join(self, other: Any) -> None:  # noqa: B027 - optional
        """Append the rows of another drafter of the same config, between two rounds.

        A drafter that overrides `select` has to override this, too.
        """

    def pause(self) -> None:  # noqa: B027 - optional
        """Called if the next round does not follow immediately, so that its timing ends."""


def _problem(draft: Draft, rows: int, limit: int) -> str | None:
    """What is wrong with the shapes of a proposal; the tokens themselves stay on their device."""
    if not isinstance(draft, Draft):
        return f"returned {type(draft).__name__}, expected a Draft"
    tokens, shape = draft.tokens, tuple(draft.tokens.shape)
    if len(shape) != 2 or shape[0] != rows:
        return f"returned tokens of shape {shape}, expected [rows, n] with rows = {rows}"
    if tokens.dtype != torch.long:
        return f"returned tokens of dtype {tokens.dtype}, expected torch.int64"
    if draft.tree is None and shape[1] > limit:
        return f"returned {shape[1]} tokens a row, expected at most limit = {limit}"
    if draft.tree is None and draft.probs is not None and draft.probs.shape[:2] != shape:
        given = tuple(draft.probs.shape)
        return f"returned probs of shape {given}, expected [rows, n, vocab] for tokens {shape}"
    if (draft.depth > 0) != (draft.hidden is not None):
        return (
            f"returned depth={draft.depth} and "
            f"{'no ' if draft.hidden is None else ''}hidden states; set both, or neither"
        )
    return None
