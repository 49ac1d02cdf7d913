"""Logits processors of transformers over many positions at once.

transformers calls a processor with the text of every row and the scores of its next token. A block
of drafts has many next tokens, after texts of many lengths. The functions here do to all of them
what the processor does to each, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process as hf

POINTWISE = (
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.LogitNormalization,
    hf.InfNanRemoveLogitsProcessor,
    hf.SuppressTokensLogitsProcessor,
)
"""Processors that read only one row of scores."""


class Prefixes(NamedTuple):
    """The text before each of `n` positions.

    Attributes:
        tokens: `[n, longest]` token ids, left-aligned; the size of the vocabulary behind the end.
        lengths: `[n]` tokens of each.
    """

    tokens: Tensor
    lengths: Tensor


def _min_length(processor: Any, before: Prefixes, scores: Tensor) -> Tensor:
    return _without_end(processor, scores, before.lengths < processor.min_length)


def _min_new_tokens(processor: Any, before: Prefixes, scores: Tensor) -> Tensor:
    new = before.lengths - processor.prompt_length_to_skip
    return _without_end(processor, scores, new < processor.min_new_tokens)


def _without_end(processor: Any, scores: Tensor, where: Tensor) -> Tensor:
    ids = torch.arange(scores.shape[-1], device=scores.device)
    ends = torch.isin(ids, processor.eos_token_id.to(scores.device))
    return scores.masked_fill(where.to(scores.device)[:, None] & ends, -torch.inf)


def _repetition(processor: Any, before: Prefixes, scores: Tensor) -> Tensor:
    vocab = scores.shape[-1]
    # A column for what is behind the end, and for ids that the LM head does not have.
    tokens = before.tokens[:, processor.prompt_ignore_length or 0 :].clamp(max=vocab)
    wider = torch.nn.functional.pad(scores, (0, 1))
    seen = wider.gather(1, tokens)
    seen = torch.where(seen < 0, seen * processor.penalty, seen / processor.penalty)
    return wider.scatter(1, tokens, seen)[:, :vocab]


def _no_repeat_ngram(processor: Any, before: Prefixes, scores: Tensor) -> Tensor:
    size, vocab = processor.ngram_size, scores.shape[-1]
    if before.tokens.shape[1] < size:
        return scores
    windows = before.tokens.unfold(1, size, 1)
    last = before.lengths[:, None] - torch.arange(size - 1, 0, -1, device=before.lengths.device)
    suffix = before.tokens.gather(1, last.clamp(min=0))
    matches = (windows[..., :-1] == suffix[:, None]).all(-1) & (before.lengths >= size)[:, None]
    banned = scores.new_zeros((len(scores), vocab + 1), dtype=torch.bool)
    banned.scatter_(1, torch.where(matches, windows[..., -1].clamp(max=vocab), vocab), True)
    return scores.masked_fill(banned[:, :vocab], -torch.inf)


_IN_BLOCKS: dict[type[LogitsProcessor], Callable[[Any, Prefixes, Tensor], Tensor]] = {
    hf.MinLengthLogitsProcessor: _min_length,
    hf.MinNewTokensLengthLogitsProcessor: _min_new_tokens,
    hf.NoRepeatNGramLogitsProcessor: _no_repeat_ngram,
    hf.RepetitionPenaltyLogitsProcessor: _repetition,
}


def runs_in_blocks(processor: LogitsProcessor) -> bool:
    """Whether `process` can run a processor; any other one, a user's own too, is called one by one.

    A subclass may do anything, so only the classes themselves are known.
    """
    if isinstance(getattr(processor, "prompt_ignore_length", None), Tensor):  # it counts rows
        return False
    return type(processor) in (*POINTWISE, *_IN_BLOCKS)


def process(processor: Any, before: Prefixes, scores: Tensor) -> Tensor:
    """Scores `[n, vocab]` of `n` positions after a processor that `runs_in_blocks`."""
    in_blocks = _IN_BLOCKS.get(type(processor))
    if in_blocks is None:
        return processor(before.tokens, scores)
    return in_blocks(processor, before, scores)
