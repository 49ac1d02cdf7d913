"""Logits to probabilities through the caller's logits processors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from selfspec.sampling.coupled_noise import Noise
from selfspec.sampling.draft import Tree
from selfspec.sampling.processors import POINTWISE, Prefixes, process, runs_in_blocks


class Context:
    """The tokens so far, as processors and stopping criteria see them.

    One buffer holds every row of the call, finished ones included, because a processor may depend
    on the index of a row. `rows` are the unfinished ones. Most calls never read the buffer before
    they end, so committed tokens are written to it when it is read.

    Args:
        tokens: `[batch, capacity]` the caller's prompt, left padding included, then free space.
        lengths: committed tokens of each row of the call, padding included.
        rows: indices of the unfinished rows, in the order of the model's tensors.
        text: committed tokens of each row on the host, without padding.

    Attributes:
        alike: whether the processors of all rows differ only in what depends on the prompt.
    """

    alike: bool = True

    def __init__(
        self,
        tokens: Tensor,
        lengths: list[int],
        rows: list[int],
        text: Sequence[list[int]] = (),
    ):
        self.lengths, self.text = dict(enumerate(lengths)), dict(enumerate(text))  # by row
        self.rows = rows
        self._tokens, self._filled = tokens, dict(self.lengths)

    @property
    def device(self) -> torch.device:
        """The buffer's device."""
        return self._tokens.device

    @property
    def tokens(self) -> Tensor:
        """`[batch, capacity]` the prompt, the emitted tokens, and space for drafts."""
        if self._filled != self.lengths:
            self._fill()
        return self._tokens

    @torch.inference_mode()  # the loop's tensors can be changed in inference mode only
    def _fill(self) -> None:
        for row, length in self.lengths.items():
            missing = length - self._filled[row]
            if missing:
                self._put(row, length - missing, torch.tensor(self.text[row][-missing:]))
                self._filled[row] = length

    def reserve(self, width: int) -> None:
        """Reserve space for rows of `width` tokens."""
        missing = width - self._tokens.shape[1]
        if missing > 0:
            self._tokens = torch.nn.functional.pad(self._tokens, (0, missing))

    def write(self, block: Tensor, offset: int = 0) -> None:
        """Write `block` `[rows, n]` at `offset` after the committed tokens of unfinished rows."""
        starts, width = [self.lengths[row] + offset for row in self.rows], block.shape[1]
        if len(starts) == 1:
            return self._put(self.rows[0], starts[0], block[0])
        if max(starts) + width > self._tokens.shape[1]:
            self.reserve(2 * (max(starts) + width))
        places = torch.tensor([[self._place(row) for row in self.rows], starts], device=self.device)
        columns = places[1][:, None] + torch.arange(width, device=self.device)
        self._tokens[places[0][:, None], columns] = block.to(self.device)

    def _place(self, row: int) -> int:
        """Index of a row in the buffer."""
        return row

    def _put(self, row: int, start: int, tokens: Tensor) -> None:
        stop = start + len(tokens)
        if stop > self._tokens.shape[1]:
            self.reserve(2 * stop)
        self._tokens[self._place(row), start:stop] = tokens

    def commit(self, row: int, tokens: Sequence[int], written: bool) -> None:
        """Commit tokens of a row; `written` ones are in the buffer already."""
        if written and self._filled[row] == self.lengths[row]:
            self._filled[row] += len(tokens)
        self.lengths[row] += len(tokens)
        self.text[row].extend(tokens)

    def new(self, row: int, start: int) -> list[int]:
        """Committed tokens of a row from index `start` on, padding counted."""
        return self.text[row][start - self.lengths[row] :] if start < self.lengths[row] else []

    def padded(self, padding: int) -> Tensor:
        """`[batch, longest]` committed tokens of every row, `padding` after the shorter ones."""
        longest = max(self.lengths.values())
        lengths = torch.tensor(list(self.lengths.values()), device=self.device)[:, None]
        behind = torch.arange(longest, device=self.device) >= lengths
        return self.tokens[:, :longest].masked_fill(behind, padding)

    def prefixes(self, width: int, offset: int, filler: int) -> Prefixes:
        """The texts before `width` positions of every unfinished row, row by row.

        Args:
            width: number of positions.
            offset: distance of the first one from the end of the committed tokens; the tokens
                between have been written.
            filler: stands behind the end of shorter texts.
        """
        counts = [self.lengths[row] + offset for row in self.rows]
        shortest, longest = min(counts), max(counts) + width - 1

        def lengths() -> Tensor:
            ahead = torch.arange(width, device=self.device)
            return (torch.tensor(counts, device=self.device)[:, None] + ahead).flatten()

        def tokens() -> Tensor:
            text = self._of_rows(longest)
            if shortest == longest:
                return text
            behind = torch.arange(longest, device=self.device) >= before.lengths[:, None]
            return text.repeat_interleave(width, 0).masked_fill_(behind, filler)

        rows = [row for row in self.rows for _ in range(width)]
        before = Prefixes(rows, shortest, longest, tokens, lengths)
        return before

    def branches(self, drafts: Tensor, above: Tensor, filler: int) -> Prefixes:
        """The texts before positions of a tree of every unfinished row, row by row.

        Args:
            drafts: `[rows, drafts]` the tree's tokens.
            above: `[rows, n, drafts]` which of them are on the branch to each position.
            filler: stands behind the end of shorter texts.
        """
        counts = [self.lengths[row] for row in self.rows]
        committed = torch.tensor(counts, device=self.device)[:, None]
        longest, room = max(counts), drafts.shape[1]

        def tokens() -> Tensor:
            behind = torch.arange(longest, device=self.device) >= committed
            text = self._of_rows(longest).masked_fill(behind, filler)
            text = torch.nn.functional.pad(text, (0, room + 1), value=filler)
            text = text[:, None].repeat(1, above.shape[1], 1)
            # Tokens on other branches go to a column that is dropped.
            places = torch.where(above, committed[..., None] + above.cumsum(-1) - 1, longest + room)
            text.scatter_(2, places, drafts[:, None].expand_as(above))
            return text[..., :-1].flatten(0, 1)

        rows = [row for row in self.rows for _ in range(above.shape[1])]
        lengths = (committed + above.sum(-1)).flatten()
        return Prefixes(rows, min(counts), longest + room, tokens, lambda: lengths)

    def _of_rows(self, width: int) -> Tensor:
        """`[rows, width]` the first tokens of unfinished rows."""
        places, tokens = [self._place(row) for row in self.rows], self.tokens
        if places == list(range(tokens.shape[0])):
            return tokens[:, :width]
        return tokens[places, :width]

    def by_length(self) -> Iterator[tuple[int, list[int], list[int]]]:
        """Unfinished rows of equal length: (length, their positions among `rows`, their rows)."""
        for length in sorted({self.lengths[row] for row in self.rows}):
            places = [i for i, row in enumerate(self.rows) if self.lengths[row] == length]
            yield length, places, [self.rows[place] for place in places]


_SUSPECT = 4  # calls in a row after which a processor has changed


def _numbers(processor: Any) -> dict[str, float]:
    own = getattr(processor, "__dict__", {})
    return {name: value for name, value in own.items() if type(value) in (int, float)}


@dataclass
class Sampler:
    """Turns scores into tokens with the caller's processors, greedily or by sampling.

    Attributes:
        processors: the caller's logits processors.
        do_sample: whether tokens are sampled.
        generator: source of random numbers; `None` takes torch's global one.
        noise: noise of every position, for the rule "coupled".
        drafts: whether there are drafts, which processors see before they are accepted.
    """

    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    do_sample: bool = False
    generator: torch.Generator | None = None
    noise: Noise | None = None
    drafts: bool = False
    _numbers: list[dict[str, float]] = field(default_factory=list, init=False, repr=False)
    _changes: int = field(default=0, init=False, repr=False)

    @property
    def chooses(self) -> bool:
        """Whether each position has one right token, with which drafts are compared."""
        return not self.do_sample or self.noise is not None

    @cached_property
    def reads_prefix(self) -> bool:
        """Whether some processor reads the tokens before a position."""
        return any(type(processor) not in POINTWISE for processor in self.processors)

    @cached_property
    def _in_blocks(self) -> bool:
        """Whether all processors can be applied to many positions at once."""
        return all(map(runs_in_blocks, self.processors))

    def scores(self, logits: Tensor, context: Context, offset: int = 0) -> Tensor:
        """Processed scores `[batch, n, vocab]`, as plain decoding would have them in float32.

        Position j of a row sees `context` up to that row's length plus `offset + j`, so drafts must
        have been written after the committed tokens when a processor reads the prefix.
        """
        batch, width, vocab = logits.shape
        if not self.processors:
            return logits.float()
        if self.reads_prefix and self._in_blocks:
            return self._process_block(context, context.prefixes(width, offset, vocab), logits)
        scores = logits.to(torch.float32, copy=True)
        if not self.reads_prefix:
            # Pointwise processors read nothing of the tokens but their number of rows.
            rows = torch.zeros(batch * width, 1, dtype=torch.long, device=context.device)
            return self._process(rows, scores.view(-1, vocab)).view(batch, width, vocab)
        for length, places, rows in context.by_length():
            for position in range(width):
                prefix = context.tokens[:, : length + offset + position]
                every_row = scores.new_zeros(prefix.shape[0], vocab)
                every_row[rows] = scores[places, position]
                scores[places, position] = self._process(prefix, every_row)[rows]
        return scores

    def tree_scores(
        self, logits: Tensor, context: Context, tokens: Tensor, tree: Tree, first: int = 0
    ) -> Tensor:
        """Processed scores `[batch, n, vocab]` after positions of a tree's block.

        Args:
            logits: `[batch, n, vocab]` of the positions from `first` on.
            context: the text so far.
            tokens: `[batch, drafts]` the tree's tokens.
            tree: which continues which; every position sees its own branch.
            first: the first place.
        """
        if not self.reads_prefix:
            return self.scores(logits, context)
        if self._in_blocks:
            above = tree.ancestors[:, first : first + logits.shape[1], 1:]
            before = context.branches(tokens, above, logits.shape[-1])
            return self._process_block(context, before, logits)
        scores = logits.to(torch.float32, copy=True)
        depths = tree.ancestors[..., 1:].sum(-1).T.tolist()
        for position in range(scores.shape[1]):
            ways, of_rows = tree.ancestors[:, first + position, 1:], depths[first + position]
            for length, places, _ in context.by_length():
                for depth in {of_rows[place] for place in places}:
                    alike = [place for place in places if of_rows[place] == depth]
                    branches = tokens[alike][ways[alike]].view(len(alike), depth)
                    here = scores[alike, position]
                    scores[alike, position] = self._behind(context, length, alike, branches, here)
        return scores

    def _behind(
        self, context: Context, length: int, places: list[int], branches: Tensor, scores: Tensor
    ) -> Tensor:
        """Process `scores` `[n, vocab]` of some unfinished rows after drafts `[n, depth]`."""
        rows = [context.rows[place] for place in places]
        prefix = torch.nn.functional.pad(context.tokens[:, :length], (0, branches.shape[1]))
        prefix[rows, length:] = branches
        every_row = scores.new_zeros(prefix.shape[0], scores.shape[-1])
        every_row[rows] = scores
        return self._process(prefix, every_row)[rows]

    def _process_block(self, context: Context, before: Prefixes, logits: Tensor) -> Tensor:
        """Scores of `logits` `[batch, n, vocab]` at positions with the texts `before` them."""
        processors = self._for_rows(context)
        return process(processors, before, logits.flatten(0, 1)).view(logits.shape)

    def _for_rows(self, context: Context) -> Sequence[Any]:
        """The processors of the unfinished rows."""
        return self.processors

    def _process(self, tokens: Tensor, scores: Tensor) -> Tensor:
        if self.reads_prefix:
            scores = self.processors(tokens, scores)  # pyright: ignore
            if self.drafts and self._changes < _SUSPECT:
                self._look_for_state()
            return scores
        # The list looks up the signature of every processor at every call; these are known.
        for processor in self.processors:
            scores = processor(tokens, scores)  # pyright: ignore
        return scores

    def _look_for_state(self) -> None:
        """Warn if numbers in a processor change from call to call, as a counter does."""
        before, self._numbers = self._numbers, [_numbers(each) for each in self.processors]
        changed = [
            type(each).__name__
            for each, was, now in zip(self.processors, before, self._numbers, strict=False)
            if was != now
        ]
        self._changes = self._changes + 1 if changed else 0
        if self._changes == _SUSPECT:
            warnings.warn(
                f"{changed[0]} changes from call to call. If its scores depend on that, the output "
                "is not the model's own: a processor is also called for drafts that are rejected. "
                "Make its scores depend on input_ids only, or pass draft='none'",
                stacklevel=2,
            )

    def drawable(self, scores: Tensor) -> Tensor:
        """Processed scores `[..., vocab]` of a draft with something to draw in every row.

        The caller's processors may leave nothing of a trimmed vocabulary; then any draft will do.
        """
        if not self.processors:
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

    def order(self, scores: Tensor, context: Context, depth: int) -> Tensor:
        """In which order tokens are drawn, the largest first, `depth` positions after the text.

        Run to its k-th position, an exponential race draws k tokens without replacement.

        Args:
            scores: `[batch, n, vocab]` processed scores at n branches of that position.
            context: the text so far.
            depth: distance from the text's next token.
        """
        if self.noise is not None:
            vocab = scores.shape[-1]
            noise = self.noise.ahead(context.rows, context.lengths, depth + 1, vocab)
            return scores + noise[:, depth:]
        if not self.do_sample:
            return scores
        race = torch.empty_like(scores).exponential_(1, generator=self.generator)
        return scores - race.log()

    def draw(
        self, scores: Tensor, context: Context, depth: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens `[batch, 1]` for `scores` `[batch, 1, vocab]`, and what they were drawn from.

        The distribution is `None` when decoding is greedy: it is one-hot at the token.

        Args:
            scores: processed scores.
            context: the text so far.
            depth: distance of the token from the text's next.
        """
        if not self.do_sample:
            return scores.argmax(-1), None
        probs = scores.softmax(-1)
        if self.noise is not None:
            return self.order(scores, context, depth).argmax(-1), probs
        return draw(probs, self.generator), probs


def draw(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One token per row of `probs` `[..., vocab]`; rows need not be normalised."""
    # One uniform number a row, found in the running sum. torch.multinomial waits for the device,
    # and its race needs a random number for every token of the vocabulary. In float64 the rarest
    # token keeps its chance; some devices have none.
    wide = torch.float32 if probs.device.type == "mps" else torch.float64
    edges = probs.cumsum(-1, dtype=wide)
    total = edges[..., -1:]
    coin = torch.rand(total.shape, dtype=wide, device=probs.device, generator=generator)
    # Below the total, which rounding might reach otherwise.
    at = coin.mul_(total).mul_(1 - torch.finfo(wide).eps)
    found = torch.searchsorted(edges, at, right=True).squeeze(-1)
    # NaN and zeros lie after every edge: some token then, which verification will not keep.
    return found.clamp_(max=probs.shape[-1] - 1)
