"""From logits to accepted tokens: sampler, coupled noise, drafts, acceptance rules."""

from selfspec.sampling.acceptance import (
    CHAIN_RULES,
    COUPLED,
    LOSSLESS_RULES,
    accept,
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
from selfspec.sampling.vocabulary import DraftVocabulary
from selfspec.sampling.walk import walk

__all__ = [
    "CHAIN_RULES",
    "COUPLED",
    "LOSSLESS_RULES",
    "Draft",
    "DraftVocabulary",
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
