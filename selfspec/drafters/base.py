"""The interface of a drafting strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from selfspec.config import DraftConfig
from selfspec.decoder import Decoder, Pass
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.sampling.draft import Draft, Verdict


class Drafter(ABC):
    """Proposes tokens for the rows of one call of `generate`.

    Attributes:
        makes_trees: whether drafts may be trees, which have rules of their own.
        takes_schedule: whether the config's schedule says when its drafts end.
        decoders: the models beside the target that it runs.
        keep: residual streams, by the number of layers below, that prefill and verification have
            to keep for the drafter.
        rule: how sampled drafts are verified: chains by one of `acceptance.CHAIN_RULES`, any by
            `acceptance.COUPLED`.
    """

    name: ClassVar[str]
    makes_trees: ClassVar[bool] = False
    takes_schedule: ClassVar[bool] = False
    decoders: tuple[Decoder, ...] = ()
    keep: tuple[int, ...] = ()
    rule: str = "block"

    @classmethod
    @abstractmethod
    def from_config(cls, engine: Engine, config: DraftConfig) -> Drafter:
        """Make the drafter, raising ValueError for what cannot work, before any pass."""

    @abstractmethod
    def propose(self, state: State, limit: int) -> Draft:
        """Draft at most `limit` (at least 1) tokens after each row's pending token."""

    def prefilled(  # noqa: B027 - optional
        self, state: State, block: Pass, offset: int, counts: Sequence[int]
    ) -> None:
        """See a block of the prompt, `offset` after what the cache held, before it commits.

        Args:
            state: the call.
            block: what the pass left.
            offset: distance of its first token from the committed ones.
            counts: real tokens of each row, in all blocks.
        """

    def commit(  # noqa: B027 - optional
        self, state: State, draft: Draft, verified: Verified, verdict: Verdict
    ) -> None:
        """Learn what was accepted, before it commits; a tree's kept branch lies in order already.

        A drafter without KV of its own has nothing to do.
        """

    def select(self, rows: Sequence[int]) -> None:  # noqa: B027 - optional
        """Go on with some rows only. A drafter that keeps nothing per row has nothing to do."""
