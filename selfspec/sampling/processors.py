"""Logits processors of transformers over many positions together.

transformers calls a processor with the text of every row and the scores of its next token. A block
of drafts has many next tokens, after texts of many lengths. The functions here do to all of them
what the processor does to each, to the bit.

Legend: wide = `[n, vocab + 1]` scores of n positions, changed in place; the last column takes what
is written to ids that the LM head does not have.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from selfspec.config import Options

# Maps the tokens of all rows and the scores of the next ones to other scores: a processor of
# transformers or of the user, or a fork of one.
Processor = Callable[[Tensor, Tensor], Tensor]

BY_VALUE = (
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.TopHLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.LogitNormalization,
    hf.InfNanRemoveLogitsProcessor,
)
"""Processors that read only one row of scores, and no token ids."""

POINTWISE = (*BY_VALUE, hf.SuppressTokensLogitsProcessor)
"""Processors that read only one row of scores."""

# numpy sorts a row of values in a tenth of the time of torch's sort, which takes rows in parallel.
_ROWS_IN_A_SORT = 10


class Prefixes:
    """The tokens before `n` positions. Tensors are built when a processor first reads them.

    Args:
        rows: the row of the call that each position belongs to.
        shortest: no text is shorter, in tokens.
        longest: no text is longer.
        tokens: builds `[n, longest]` token ids, left-aligned. Shorter texts are padded with the
            size of the vocabulary.
        lengths: builds `[n]` the number of tokens of each text.
    """

    def __init__(
        self,
        rows: Sequence[int],
        shortest: int,
        longest: int,
        tokens: Callable[[], Tensor],
        lengths: Callable[[], Tensor],
    ):
        self.rows, self.shortest, self.longest = rows, shortest, longest
        self._tokens, self._lengths = tokens, lengths

    @cached_property
    def tokens(self) -> Tensor:
        """`[n, longest]` token ids."""
        return self._tokens()

    @cached_property
    def lengths(self) -> Tensor:
        """`[n]` the tokens of each text."""
        return self._lengths()

    @cached_property
    def unread(self) -> Tensor:
        """`[n, 0]` in place of the tokens, for processors that do not read them."""
        return torch.empty(len(self.rows), 0, dtype=torch.long, device="cpu")

    @property
    def alike(self) -> bool:
        """Whether all texts have the same length."""
        return self.shortest == self.longest

    def last(self, count: int) -> Tensor:
        """`[n, count]` the last tokens of each text; undefined where there are fewer."""
        if self.alike:
            return self.tokens.narrow(1, self.longest - count, count)
        back = torch.arange(count, 0, -1, device=self.lengths.device)
        return self.tokens.gather(1, (self.lengths[:, None] - back).clamp_(min=0))

    def within(self, low: int | Tensor, high: float | Tensor) -> Tensor | bool:
        """Whether each text has from `low` to `high` tokens: `[n, 1]`, or one bool for all.

        Args:
            low: for all texts, or `[rows]` for those of each row, on the host.
            high: the same.
        """
        (lowest, lower), (higher, highest) = _extremes(low), _extremes(high)
        if highest < self.shortest or self.longest < lowest:
            return False
        if lower <= self.shortest and self.longest <= higher:
            return True
        low, high = self._of_positions(low), self._of_positions(high)
        return ((self.lengths >= low) & (self.lengths <= high))[:, None]

    def _of_positions(self, bound: float | Tensor) -> Any:
        """A bound of each row as that of each position; other bounds as they are."""
        if not isinstance(bound, Tensor):
            return bound
        return bound.repeat_interleave(len(self.rows) // len(bound)).to(self.lengths.device)


def _extremes(bound: float | Tensor) -> tuple[float, float]:
    if isinstance(bound, Tensor):
        return int(bound.min()), int(bound.max())
    return bound, bound


def _fill(wide: Tensor, ids: Tensor, where: Tensor | bool) -> None:
    """Forbid tokens at some positions."""
    last = wide.shape[1] - 1  # this column takes ids beyond the LM head, and -1, which is no token
    ids = ids.clamp(max=last).masked_fill(ids < 0, last)
    if where is True:
        wide.index_fill_(1, ids, -math.inf)
    elif where is not False:
        kept = wide.index_select(1, ids)
        wide.index_copy_(1, ids, kept.masked_fill_(where, -math.inf))


def _force(wide: Tensor, ids: Tensor, where: Tensor | bool) -> None:
    """Forbid everything but some tokens at some positions."""
    if where is not False:
        scores = wide[:, :-1]  # an id that the LM head does not have is an IndexError
        forced = torch.full_like(scores, -math.inf).index_fill_(1, ids, 0.0)
        scores.copy_(forced if where is True else torch.where(where, forced, scores))


def _min_length(processor: hf.MinLengthLogitsProcessor, before: Prefixes, wide: Tensor) -> None:
    where = before.within(0, processor.min_length - 1)
    _fill(wide, processor.eos_token_id.to(wide.device), where)


def _min_new_tokens(
    processor: hf.MinNewTokensLengthLogitsProcessor, before: Prefixes, wide: Tensor
) -> None:
    least = processor.prompt_length_to_skip + processor.min_new_tokens
    _fill(wide, processor.eos_token_id.to(wide.device), before.within(0, least - 1))


def _suppress_at_begin(
    processor: hf.SuppressTokensAtBeginLogitsProcessor, before: Prefixes, wide: Tensor
) -> None:
    begin = processor.begin_index
    ids = processor.begin_suppress_tokens.to(wide.device, torch.long)  # an empty list is of floats
    _fill(wide, ids, before.within(begin, begin))


def _forced_bos(
    processor: hf.ForcedBOSTokenLogitsProcessor, before: Prefixes, wide: Tensor
) -> None:
    ids = torch.tensor([processor.bos_token_id], device=wide.device)
    _force(wide, ids, before.within(1, 1))


def _forced_eos(
    processor: hf.ForcedEOSTokenLogitsProcessor, before: Prefixes, wide: Tensor
) -> None:
    last = processor.max_length - 1
    _force(wide, processor.eos_token_id.to(wide.device), before.within(last, last))


def _exponential_decay(
    processor: hf.ExponentialDecayLengthPenalty, before: Prefixes, wide: Tensor
) -> None:
    start, base = processor.regulation_start, processor.regulation_factor
    if before.longest <= start:
        return
    # Computed in Python floats and then rounded to float32, as transformers does.
    factors = [
        pow(base, length - start) - 1 if length > start else 0.0
        for length in range(before.shortest, before.longest + 1)
    ]
    ids = processor.eos_token_id.to(wide.device)
    scores = wide.index_select(1, ids)
    factor: float | Tensor = factors[0]
    if not before.alike:
        table = torch.tensor(factors, device=wide.device)
        factor = table[before.lengths - before.shortest][:, None]
    penalty = (scores.abs() * factor).masked_fill_(~scores.isfinite(), 0.0)
    wide.index_copy_(1, ids, scores + penalty)


def _repetition(
    processor: hf.RepetitionPenaltyLogitsProcessor, before: Prefixes, wide: Tensor
) -> None:
    tokens, ignored = before.tokens, processor.prompt_ignore_length
    if isinstance(ignored, Tensor):  # the padding of each row
        starts = ignored.to(tokens.device)[torch.tensor(before.rows, device=tokens.device)]
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        tokens = tokens.masked_fill(columns < starts[:, None], wide.shape[1] - 1)
    elif ignored:
        tokens = tokens[:, ignored:]
    tokens = tokens.clamp(max=wide.shape[1] - 1)
    seen, penalty = wide.gather(1, tokens), processor.penalty
    # Scores below 0 are multiplied by the penalty, others divided: the minimum or maximum of both.
    harsher = torch.minimum if penalty > 1 else torch.maximum
    wide.scatter_(1, tokens, harsher(seen * penalty, seen / penalty))


def _no_repeat_ngram(
    processor: hf.NoRepeatNGramLogitsProcessor, before: Prefixes, wide: Tensor
) -> None:
    size, nothing = processor.ngram_size, wide.shape[1] - 1
    if before.longest < size:
        return
    # An n-gram that reaches beyond the end of its text has a padding id as its last token.
    count, suffix = before.longest - size + 1, before.last(size - 1)
    banned = before.tokens.narrow(1, size - 1, count).clamp(max=nothing)
    for at in range(size - 1):
        others = before.tokens.narrow(1, at, count) != suffix.narrow(1, at, 1)
        banned.masked_fill_(others, nothing)
    if before.shortest < size:
        banned.masked_fill_((before.lengths < size)[:, None], nothing)
    wide.scatter_(1, banned, -math.inf)


def _sequence_bias(processor: Any, before: Prefixes, wide: Tensor) -> None:
    scores = wide[:, :-1]
    if not processor.prepared_bias_variables:
        processor._prepare_bias_variables(scores)
    bias = torch.zeros_like(scores).add_(processor.length_1_bias)
    for prefixes, last_tokens, biases in processor.multi_token_biases:
        size = prefixes.shape[1]
        fits = before.within(size, math.inf)
        if fits is not False:
            matches = (before.last(size)[:, None] == prefixes).all(-1) & fits
            bias.index_add_(1, last_tokens, torch.where(matches, biases, 0.0))
    scores.add_(bias)


_IN_BLOCKS: dict[type, Callable[[Any, Prefixes, Tensor], None]] = {
    hf.ExponentialDecayLengthPenalty: _exponential_decay,
    hf.ForcedBOSTokenLogitsProcessor: _forced_bos,
    hf.ForcedEOSTokenLogitsProcessor: _forced_eos,
    hf.MinLengthLogitsProcessor: _min_length,
    hf.MinNewTokensLengthLogitsProcessor: _min_new_tokens,
    hf.NoBadWordsLogitsProcessor: _sequence_bias,
    hf.NoRepeatNGramLogitsProcessor: _no_repeat_ngram,
    hf.RepetitionPenaltyLogitsProcessor: _repetition,
    hf.SequenceBiasLogitsProcessor: _sequence_bias,
    hf.SuppressTokensAtBeginLogitsProcessor: _suppress_at_begin,
}


# Attributes that depend on a row's prompt. Only `Prefixes.within` reads them.
_OF_ROWS: dict[type, str] = {
    hf.ForcedEOSTokenLogitsProcessor: "max_length",
    hf.MinLengthLogitsProcessor: "min_length",
    hf.MinNewTokensLengthLogitsProcessor: "prompt_length_to_skip",
    hf.SuppressTokensAtBeginLogitsProcessor: "begin_index",
}


def signature(processors: Sequence[Processor]) -> list[tuple[type, Options]] | None:
    """What two rows' new processors must have in common to be applied as one (`joined`).

    `None` if they are only applied on their own.
    """
    known = []
    for processor in processors:
        facts = {**vars(processor)}
        if isinstance(processor, hf.SequenceBiasLogitsProcessor):
            facts = {"sequence_bias": processor.sequence_bias}  # the rest is made in the first call
        of_batch = isinstance(facts.get("prompt_ignore_length"), Tensor)
        if of_batch or not runs_in_blocks(processor):
            return None
        facts.pop(_OF_ROWS.get(type(processor), ""), None)
        values = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in facts.items()}
        known.append((type(processor), values))
    return known


def joined(rows: Sequence[Sequence[Processor]]) -> list[Processor]:
    """Processors for all rows together, from those of each row, which have one `signature`."""
    together = []
    for step in zip(*rows, strict=True):
        one, name = step[0], _OF_ROWS.get(type(step[0]))
        if name is not None and len({getattr(each, name) for each in step}) > 1:
            one = copy.copy(one)
            values = [getattr(each, name) for each in step]
            setattr(one, name, torch.tensor(values, device="cpu"))
        together.append(one)
    return together


def runs_in_blocks(processor: object) -> bool:
    """Whether `process` can run a processor; any other one, a user's own too, is called one by one.

    A subclass may do anything, so only the classes themselves are known. Before transformers 5.23
    biases of sequences have no table.
    """
    if isinstance(processor, hf.SequenceBiasLogitsProcessor):
        return type(processor) in _IN_BLOCKS and hasattr(processor, "multi_token_biases")
    return type(processor) in (*POINTWISE, *_IN_BLOCKS)


def process(processors: Sequence[Processor], before: Prefixes, logits: Tensor) -> Tensor:
    """Scores `[n, vocab]` in float32 after processors that `runs_in_blocks`.

    Args:
        processors: the processors, in order.
        before: the text before each position.
        logits: `[n, vocab]` the logits, which are not changed.
    """
    wide, scores = None, logits
    for processor in processors:
        in_blocks = _IN_BLOCKS.get(type(processor))
        if in_blocks is None:
            wide, scores = None, process_pointwise(processor, before.unread, scores.float())
            continue
        if wide is None:
            count, vocab = scores.shape
            wide = scores.new_empty(count, vocab + 1, dtype=torch.float32)
            scores = wide.narrow(1, 0, vocab).copy_(scores)
        in_blocks(processor, before, wide)
    return scores


def process_pointwise(processor: Processor, tokens: Tensor, scores: Tensor) -> Tensor:
    """Scores `[n, vocab]` after a processor that is `POINTWISE`.

    Args:
        processor: the processor.
        tokens: `[n, any]` anything.
        scores: `[n, vocab]` the scores, which are not changed.
    """
    if type(processor) is hf.TopPLogitsWarper and scores.dtype == torch.float32:
        if is_at_hand(scores) and min(len(scores), torch.get_num_threads()) < _ROWS_IN_A_SORT:
            return _top_p(processor, tokens, scores)
    return processor(tokens, scores)


def is_at_hand(tensor: Tensor) -> bool:
    """Whether reading a tensor waits for nothing, because its device runs synchronously."""
    return tensor.device.type == "cpu"


def _top_p(processor: Any, tokens: Tensor, scores: Tensor) -> Tensor:
    """What a `TopPLogitsWarper` returns, from sorted scores without their indices.

    On a CPU torch's sort of a large vocabulary takes as long as a pass of a small model, numpy's
    sort of the values alone a tenth of that.
    """
    ordered = torch.from_numpy(np.sort(scores.numpy(), axis=-1))
    removed = ordered.softmax(-1).cumsum(-1) <= 1 - processor.top_p
    most = scores.shape[-1] - processor.min_tokens_to_keep
    count = removed.sum(-1, keepdim=True).clamp_(max=max(most, 0))
    lowest = ordered.gather(-1, count)
    kept = scores.masked_fill(scores < lowest, processor.filter_value)
    # Of equal scores on both sides of the bound, the order of torch's sort decides.
    below = ordered.gather(-1, (count - 1).clamp_(min=0))
    tied = ((below == lowest) & (count > 0)).squeeze(-1)
    if bool(tied.any()):
        kept[tied] = processor(tokens[tied], scores[tied])
    return kept
