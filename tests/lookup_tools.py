"""Indexes that know what is to come, so that lookups are right as often as wanted."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.drafters.engine import Engine
from selfspec.drafters.lookahead import Row
from selfspec.drafters.suffix_lookup import TokenIndex
from selfspec.sampling.draft import Draft

BETWEEN = 0  # a token between two foreseen texts


def falsified(text: Sequence[int], wrong: int) -> list[int]:
    """`text` with another token in every `wrong`-th place."""
    text = list(text)
    text[wrong - 1 :: wrong] = [token % 7 + 1 for token in text[wrong - 1 :: wrong]]
    return text


def foresee(monkeypatch, texts: Sequence[Sequence[int]], wrong: int = 0) -> None:
    """From now on every index has read `texts` first, every `wrong`-th token of them falsified."""
    before = [token for text in texts for token in (*text, BETWEEN)]
    before = falsified(before, wrong) if wrong else before
    read = TokenIndex.read
    monkeypatch.setattr(TokenIndex, "read", lambda index, text: read(index, [*before, *text]))


def foresee_ngrams(monkeypatch, texts: Sequence[Sequence[int]], wrong: int = 6) -> None:
    """From now on every pool of lookahead holds the n-grams of `texts`, falsified likewise."""
    made = Row.of

    def knowing(text, config, source):
        row = made(text, config, source)
        for seen in texts:
            row.read_on(falsified(seen, wrong))
            row.read = 0
        return row

    monkeypatch.setattr(Row, "of", knowing)


def collect(monkeypatch) -> list[Draft]:
    """From now on, every draft that is verified."""
    drafts: list[Draft] = []
    verify = Engine.verify

    def noting(engine, state, draft):
        drafts.append(draft)
        return verify(engine, state, draft)

    monkeypatch.setattr(Engine, "verify", noting)
    return drafts
