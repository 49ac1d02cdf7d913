"""The interface of a drafting strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from selfspec.config import DraftConfig
from selfspec.decoder import Approximation, Decoder, Pass
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.sampling.draft import Draft, Verdict


class Drafter(ABC):
    """Proposes tokens for the rows of one call of `generate`.

    A drafter whose `lookup` is a `Lookup` gets the engine's store of texts in it.

    Attributes:
        drafts: whether it drafts at all; only then a round may verify tokens that a grammar forces.
        makes_trees: whether drafts may be trees, which have their own acceptance rules.
        takes_schedule: whether it uses the config's schedule.
        decoders: models that it runs beside the target.
        keep: hidden states, by the number of layers below, that prefill and verification keep for
            the drafter.
        drafting: the model that drafts, as a whole or in part; `None` if none does.
        approximation: what its passes do otherwise while they draft; `None` for nothing.
        rule: the acceptance rule of sampled drafts: one of `CHAIN_RULES`, or `COUPLED`.
    """

    name: ClassVar[str]
    drafts: ClassVar[bool] = True
    makes_trees: ClassVar[bool] = False
    takes_schedule: ClassVar[bool] = False
    decoders: tuple[Decoder, ...] = ()
    keep: tuple[int, ...] = ()
    drafting: Decoder | None = None
    approximation: Approximation | None = None
    rule: str = "block"

    @classmethod
    @abstractmethod
    def from_config(cls, engine: Engine, config: DraftConfig) -> Drafter:
        """Make the drafter; raises ValueError for settings that cannot work, before any pass."""

    @abstractmethod
    def propose(self, state: State, limit: int) -> Draft:
        """Draft at most `limit` (at least 1) tokens after each row's pending token."""

    def draft(self, state: State, limit: int) -> Draft:
        """Propose, by approximate passes if the config asks for them."""
        if self.approximation is None:
            return self.propose(state, limit)
        assert self.drafting is not None  # `make_drafter` refuses it otherwise
        with self.drafting.approximating(self.approximation):
            return self.propose(state, limit)

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
        """Called if the next round does not follow at once, so that the round's timing ends."""
