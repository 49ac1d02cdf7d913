"""Logits to scores by the caller's logits processors, and scores to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import InfNanRemoveLogitsProcessor, LogitsProcessorList

from selfspec.sampling.context import Context, before_chain, before_nodes
from selfspec.sampling.coupled_noise import Noise
from selfspec.sampling.draft import Tree
from selfspec.sampling.forks import for_request, fork
from selfspec.sampling.processors import (
    BY_VALUE,
    POINTWISE,
    Prefixes,
    Processor,
    process,
    process_pointwise,
    runs_in_blocks,
)
from selfspec.sampling.vocabulary import DraftVocabulary


@dataclass
class Scorer:
    """Applies the caller's logits processors to blocks of positions.

    Attributes:
        processors: the caller's logits processors.
        eos: tokens that end a text.
    """

    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    eos: frozenset[int] = field(default=frozenset(), kw_only=True)
    _forks: list[Processor] = field(default_factory=list, init=False, repr=False)
    _vocab: int = field(default=0, init=False, repr=False)  # of the last logits

    def separate(self) -> None:
        """Take copies of the processors, so that they share no state with other requests.

        Raises:
            ValueError: one cannot be copied.
        """
        self.processors = LogitsProcessorList(map(for_request, self.processors))

    @cached_property
    def walks(self) -> bool:
        """Whether some processor may have a state, so that drafts are verified by `walk`."""
        return not all(map(runs_in_blocks, self.processors))

    @cached_property
    def removes_invalid(self) -> bool:
        """Whether a processor replaces logits that are NaN or infinite."""
        return any(type(p) is InfNanRemoveLogitsProcessor for p in self.processors)

    @cached_property
    def in_blocks(self) -> list[Processor]:
        """The processors that can be applied to many positions together, in order."""
        return list(filter(runs_in_blocks, self.processors))

    @cached_property
    def reads_prefix(self) -> bool:
        """Whether some processor reads the tokens before a position."""
        return any(type(processor) not in POINTWISE for processor in self.processors)

    @cached_property
    def reads_ids(self) -> bool:
        """Whether some processor may treat a token by its id."""
        return any(type(processor) not in BY_VALUE for processor in self.processors)

    def apply(self, text: Tensor, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Scores `[rows, vocab]` after one position, by every processor as plain decoding calls it.

        Args:
            text: `[batch, length]` the tokens of every row of the call.
            logits: `[rows, vocab]` of unfinished rows; those of finished ones are not known, and
                processors get zeros in their place.
            rows: the unfinished rows.
        """
        self._vocab = logits.shape[-1]
        return _apply(self.processors, text, logits, rows)

    def scores(self, logits: Tensor, context: Context, offset: int = 0) -> Tensor:
        """Scores `[batch, n, vocab]` in float32, by the processors that run in blocks.

        If these are all processors, the scores are those of plain decoding. Otherwise they are
        those of drafts: forks of the other processors, if there are any, are called at the
        positions of a chain of drafts in order, and made anew at offset 0.

        Position j of a row sees `context` up to that row's length plus `offset + j`, so drafts must
        have been written after the committed tokens when a processor reads the prefix.
        """
        scores = self._in_blocks(logits, context, offset)
        if offset == 0 and self.walks:
            self._forks = self._new_forks()
        return self._pruned(scores, context, offset) if self._forks else scores

    def _pruned(self, scores: Tensor, context: Context, offset: int) -> Tensor:
        """Scores `[batch, 1, vocab]` of the next draft after the forks.

        A fork sees only texts that it allows, and none that goes on behind its end.
        """
        text = context.padded(offset)
        ended = offset and not self.eos.isdisjoint(text[context.rows, -1].tolist())
        pruned = None if ended else _apply(self._forks, text, scores[:, 0], context.rows)
        if pruned is None or bool((pruned.amax(-1) == -torch.inf).any()):
            self._forks = []
            return scores
        return pruned[:, None]

    def _new_forks(self) -> list[Processor]:
        forks = [fork(processor) for processor in self.processors if not runs_in_blocks(processor)]
        return [copied for copied in forks if copied is not None]

    def forced(self, context: Context, most: int) -> list[list[int]]:
        """The tokens that the processors are expected to force next, of each unfinished row.

        All rows have as many, at most `most`: processors see the rows in step.
        """
        forks, text = self._new_forks(), context.padded()
        tokens: list[list[int]] = [[] for _ in context.rows]
        while forks and len(tokens[0]) < most:
            found = self._forced_next(forks, text, context.rows)
            count = min(map(len, found))
            for row, new in zip(tokens, found, strict=True):
                row.extend(new[:count])
            # The forks have not seen the tokens in between if there are several.
            if count != 1 or any(row[-1] in self.eos for row in tokens):
                break
            last = torch.tensor([row[-1] for row in tokens], device=context.device)
            text = torch.cat([text, context.column(last)], dim=1)
        return [row[:most] for row in tokens]

    def _forced_next(self, forks: list[Any], text: Tensor, rows: Sequence[int]) -> list[list[int]]:
        """What a fork knows to follow, or else the only token that is allowed, of each row."""
        blank = torch.zeros(len(rows), self._vocab, device=text.device)
        allowed = _apply(forks, text, blank, rows) > -torch.inf
        only = torch.where(allowed.sum(-1) == 1, allowed.long().argmax(-1), -1).tolist()
        known = [copied.forced(text) for copied in forks if hasattr(copied, "forced")]
        several = [max([by[row] for by in known], key=len, default=[]) for row in rows]
        return [more or [one] * (one >= 0) for more, one in zip(several, only, strict=True)]

    def _in_blocks(self, logits: Tensor, context: Context, offset: int) -> Tensor:
        batch, width, vocab = logits.shape
        if not self.in_blocks:
            return logits.float()
        if self.reads_prefix:
            return self._process_block(context, before_chain(context, width, offset, vocab), logits)
        # Pointwise processors read nothing of the tokens but their number of rows.
        rows = torch.zeros(batch * width, 1, dtype=torch.long, device=context.device)
        scores = logits.to(torch.float32, copy=True).view(-1, vocab)
        # The list looks up the signature of every processor at every call; these are known.
        for processor in self.in_blocks:
            scores = process_pointwise(processor, rows, scores)
        return scores.view(batch, width, vocab)

    def tree_scores(
        self, logits: Tensor, context: Context, tokens: Tensor, tree: Tree, first: int = 0
    ) -> Tensor:
        """`scores` `[batch, n, vocab]` after positions of a tree's block.

        Args:
            logits: `[batch, n, vocab]` of the positions from `first` on.
            context: the text so far.
            tokens: `[batch, drafts]` the tree's tokens.
            tree: which continues which; every position sees its own branch.
            first: the first position.
        """
        if not self.in_blocks or not self.reads_prefix:
            return self._in_blocks(logits, context, 0)
        above = tree.ancestors[:, first : first + logits.shape[1], 1:]
        before = before_nodes(context, tokens, above, logits.shape[-1])
        return self._process_block(context, before, logits)

    def _process_block(self, context: Context, before: Prefixes, logits: Tensor) -> Tensor:
        """Scores of `logits` `[batch, n, vocab]` at positions with the texts `before` them."""
        processors = self._for_rows(context)
        return process(processors, before, logits.flatten(0, 1)).view(logits.shape)

    def _for_rows(self, context: Context) -> Sequence[Processor]:
        """The processors of the unfinished rows that run in blocks."""
        return self.in_blocks


@dataclass
class Sampler(Scorer):
    """Turns scores into tokens.

    Attributes:
        do_sample: whether tokens are sampled.
        generator: source of random numbers; `None` uses torch's global one.
        noise: noise of every position, for the rule "coupled".
        rule: how sampled chains are verified, by its name in `CHAIN_RULES`, or "coupled".
    """

    do_sample: bool = False
    generator: torch.Generator | None = None
    noise: Noise | None = None
    rule: str = "block"

    @property
    def chooses(self) -> bool:
        """Whether each position has one right token, with which drafts are compared."""
        return not self.do_sample or self.noise is not None

    def scored(self, drafted: DraftVocabulary) -> DraftVocabulary:
        """The tokens that drafts are scored among.

        Only processors that read ids need the scores of tokens that cannot be drafted.
        """
        return DraftVocabulary(drafted.size) if self.reads_ids else drafted

    def drawable(self, scores: Tensor) -> Tensor:
        """Processed scores `[..., n]` of a draft with something to draw in every row.

        Processors that read ids may leave nothing of a smaller vocabulary; then any draft will do.
        """
        if not self.reads_ids:
            return scores
        nothing = scores.amax(-1, keepdim=True) == -torch.inf
        return scores.masked_fill(nothing, 0.0)

    def choosable(self, scores: Tensor, context: Context, tree: Tree | None = None) -> Tensor:
        """Scores `[batch, n, vocab]` after a block's positions, the largest of which is chosen.

        Without noise of positions they are the processed scores themselves.

        Args:
            scores: processed scores.
            context: the text so far.
            tree: which drafts of the block continue which; `None` for a chain.
        """
        if self.noise is None:
            return scores
        levels = scores.shape[1] if tree is None else tree.levels + 1
        noise = self.noise.ahead(context.rows, context.lengths, levels, scores.shape[-1])
        if tree is not None:
            noise = noise.gather(1, tree.depths[..., None].expand_as(scores))
        return scores + noise

    def order(
        self, scores: Tensor, context: Context, depth: int, scored: DraftVocabulary
    ) -> Tensor:
        """In which order tokens are drawn, the largest first, `depth` positions after the text.

        Run to its k-th position, an exponential race draws k tokens without replacement.

        Args:
            scores: `[batch, n, tokens]` processed scores at n branches of that position.
            context: the text so far.
            depth: distance from the text's next token.
            scored: the tokens that the scores belong to.
        """
        if self.noise is not None:
            vocab = scores.shape[-1] if scored.ids is None else scored.size
            noise = self.noise.ahead(context.rows, context.lengths, depth + 1, vocab)
            return scores + scored.take(noise[:, depth:])
        if not self.do_sample:
            return scores
        race = torch.empty_like(scores).exponential_(1, generator=self.generator)
        return scores - race.log()

    def draw(
        self, scores: Tensor, context: Context, depth: int, scored: DraftVocabulary
    ) -> tuple[Tensor, Tensor | None]:
        """Indices `[batch, 1]` of tokens in `scored`, and what they were drawn from.

        The distribution is `None` when decoding is greedy: it is one-hot at the token.

        Args:
            scores: `[batch, 1, tokens]` processed scores.
            context: the text so far.
            depth: distance of the token from the text's next.
            scored: the tokens that the scores belong to.
        """
        if not self.do_sample:
            return scores.argmax(-1), None
        probs = scores.softmax(-1)
        if self.noise is not None:
            return self.order(scores, context, depth, scored).argmax(-1), probs
        return draw(probs, self.generator), probs


def _apply(
    processors: Sequence[Processor], text: Tensor, logits: Tensor, rows: Sequence[int]
) -> Tensor:
    """Scores `[rows, vocab]` by processors that are called with every row of the call.

    Logits of finished rows are not known; processors get zeros in their place.
    """
    every_row = list(rows) == list(range(text.shape[0]))
    if every_row:
        return _called(processors, text, logits.to(torch.float32, copy=True))
    scores = logits.new_zeros(text.shape[0], logits.shape[-1], dtype=torch.float32)
    scores[rows] = logits.float()
    return _called(processors, text, scores)[rows]


def _called(processors: Sequence[Processor], text: Tensor, scores: Tensor) -> Tensor:
    for processor in processors:
        if type(processor) in POINTWISE:
            scores = process_pointwise(processor, text, scores)
        else:
            scores = LogitsProcessorList([processor])(text, scores)  # pyright: ignore
    return scores


def draw(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One token per row of `probs` `[..., vocab]`; rows need not be normalised."""
    # One uniform number a row, found in the running sum. torch.multinomial waits for the device,
    # and its race needs a random number for every token of the vocabulary. In float64 the rarest
    # token keeps its chance; some devices have none.
    wide = torch.float32 if probs.device.type == "mps" else torch.float64
    edges = probs.to(wide, copy=True).cumsum_(-1)
    total = edges[..., -1:]
    coin = torch.rand(total.shape, dtype=wide, device=probs.device, generator=generator)
    # Below the total, which rounding might reach otherwise.
    at = coin.mul_(total).mul_(1 - torch.finfo(wide).eps)
    found = torch.searchsorted(edges, at, right=True).squeeze(-1)
    # For NaN or all-zero rows this is an arbitrary token, which verification rejects.
    return found.clamp_(max=probs.shape[-1] - 1)
