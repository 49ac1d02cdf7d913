"""Indexes that know what is to come, so that lookups are right as often as wanted."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.drafters.engine import Engine
from selfspec.drafters.suffix_lookup import TokenIndex
from selfspec.sampling.draft import Draft

BETWEEN = 0  # a token between two foreseen texts


def foresee(monkeypatch, texts: Sequence[Sequence[int]], wrong: int = 0) -> None:
    """From now on every index has read `texts` first, every `wrong`-th token of them falsified."""
    before = [token for text in texts for token in (*text, BETWEEN)]
    if wrong:
        before[wrong - 1 :: wrong] = [token % 7 + 1 for token in before[wrong - 1 :: wrong]]
    read = TokenIndex.read
    monkeypatch.setattr(TokenIndex, "read", lambda index, text: read(index, [*before, *text]))


def collect(monkeypatch) -> list[Draft]:
    """From now on, every draft that is verified."""
    drafts: list[Draft] = []
    verify = Engine.verify

    def noting(engine, state, draft):
        drafts.append(draft)
        return verify(engine, state, draft)

    monkeypatch.setattr(Engine, "verify", noting)
    return drafts
