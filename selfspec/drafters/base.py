"""The interface of a drafting strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

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
        takes_exit: whether it uses the config's `exit_layer` and `head`.
        decoders: models that it runs beside the target.
        keep: hidden states, by the number of layers below, that prefill and verification keep for
            the drafter.
        drafting: the model that drafts, as a whole or in part; `None` if none does.
    """

    name: ClassVar[str]
    drafts: ClassVar[bool] = True
    makes_trees: ClassVar[bool] = False
    takes_schedule: ClassVar[bool] = False
    takes_exit: ClassVar[bool] = True
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
        """Draft at most `limit` (at least 1) tokens after each row's pending token.

        It must not change the tokens so far, which `state` holds.
        """

    def approximate(self, approximation: Approximation) -> None:
        """Draft by approximate passes from now on; its `drafting` model has to be able to."""
        self._approximation = approximation

    def draft(self, state: State, limit: int, target: Decoder) -> Draft:
        """Propose, by approximate passes if it was told to `approximate`.

        Raises:
            ValueError: what `propose` returned cannot be verified by the target.
        """
        if self._approximation is None:
            return self._checked(self.propose(state, limit), state, limit, target)
        assert self.drafting is not None  # `make_drafter` refuses it otherwise
        with self.drafting.approximating(self._approximation):
            return self._checked(self.propose(state, limit), state, limit, target)

    def _checked(self, draft: Draft, state: State, limit: int, target: Decoder) -> Draft:
        problem = self._problem(draft, state, limit, target)
        if problem is not None:
            raise ValueError(f"the drafter {self.name!r} ({type(self).__qualname__}) {problem}")
        return draft

    def _problem(self, draft: Draft, state: State, limit: int, target: Decoder) -> str | None:
        """What is wrong with the shapes of a proposal; the tokens stay on their device."""
        if not isinstance(draft, Draft):
            return f"returned {type(draft).__name__}, expected a Draft"
        if draft.tree is not None and not self.makes_trees:
            return "returned a tree; set `makes_trees = True` in the class"
        return (
            _problem_of_tokens(draft, state, limit)
            or _problem_of_probs(draft, target)
            or _problem_of_states(draft, target)
        )

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

        The other one was `prefilled`, and has proposed nothing yet.

        A drafter that overrides `select` has to override this, too.
        """

    def pause(self) -> None:  # noqa: B027 - optional
        """Called if the next round does not follow immediately, so that its timing ends."""


def _problem_of_tokens(draft: Draft, state: State, limit: int) -> str | None:
    tokens, rows = draft.tokens, state.rows
    if not isinstance(tokens, Tensor):
        return f"returned tokens as {type(tokens).__name__}, expected a tensor; see `Draft.of`"
    shape, device = tuple(tokens.shape), state.pending.device
    if len(shape) != 2 or shape[0] != rows:
        return f"returned tokens of shape {shape}, expected [rows, n] with rows = {rows}"
    if tokens.dtype != torch.long:
        return f"returned tokens of dtype {tokens.dtype}, expected torch.int64"
    if tokens.device != device:
        return f"returned tokens on {tokens.device}, expected {device}, as `state.pending`"
    if draft.tree is None and shape[1] > limit:
        return f"returned {shape[1]} tokens a row, expected at most limit = {limit}"
    counts = draft.counts
    if counts is not None and (not isinstance(counts, Tensor) or tuple(counts.shape) != (rows,)):
        return f"returned counts {counts}, expected a tensor of shape [rows] with rows = {rows}"
    return None


def _problem_of_probs(draft: Draft, target: Decoder) -> str | None:
    if draft.probs is None:
        return None
    given, shape = tuple(draft.probs.shape), tuple(draft.tokens.shape)
    right = len(given) == 3 and given[2] >= target.vocab_size
    if right and (draft.tree is not None or given[:2] == shape):
        return None
    return (
        f"returned probs of shape {given}, expected [rows, n, vocab] for tokens {shape} and "
        f"vocab = {target.vocab_size}"
    )


def _problem_of_states(draft: Draft, target: Decoder) -> str | None:
    depth, hidden, (rows, length) = draft.depth, draft.hidden, draft.tokens.shape
    if not 0 <= depth <= target.depth:
        return f"returned depth={depth}, expected 0 to {target.depth}, the layers of the target"
    if (depth > 0) != (hidden is not None):
        given = "no " if hidden is None else ""
        return f"returned depth={depth} and {given}hidden states; set both, or neither"
    if hidden is None:
        return None
    shape, width = tuple(hidden.shape), target.config.hidden_size
    if len(shape) == 3 and (shape[0], shape[2]) == (rows, width) and 1 <= shape[1] <= length + 1:
        return None
    return (
        f"returned hidden states of shape {shape}, expected [rows, m, width] with rows = {rows}, "
        f"m from 1 to {length + 1} and width = {width}"
    )
