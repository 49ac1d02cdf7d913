"""The rules that decide which drafts stand: probabilities in, `Verdict` out, no model in sight.

Every rule here is lossless: what it emits follows the target's distribution exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.draft import Draft, Verdict
from selfspec.sampling import Sampler, draw


def accept(draft: Draft, scores: Tensor, sampler: Sampler) -> Verdict:
    """Apply the rule that fits the caller's decoding to processed target `scores`.

    Args:
        draft: the proposal, k tokens a row.
        scores: `[batch, k + 1, vocab]` target scores after the caller's processors.
        sampler: greedy or sampled, and the generator to draw from.
    """
    if not sampler.do_sample:
        return longest_match(draft.tokens, scores)
    probs = scores.softmax(-1)
    draft_probs = draft.probs if draft.probs is not None else one_hot(draft.tokens, probs)
    return rejection_sample(draft.tokens, draft_probs, probs, sampler.generator)


def longest_match(tokens: Tensor, scores: Tensor) -> Verdict:
    """Keep drafts while they are the target's own greedy choice (Stern et al. 2018).

    Args:
        tokens: `[batch, k]` drafts.
        scores: `[batch, k + 1, vocab]` target scores.
    """
    target = scores.argmax(-1)
    accepted = (tokens == target[:, :-1]).cumprod(-1).sum(-1)
    return Verdict(accepted, target)


def rejection_sample(
    tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    generator: torch.Generator | None = None,
) -> Verdict:
    """Accept or replace drafts so that the output follows the target's distribution.

    Leviathan et al. 2023 (Algorithm 1), Chen et al. 2023: draft x_i stands with probability
    min(1, p_i(x_i) / q_i(x_i)); the first that falls is replaced by a draw from the residual
    max(0, p - q); when all stand, the bonus token is drawn from p after the last draft.

    Args:
        tokens: `[batch, k]` drafts.
        draft_probs: `[batch, k, vocab]` q, what each draft was drawn from.
        target_probs: `[batch, k + 1, vocab]` p.
        generator: source of the draws; `None` takes torch's global one.
    """
    chosen = tokens[..., None]
    p = target_probs[:, :-1].gather(-1, chosen).squeeze(-1)
    q = draft_probs.gather(-1, chosen).squeeze(-1)
    coins = torch.rand(p.shape, generator=generator, device=p.device, dtype=p.dtype)
    accepted = (coins * q < p).cumprod(-1).sum(-1)

    # q is zero behind the last draft: there the residual is p itself, and the token is the bonus.
    behind = torch.zeros_like(target_probs[:, :1])
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    p_at_end = target_probs[rows, accepted]
    q_at_end = torch.cat([draft_probs, behind], dim=1)[rows, accepted]
    ending = draw(residual(p_at_end, q_at_end), generator)
    kept = torch.cat([tokens, ending[:, None]], dim=1)
    return Verdict(accepted, kept.scatter(1, accepted[:, None], ending[:, None]))


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """max(0, p - q), not normalised; p itself where rounding leaves nothing (p equals q)."""
    rest = (target_probs - draft_probs).clamp_min(0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, target_probs)


def one_hot(tokens: Tensor, like: Tensor) -> Tensor:
    """The distribution of a drafter that proposes `tokens` `[batch, k]` with certainty."""
    probs = torch.zeros(*tokens.shape, like.shape[-1], dtype=like.dtype, device=like.device)
    return probs.scatter_(-1, tokens[..., None], 1)
