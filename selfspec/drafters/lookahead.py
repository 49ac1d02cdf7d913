"""Lookahead decoding: n-grams that the target generates in parallel by Jacobi iteration."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from typing_extensions import Self

from selfspec.config import DraftConfig, LookaheadConfig
from selfspec.decoder import Pass
from selfspec.drafters.base import Drafter
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.sampling.draft import Draft, Tree, Verdict

Ngram = tuple[int, ...]


class NgramPool:
    """The newest n-grams of one row, by their first token.

    Args:
        tokens: the most first tokens; the least recently used ones are dropped.
        ngrams: the most n-grams per first token.
    """

    def __init__(self, tokens: int, ngrams: int):
        self.tokens, self.ngrams = tokens, ngrams
        self._after: dict[int, dict[Ngram, None]] = {}  # in the order in which they came

    def __len__(self) -> int:
        """Number of n-grams."""
        return sum(map(len, self._after.values()))

    def add(self, ngram: Ngram) -> None:
        """Add an n-gram as the newest."""
        first, rest = ngram[0], ngram[1:]
        held = self._after.pop(first, {})
        held.pop(rest, None)
        held[rest] = None
        if len(held) > self.ngrams:
            del held[next(iter(held))]
        self._after[first] = held
        if len(self._after) > self.tokens:
            del self._after[next(iter(self._after))]

    def after(self, token: int) -> list[Ngram]:
        """Continuations of the n-grams that begin with `token`, the newest first."""
        return list(reversed(self._after.get(token, {})))


class Branches:
    """One row's tree while it is built; equal children of a position are merged."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths = [0]
        self._positions: dict[tuple[int, int], int] = {}

    def add(self, position: int, tokens: Sequence[int]) -> int:
        """Append a sequence of tokens to a position; returns the position of the last."""
        for token in tokens:
            if (position, token) not in self._positions:
                self.tokens.append(token)
                self.parents.append(position)
                self.depths.append(self.depths[position] + 1)
                self._positions[position, token] = len(self.tokens)
            position = self._positions[position, token]
        return position

    @property
    def siblings(self) -> int:
        """The most children of one position."""
        return max(Counter(self.parents).values(), default=0)


@dataclass
class Row:
    """State of one row.

    Attributes:
        pool: n-grams of the sequence, and those that the target generated in the window.
        window: N - 1 levels of W guesses: the target's predictions from the level before.
        read: number of tokens of the sequence whose n-grams are in the pool.
    """

    pool: NgramPool
    window: list[list[int]]
    read: int = 0

    @classmethod
    def of(cls, text: Sequence[int], config: LookaheadConfig, source: random.Random) -> Row:
        """Start with tokens from random positions of the prompt as the window."""
        starts = [source.randrange(len(text)) for _ in range(config.window)]
        levels = range(config.ngram - 1)
        window = [[text[(start + j) % len(text)] for start in starts] for j in levels]
        return cls(NgramPool(config.pool, config.guesses), window)

    def read_on(self, text: Sequence[int]) -> None:
        """Add the n-grams of the sequence that end in new tokens."""
        size = len(self.window) + 1
        end = max(self.read, len(text) - size + 1)
        for start in range(self.read, end):
            self.pool.add(tuple(text[start : start + size]))
        self.read = end

    def refine(self, predicted: list[int]) -> None:
        """Take the target's predictions for the newest level: n-grams, and the next level."""
        for ngram in zip(*self.window, predicted, strict=True):
            self.pool.add(ngram)
        self.window = [*self.window[1:], predicted]


class Lookahead(Drafter):
    """Drafts n-grams that the target itself generated in parallel in earlier rounds.

    Lookahead decoding (Fu et al. 2024). Each pass verifies the pool's n-grams that begin with the
    pending token, and beside them refines a window of guesses by Jacobi iteration at N - 1 levels:
    guess i of the first level continues guess i - 1; in any other level it continues guess i of the
    level before. The target's predictions at the last level complete n-grams for the pool. Both
    branches are one tree. The length of n-grams comes from `LookaheadConfig`, not from
    `num_draft_tokens`.

    Args:
        config: sizes of both branches.
    """

    name = "lookahead"
    takes_exit = False
    makes_trees = True

    def __init__(self, config: LookaheadConfig):
        self.config = config
        self._source = random.Random(0)
        self._rows: list[Row] = []
        self._newest: list[list[int]] = []  # per row, positions of the window's last level

    @classmethod
    def from_config(cls, engine: Engine, config: DraftConfig) -> Lookahead:
        """Check that the target can verify trees, ValueError otherwise."""
        engine.decoder.check_trees()
        return cls(config.lookahead)

    @property
    def _reach(self) -> int:
        """Levels of a tree with the whole window."""
        return self.config.window + self.config.ngram - 2

    def prefilled(self, state: State, block: Pass, offset: int, counts: Sequence[int]) -> None:
        """Fill the window from the prompt."""
        if offset == 0:
            texts = [state.context.text[row] for row in state.context.rows]
            self._rows = [Row.of(text, self.config, self._source) for text in texts]

    def propose(self, state: State, limit: int) -> Draft:
        """A tree of both branches; without the window if it would reach too far."""
        blocks = []
        for row, index in zip(self._rows, state.context.rows, strict=True):
            text = state.context.text[index]
            row.read_on(text)
            block = Branches()
            for ngram in row.pool.after(text[-1]):
                block.add(0, ngram[:limit])
            blocks.append(block)
        if limit >= self._reach:
            pairs = zip(blocks, self._rows, strict=True)
            self._newest = [_add_window(block, row.window) for block, row in pairs]
        return _draft(blocks, state.pending.device)

    def commit(self, state: State, draft: Draft, verified: Verified, verdict: Verdict) -> None:
        """Advance the window by the target's predictions at its last level."""
        if self._newest:
            positions = torch.tensor(self._newest, device=verified.logits.device)
            rows = torch.arange(len(positions), device=positions.device)[:, None]
            predicted = verified.logits[rows, positions].argmax(-1).tolist()
            for row, tokens in zip(self._rows, predicted, strict=True):
                row.refine(tokens)
            self._newest = []

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self._rows = [self._rows[row] for row in rows]

    def join(self, other: Self) -> None:
        """Append the rows of another drafter."""
        self._rows = self._rows + other._rows


def _add_window(block: Branches, window: list[list[int]]) -> list[int]:
    """Add a window after the pending token; returns the positions of its last level."""
    position, newest = 0, []
    for first, *later in zip(*window, strict=True):
        position = block.add(position, [first])
        newest.append(block.add(position, later))
    return newest


def _draft(blocks: list[Branches], device: torch.device) -> Draft:
    """The rows' trees, padded to the largest."""
    drafts = max(len(block.tokens) for block in blocks)
    if drafts == 0:
        return Draft.empty(len(blocks), device)
    tokens = [block.tokens + [0] * (drafts - len(block.tokens)) for block in blocks]
    parents = [block.parents + [-1] * (drafts - len(block.parents)) for block in blocks]
    both = torch.tensor([tokens, parents], device=device)
    levels = max(max(block.depths) for block in blocks)
    tree = Tree(both[1], levels, max(block.siblings for block in blocks))
    return Draft(both[0], tree=tree)
