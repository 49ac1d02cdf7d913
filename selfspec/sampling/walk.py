"""Verification with processors that may have a state: position by position, as plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from selfspec.sampling.acceptance import (
    branch_verdict,
    chain_verdict,
    children_of,
    first_accepted,
    probs_after,
)
from selfspec.sampling.context import Context
from selfspec.sampling.draft import Draft, Verdict
from selfspec.sampling.sampler import Sampler, draw

# Called after each position with the new tokens of unfinished rows, the text of every row of the
# call `[batch, length]` and the scores `[rows, vocab]`; returns which of these rows stop.
Ended = Callable[[Sequence[int], Tensor, Tensor], Sequence[bool]]


def walk(draft: Draft, logits: Tensor, sampler: Sampler, context: Context, ended: Ended) -> Verdict:
    """Accept drafts while every row's token is one of them.

    A processor with a state has to be called as in plain decoding: once for each committed token,
    in order, with the texts of all rows. So rows move in step. All have committed the same number
    of tokens, and the round ends for all of them at the first position at which the token of one
    is not a draft of it, or stops it.

    The tokens are the target's own, as in plain decoding: its greedy choice, the choice of the
    position's noise, or a sample, which is one of the drafts as often as possible (recursive
    rejection sampling, see `sample_branch`; of a chain Leviathan et al. 2023). Which tokens come
    later has no influence on them, so the output's distribution is that of plain decoding.

    Args:
        draft: the proposal.
        logits: `[rows, n + 1, vocab]` the target's at each position of the block.
        sampler: applies the processors, and chooses.
        context: the text so far; unfinished rows are equally long.
        ended: asks the stopping criteria.
    """
    tree, text = draft.as_tree(), context.padded()
    children, noise = children_of(tree), _noise_ahead(sampler, context, tree.levels + 1, logits)
    rows = torch.arange(len(logits), device=logits.device)
    at, level = torch.zeros_like(rows), 0  # each row's position in the block, and its depth
    while True:
        scores = sampler.apply(text, logits[rows, at], context.rows)
        offered = children[rows, at]
        drafts = draft.tokens.gather(1, (offered - 1).clamp_min(0)) if draft.length else offered
        if noise is not None:
            tokens = (scores + noise[:, level]).argmax(-1)
        else:
            tokens = _choose(draft, scores, sampler, at, drafts, offered > 0)
        text = torch.cat([text, context.column(tokens)], dim=1)
        stops = list(ended(tokens.tolist(), text, scores))
        following = torch.where(drafts == tokens[:, None], offered, 0).amax(-1)
        if level == tree.levels or any(stops) or not bool(following.all()):
            break
        at, level = following, level + 1
    if draft.tree is None:
        verdict = chain_verdict(draft.tokens, at, tokens)
    else:
        verdict = branch_verdict(draft.tokens, tree, at, tokens)
    return replace(verdict, cut=([level + 1] * len(rows), stops))


def _noise_ahead(sampler: Sampler, context: Context, width: int, logits: Tensor) -> Tensor | None:
    """`[rows, width, vocab]` the noise of the next positions; `None` if tokens have none."""
    if sampler.noise is None:
        return None
    return sampler.noise.ahead(context.rows, context.lengths, width, logits.shape[-1])


def _choose(
    draft: Draft, scores: Tensor, sampler: Sampler, at: Tensor, drafts: Tensor, real: Tensor
) -> Tensor:
    """`[rows]` the tokens after the positions `at` `[rows]`.

    Args:
        draft: the proposal.
        scores: `[rows, vocab]` processed scores.
        sampler: greedy or sampled.
        at: the positions in the block.
        drafts: `[rows, n]` the drafts for the next position, in the order in which they were drawn.
        real: `[rows, n]` which of them there are.
    """
    if not sampler.do_sample:
        return scores.argmax(-1)
    probs = scores.softmax(-1)
    if draft.probs is None or not bool(real.any()):
        return draw(probs, sampler.generator)
    rows = torch.arange(len(at), device=at.device)
    q = probs_after(draft.probs, rows, at)
    rank, left = first_accepted(probs, q, drafts, real, sampler.generator)
    accepted = torch.nn.functional.pad(drafts, (1, 0)).gather(1, rank[:, None])[:, 0]
    return torch.where(rank > 0, accepted, draw(left, sampler.generator))
