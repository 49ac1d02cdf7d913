"""Indexes of a growing sequence: where its end occurred before, and what followed.

Legend: a match is a suffix of the sequence that also ends earlier in it; end = tokens up to the end
of that earlier occurrence, so that `text[end]` is the token that followed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from selfspec.config import LookupConfig
from selfspec.sampling.draft import Draft
from selfspec.sampling.sampler import Context

# Tokens that are copied at a time, where no number is asked for.
_FEWEST, _MOST = 10, 40


class Match(NamedTuple):
    """A suffix of the text that occurred before.

    Attributes:
        length: its tokens; 0 where nothing was found.
        end: tokens of the text up to the end of an earlier occurrence.
    """

    length: int
    end: int


_NOTHING = Match(0, 0)


class TextIndex(ABC):
    """Finds where the end of one text occurred before.

    Attributes:
        text: the tokens taken in.
        match: of their end.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self.match = _NOTHING

    def read(self, text: Sequence[int]) -> None:
        """Take in what `text` holds beyond the tokens that were read already."""
        for token in text[len(self.text) :]:
            self.text.append(token)
            self.match = self._add(token)

    @abstractmethod
    def _add(self, token: int) -> Match:
        """Index the text's new last token; what matches its end."""

    def continuation(self, length: int) -> list[int]:
        """The `length` tokens that followed the match.

        An occurrence so late that the tokens end first is copied on from the copy, as Lempel-Ziv
        decoders do: a sequence that has begun to repeat itself is expected to go on so.
        """
        start = self.match.end
        said = self.text[start : start + length]
        return [said[place % len(said)] for place in range(length)]


class SuffixIndex(TextIndex):
    """The longest match of any length, in amortised constant time a token.

    An online suffix automaton (Blumer et al. 1985), used as in SAM decoding (Hu et al. 2024). The
    suffix link of the whole text leads to its longest suffix that also ends elsewhere, which is
    the match. At most 2n states and 3n transitions for n tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        # Per state: tokens of its longest string, its suffix link, its transitions, and where its
        # strings ended when they last were the match, or first.
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
        end = len(self.text)
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
        """The state of the longest string of `state` with `token` after it, and of no longer."""
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


class NgramIndex(TextIndex):
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
        end = len(self.text)
        found = Match(0, end)
        for size in self._sizes[: max(0, end - self._sizes.start + 1)]:
            ngram = tuple(self.text[end - size :])
            if ngram in self._ends:
                found = Match(size, self._ends[ngram])
            self._ends[ngram] = end
        return found


def make_index(config: LookupConfig) -> TextIndex:
    """The index that a config names."""
    if config.index == "ngram":
        return NgramIndex(config.shortest, config.longest)
    return SuffixIndex()


class Lookup:
    """What the rows of a call said before, an index for each.

    Args:
        config: which index, and the shortest match that is followed.
        length: tokens copied at a time; `None` for as many as the match is long, from 10 to 40: a
            text that has followed another for long follows it on.
    """

    def __init__(self, config: LookupConfig, length: int | None = None):
        self._config, self._length = config, length
        self._indexes: dict[int, TextIndex] = {}

    def read(self, context: Context) -> list[TextIndex]:
        """The indexes of the unfinished rows, with all that is committed; others are forgotten."""
        known = self._indexes
        self._indexes = {row: known.get(row) or make_index(self._config) for row in context.rows}
        for row, index in self._indexes.items():
            index.read(context.text[row])
        return list(self._indexes.values())

    def predicted(self, context: Context) -> list[tuple[int, int, int]]:
        """How well each row's match predicted the tokens that are new since the last `read`.

        Returns:
            The match's length, the number of new tokens, and how many of them followed it.
        """
        found: list[tuple[int, int, int]] = []
        for row in context.rows:
            index = self._indexes.get(row)
            if index is None or index.match.length < self._config.shortest:
                continue
            new = context.text[row][len(index.text) :]
            pairs = zip(new, index.continuation(len(new)), strict=True)
            right = next((at for at, (token, copy) in enumerate(pairs) if token != copy), len(new))
            found.append((index.match.length, len(new), right))
        return found

    def draft(self, context: Context, limit: int) -> Draft:
        """In each row the tokens that followed its match, `limit` at most; none without one."""
        indexes = self.read(context)
        device = context.device
        counts = [min(limit, self._length_behind(index.match.length)) for index in indexes]
        if not any(counts):
            return Draft.empty(len(counts), device)
        rows = zip(indexes, counts, strict=True)
        tokens = [index.continuation(n) + [0] * (max(counts) - n) for index, n in rows]
        return Draft(
            torch.tensor(tokens, device=device), counts=torch.tensor(counts, device=device)
        )

    def _length_behind(self, match: int) -> int:
        """How many tokens to copy after a match of that length."""
        if match < self._config.shortest:
            return 0
        return self._length or min(max(match, _FEWEST), _MOST)
