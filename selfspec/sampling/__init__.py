"""From logits to accepted tokens: sampler, coupled noise, drafts, acceptance rules."""

from __future__ import annotations

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
from selfspec.sampling.sampler import Sampler

# How a sampled chain is verified, by the name of the rule in configs.
CHAIN_RULES = {"block": block_verify, "token": rejection_sample, "typical_lossy": typical_lossy}

COUPLED = "coupled"  # no rule of probabilities: drafts are compared with what is chosen
LOSSLESS_RULES = frozenset(CHAIN_RULES) - {"typical_lossy"} | {COUPLED}


def accept(draft: Draft, scores: Tensor, sampler: Sampler, rule: str = "block") -> Verdict:
    """Apply the rule that fits the draft and the caller's decoding.

    Args:
        draft: the proposal.
        scores: `[batch, n + 1, vocab]` target scores after each place of the block, after the
            caller's processors; with the noise of the positions, where draws belong to them.
        sampler: greedy or sampled, and the generator to draw from.
        rule: how sampled chains are verified (`CHAIN_RULES`), unless draws belong to positions.
    """
    if draft.tree is not None:
        if sampler.chooses:
            return longest_branch(draft.tokens, draft.tree, scores)
        probs = scores.softmax(-1)
        return sample_branch(draft.tokens, draft.tree, draft.probs, probs, sampler.generator)
    if sampler.chooses:
        return longest_match(draft.tokens, scores, draft.counts)
    probs = scores.softmax(-1)
    draft_probs = draft.probs if draft.probs is not None else one_hot(draft.tokens, probs)
    verify = CHAIN_RULES[rule]
    return verify(draft.tokens, draft_probs, probs, sampler.generator, draft.counts)


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
]
