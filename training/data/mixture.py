"""The order of blocks: a pure function of the seed, so that a run can be resumed at any step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from .blocks import Batch, Blocks, collate, pack
from .sources import SourceConfig, tokenize


class Mixture:
    """Blocks of several sources, drawn by weight; each source is shuffled anew every epoch.

    Args:
        sources: the blocks of each source.
        weights: the share of each, before normalisation.
        seed: decides the order.
    """

    def __init__(self, sources: Sequence[Blocks], weights: Sequence[float], seed: int):
        self.sources = list(sources)
        self.shares = np.asarray(weights, dtype=float) / np.sum(weights)
        self.seed = seed
        self._order: list[tuple[int, int]] = []
        self._seen = [0] * len(self.sources)
        self._shuffled: dict[tuple[int, int], np.ndarray] = {}
        self._choose = np.random.default_rng(seed)

    @classmethod
    def read(
        cls,
        sources: Sequence[SourceConfig],
        tokenizer: PreTrainedTokenizerBase,
        block_size: int,
        seed: int,
    ) -> Mixture:
        """Read, tokenize and pack sources.

        Raises:
            FileNotFoundError: a source has no files.
            ValueError: a source is malformed, or holds less than one block.
        """
        blocks = [pack(tokenize(source, tokenizer), block_size, source.name) for source in sources]
        return cls(blocks, [source.weight for source in sources], seed)

    def without_ends(self, share: float) -> tuple[Mixture, list[Blocks]]:
        """The mixture without the last blocks of every source, and those blocks.

        Raises:
            ValueError: a source has a single block.
        """
        small = next((blocks for blocks in self.sources if len(blocks) < 2), None)
        if small is not None:
            raise ValueError(
                f"a source has {len(small)} block of {small.block_size} tokens, so that none can "
                "be held out; give more text, a smaller block_size, or held_out"
            )
        parts = [blocks.split(math.ceil(share * len(blocks))) for blocks in self.sources]
        kept, ends = zip(*parts, strict=True)
        return Mixture(kept, self.shares.tolist(), self.seed), list(ends)

    @property
    def tokens(self) -> int:
        """Tokens of all sources, each once."""
        return sum(len(blocks) * blocks.block_size for blocks in self.sources)

    def batch(self, start: int, count: int, stride: int = 1) -> Batch:
        """`count` blocks from position `start` of the endless order, every `stride`-th one."""
        places = range(start, start + count * stride, stride)
        return collate([self[place] for place in places])

    def __getitem__(self, place: int) -> Batch:
        """The block at a place of the endless order."""
        while len(self._order) <= place:
            self._extend()
        source, number = self._order[place]
        return self.sources[source][number]

    def _extend(self) -> None:
        source = int(self._choose.choice(len(self.sources), p=self.shares))
        size = len(self.sources[source])
        epoch, place = divmod(self._seen[source], size)
        self._seen[source] += 1
        if (source, epoch) not in self._shuffled:
            order = np.random.default_rng((self.seed, source, epoch)).permutation(size)
            self._shuffled[source, epoch] = order
        self._order.append((source, int(self._shuffled[source, epoch][place])))
