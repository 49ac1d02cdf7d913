"""Indexes of a growing sequence: where its end occurred before, and what followed.

Legend: a match is a suffix of the sequence that also ends earlier in it; end = tokens up to the end
of that earlier occurrence, so that `tokens[end]` is the token that followed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from selfspec.config import LONGEST_COPY, LookupConfig
from selfspec.drafters.engine import Engine
from selfspec.drafters.text_store import Occurrences, TextStore
from selfspec.sampling.context import Context
from selfspec.sampling.draft import Draft


class Match(NamedTuple):
    """A suffix of the sequence that occurred before.

    Attributes:
        length: number of tokens; 0 if nothing was found.
        end: tokens up to the end of an earlier occurrence.
    """

    length: int
    end: int


_NOTHING = Match(0, 0)


class TokenIndex(ABC):
    """Finds earlier occurrences of the end of one sequence.

    Attributes:
        tokens: the indexed tokens.
        match: the match of their end.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.match = _NOTHING

    def read(self, tokens: Sequence[int]) -> None:
        """Index the tokens that are new since the last call."""
        for token in tokens[len(self.tokens) :]:
            self.tokens.append(token)
            self.match = self._add(token)

    @abstractmethod
    def _add(self, token: int) -> Match:
        """Index the new last token; returns the match of the end."""

    def continuation(self, length: int) -> list[int]:
        """The `length` tokens that followed the match; a store may know fewer.

        If the sequence ends before, copying continues from the copy, as in Lempel-Ziv decoders: a
        sequence that has begun to repeat itself is expected to continue.
        """
        start = self.match.end
        copy = self.tokens[start : start + length]
        return [copy[each % len(copy)] for each in range(length)]


class SuffixIndex(TokenIndex):
    """The longest match of any length, in amortised constant time a token.

    An online suffix automaton (Blumer et al. 1985), used as in SAM decoding (Hu et al. 2024). The
    suffix link of the whole sequence leads to its longest suffix that also ends elsewhere, which is
    the match. At most 2n states and 3n transitions for n tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        # Per state: length of its longest string, suffix link, transitions, and where its strings
        # last ended when they were the match (or else first).
        self._lengths: list[int] = []
        self._links: list[int] = []
        self._next: list[dict[int, int]] = []
        self._ends: list[int] = []
        self._last = self._state(0, -1, {}, 0)

    def _state(self, length: int, link: int, following: dict[int, int], end: int) -> int:
        self._lengths.append(length)
        self._links.append(link)
        self._next.append(following)
        self._ends.append(end)
        return len(self._lengths) - 1

    def _add(self, token: int) -> Match:
        end = len(self.tokens)
        new = self._state(end, 0, {}, end)
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._links[state]
        match = self._followed(state, token) if state >= 0 else 0
        self._last, self._links[new] = new, match
        found = Match(self._lengths[match], self._ends[match])
        self._ends[match] = end
        return found

    def _followed(self, state: int, token: int) -> int:
        """The state of the longest string of `state` extended by `token`, split off if needed."""
        target = self._next[state][token]
        length = self._lengths[state] + 1
        if self._lengths[target] == length:
            return target
        split = self._state(
            length, self._links[target], dict(self._next[target]), self._ends[target]
        )
        self._links[target] = split
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = split
            state = self._links[state]
        return split


class NgramIndex(TokenIndex):
    """Matches of the last `longest` tokens, then of fewer down to `shortest`.

    Prompt lookup decoding (Saxena 2023), with the latest occurrence instead of the first.

    Args:
        shortest: tokens of the shortest match.
        longest: tokens of the longest match.
    """

    def __init__(self, shortest: int, longest: int):
        super().__init__()
        self._sizes = range(shortest, longest + 1)
        self._ends: dict[tuple[int, ...], int] = {}

    def _add(self, token: int) -> Match:
        end = len(self.tokens)
        found = Match(0, end)
        for size in self._sizes[: max(0, end - self._sizes.start + 1)]:
            ngram = tuple(self.tokens[end - size :])
            if ngram in self._ends:
                found = Match(size, self._ends[ngram])
            self._ends[ngram] = end
        return found


class StoreIndex(TokenIndex):
    """The index of a sequence, and a store where that has a longer match.

    Args:
        own: the index of the sequence alone.
        store: the store.
        shortest: tokens of the shortest match.
    """

    def __init__(self, own: TokenIndex, store: TextStore, shortest: int):
        super().__init__()
        self._own, self._store, self._shortest = own, store, shortest
        self._found: Occurrences | None = None

    def read(self, tokens: Sequence[int]) -> None:
        """Index the tokens that are new since the last call."""
        before = len(self.tokens)
        super().read(tokens)
        if len(self.tokens) == before:
            return
        self._found = self._store.find(self.tokens, max(self._shortest, self.match.length + 1))
        if self._found is not None:
            self.match = Match(self._found.length, self._found.ends[0])

    def _add(self, token: int) -> Match:
        self._own.read(self.tokens)
        return self._own.match

    def continuation(self, length: int) -> list[int]:
        """At most `length` tokens that followed the match."""
        if self._found is None:
            return self._own.continuation(length)
        return self._store.continuation(self._found, length)


def make_index(config: LookupConfig, store: TextStore | None = None) -> TokenIndex:
    """The index that a config names, in front of a store if there is one."""
    suffix = config.index == "suffix"
    own = SuffixIndex() if suffix else NgramIndex(config.shortest, config.longest)
    return own if store is None else StoreIndex(own, store, config.shortest)


class Lookup:
    """An index for each row of a call.

    Args:
        config: the kind of index, and the shortest match that is used.
        length: tokens copied at a time; `None` for as many as the match is long, from 10 to 40.
        store: texts of other calls, which are looked up behind each row's own.
    """

    def __init__(
        self, config: LookupConfig, length: int | None = None, store: TextStore | None = None
    ):
        self._config, self._length, self._store = config, length, store
        self._indexes: dict[int, TokenIndex] = {}

    @classmethod
    def of(cls, engine: Engine, config: LookupConfig, length: int | None = None) -> Lookup:
        """A lookup that also reads the texts that an engine remembers.

        Raises:
            ValueError: a text has a token that the target lacks.
        """
        if engine.store is not None:
            engine.store.check_vocabulary(engine.decoder.vocab_size)
        return cls(config, length, engine.store)

    def read(self, context: Context) -> list[TokenIndex]:
        """The up-to-date indexes of the unfinished rows; others are dropped."""
        known = self._indexes
        self._indexes = {
            row: known.get(row) or make_index(self._config, self._store) for row in context.rows
        }
        for row, index in self._indexes.items():
            index.read(context.text[row])
        return list(self._indexes.values())

    def join(self, other: Lookup) -> None:
        """Append the indexes of other rows."""
        self._indexes |= other._indexes

    def predicted(self, context: Context) -> list[tuple[int, int, int]]:
        """How well each row's match predicted the new tokens since the last `read`.

        Returns:
            The match's length, the number of new tokens that it predicted, and how many of them
            followed it.
        """
        found: list[tuple[int, int, int]] = []
        for row in context.rows:
            index = self._indexes.get(row)
            if index is None or index.match.length < self._config.shortest:
                continue
            new = context.text[row][len(index.tokens) :]
            copies = index.continuation(len(new))
            pairs = enumerate(zip(new, copies, strict=False))
            right = next((at for at, (token, copy) in pairs if token != copy), len(copies))
            found.append((index.match.length, len(copies), right))
        return found

    def draft(self, context: Context, limit: int) -> Draft:
        """A draft of at most `limit` tokens that followed each row's match."""
        indexes = self.read(context)
        counts = [min(limit, self._count_after(index.match.length)) for index in indexes]
        rows = zip(indexes, counts, strict=True)
        return Draft.of([index.continuation(n) if n else [] for index, n in rows], context.device)

    def _count_after(self, match: int) -> int:
        """Number of tokens to copy after a match of that length."""
        if match < self._config.shortest:
            return 0
        return self._length or min(max(match, 10), LONGEST_COPY)  # after short ones 10
