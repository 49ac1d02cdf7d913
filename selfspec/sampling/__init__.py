"""From logits to accepted tokens: sampler, coupled noise, drafts, acceptance rules."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.sampling.acceptance import (
    block_verify,
    longest_branch,
    longest_match,
    one_hot,
    rejection_sample,
    residual,
    sample_branch,
    typical_lossy,
)
from selfspec.sampling.draft import Draft, Tree, Verdict
from selfspec.sampling.sampler import Sampler, draw
from selfspec.sampling.walk import walk

# How a sampled chain is verified, by the name of the rule in configs.
CHAIN_RULES = {"block": block_verify, "token": rejection_sample, "typical_lossy": typical_lossy}

COUPLED = "coupled"  # drafts are compared with the token that the position's noise chooses
LOSSLESS_RULES = frozenset(CHAIN_RULES) - {"typical_lossy"} | {COUPLED}


def accept(draft: Draft, scores: Tensor, sampler: Sampler) -> Verdict:
    """Apply the sampler's acceptance rule to a draft.

    Args:
        draft: the proposal.
        scores: `[batch, n + 1, vocab]` processed target scores at each position of the block; with
            coupled noise added, if that is used.
        sampler: greedy or sampled, the rule for sampled chains, and the generator to draw from.
    """
    if draft.length == 0:
        return _plain_step(scores, sampler)
    if draft.tree is not None:
        if sampler.chooses:
            return longest_branch(draft.tokens, draft.tree, scores)
        probs = scores.softmax(-1)
        return sample_branch(draft.tokens, draft.tree, draft.probs, probs, sampler.generator)
    if sampler.chooses:
        return longest_match(draft.tokens, scores, draft.counts)
    probs = scores.softmax(-1)
    draft_probs = draft.probs if draft.probs is not None else one_hot(draft.tokens, probs)
    verify = CHAIN_RULES[sampler.rule]
    return verify(draft.tokens, draft_probs, probs, sampler.generator, draft.counts)


def _plain_step(scores: Tensor, sampler: Sampler) -> Verdict:
    """The target's own token `[batch, 1]` if nothing was drafted; equal for all rules."""
    token = scores.argmax(-1) if sampler.chooses else draw(scores.softmax(-1), sampler.generator)
    return Verdict(torch.zeros_like(token[:, 0]), token)


__all__ = [
    "CHAIN_RULES",
    "COUPLED",
    "LOSSLESS_RULES",
    "Draft",
    "Sampler",
    "Tree",
    "Verdict",
    "accept",
    "block_verify",
    "longest_branch",
    "longest_match",
    "one_hot",
    "rejection_sample",
    "residual",
    "sample_branch",
    "typical_lossy",
    "walk",
]
