"""What a drafting strategy is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from selfspec.config import DraftConfig
from selfspec.draft import Draft, Verdict
from selfspec.engine import Engine, State


class Drafter(ABC):
    """Proposes tokens for the rows of one call of `generate`."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def from_config(cls, engine: Engine, config: DraftConfig) -> Drafter:
        """Make the drafter, raising ValueError for what cannot work, before any pass."""

    @abstractmethod
    def propose(self, state: State, limit: int) -> Draft:
        """Draft at most `limit` (at least 1) tokens behind each row's pending token."""

    def commit(self, state: State, verdict: Verdict) -> None:  # noqa: B027 - optional
        """Learn what was accepted. A drafter without KV of its own has nothing to do."""

    def select(self, rows: Sequence[int]) -> None:  # noqa: B027 - optional
        """Go on with some rows only. A drafter that keeps nothing per row has nothing to do."""
