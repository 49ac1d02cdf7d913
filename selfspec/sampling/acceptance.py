"""Acceptance rules for chains and trees: probabilities in, `Verdict` out.

All rules but `typical_lossy` leave the target's distribution unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from selfspec.sampling.draft import Draft, Tree, Verdict
from selfspec.sampling.sampler import Sampler, draw

# A tiny multiple of p is added to residuals, so that p remains where rounding leaves nothing else.
_EPSILON = 1e-25


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


def longest_match(tokens: Tensor, scores: Tensor, counts: Tensor | None = None) -> Verdict:
    """Keep drafts while they are the target's own greedy choice (Stern et al. 2018).

    Args:
        tokens: `[batch, k]` drafts.
        scores: `[batch, k + 1, vocab]` target scores.
        counts: real drafts of each row.
    """
    target = scores.argmax(-1)
    kept = _of_real(tokens == target[:, :-1], counts)
    return Verdict(kept.cumprod(-1).sum(-1), target)


def rejection_sample(
    tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    generator: torch.Generator | None = None,
    counts: Tensor | None = None,
) -> Verdict:
    """Accept or replace drafts one by one so that the output follows the target's distribution.

    Leviathan et al. 2023 (Algorithm 1), Chen et al. 2023: draft x_i is accepted with
    probability min(1, p_i(x_i) / q_i(x_i)); the first rejected one is replaced by a draw from the
    residual max(0, p - q); if all are accepted, a bonus token is drawn from p.

    Args:
        tokens: `[batch, k]` drafts.
        draft_probs: `[batch, k, vocab]` q, what each draft was drawn from.
        target_probs: `[batch, k + 1, vocab]` p.
        generator: source of the draws; `None` uses torch's global one.
        counts: real drafts of each row.
    """
    p, q = _of_drafts(tokens, draft_probs, target_probs)
    coins = _coins(p, generator)
    accepted = _of_real(coins * q < p, counts).cumprod(-1).sum(-1)
    behind = _behind(draft_probs, counts)
    at_end = residual(_at(target_probs, accepted), _at(behind, accepted))
    return chain_verdict(tokens, accepted, draw(at_end, generator))


def block_verify(
    tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    generator: torch.Generator | None = None,
    counts: Tensor | None = None,
) -> Verdict:
    """Verify a chain as a whole: lossless, and never shorter on average than one by one.

    Block verification (Sun et al. 2024, Algorithm 2). With w_0 = 1 and
    w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i)), the first i drafts are accepted with probability
    h_i = s_i / (s_i + 1 - w_i), where s_i is the mass of max(0, w_i p_{i+1} - q_{i+1}); the longest
    prefix whose coin falls below its h_i is kept, and the next token is drawn from that residual.
    After the last draft q is zero, so that s = w, and the residual is p itself.

    Args:
        tokens: `[batch, k]` drafts.
        draft_probs: `[batch, k, vocab]` q, what each draft was drawn from.
        target_probs: `[batch, k + 1, vocab]` p.
        generator: source of the draws; `None` uses torch's global one.
        counts: real drafts of each row.
    """
    p, q = _of_drafts(tokens, draft_probs, target_probs)
    ratios = p / q.clamp_min(torch.finfo(q.dtype).tiny)
    weights = [p.new_ones(len(p))]
    for ratio in ratios.unbind(1):
        weights.append((weights[-1] * ratio).clamp_(max=1))
    weight = torch.stack(weights, dim=1)
    rest = weight[..., None] * target_probs
    rest[:, :-1].sub_(_of_real(draft_probs, counts))
    mass = rest.clamp_min_(0).sum(-1)[:, 1:]
    hold = mass / (mass + 1 - weight[:, 1:]).clamp_min(torch.finfo(mass.dtype).tiny)
    positions = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    stands = _of_real(_coins(p, generator) < hold, counts)
    accepted = (stands * positions).amax(-1) if len(positions) else tokens.new_zeros(len(tokens))
    left = _at(rest.add_(target_probs, alpha=_EPSILON), accepted)
    return chain_verdict(tokens, accepted, draw(left, generator))


def typical_lossy(
    tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    generator: torch.Generator | None = None,
    counts: Tensor | None = None,
) -> Verdict:
    """Keep drafts that the target finds typical: LOSSY, the output's distribution changes.

    Typical acceptance (Cai et al. 2024, Medusa): a draft is accepted where p(x) exceeds
    min(0.09, 0.3 exp(-H(p))); the token after is drawn from p.

    Args:
        tokens: `[batch, k]` drafts.
        draft_probs: ignored.
        target_probs: `[batch, k + 1, vocab]` p.
        generator: source of the draws; `None` uses torch's global one.
        counts: real drafts of each row.
    """
    p, _ = _of_drafts(tokens, draft_probs, target_probs)
    entropy = torch.special.entr(target_probs[:, :-1]).sum(-1)
    needed = (0.3 * (-entropy).exp()).clamp(max=0.09)  # their section 2.3.1
    accepted = _of_real(p > needed, counts).cumprod(-1).sum(-1)
    return chain_verdict(tokens, accepted, draw(_at(target_probs, accepted), generator))


# How a sampled chain is verified, by the name of the rule in configs.
CHAIN_RULES = {"block": block_verify, "token": rejection_sample, "typical_lossy": typical_lossy}

COUPLED = "coupled"  # drafts are compared with the token that the position's noise chooses
LOSSLESS_RULES = frozenset(CHAIN_RULES) - {"typical_lossy"} | {COUPLED}


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """max(0, p - q), not normalised; proportional to p where p equals q."""
    return (target_probs - draft_probs).clamp_min_(0).add_(target_probs, alpha=_EPSILON)


def one_hot(tokens: Tensor, like: Tensor) -> Tensor:
    """The distribution of a drafter that proposes `tokens` `[...]` with certainty."""
    probs = torch.zeros(*tokens.shape, like.shape[-1], dtype=like.dtype, device=like.device)
    return probs.scatter_(-1, tokens[..., None], 1)


def _of_drafts(tokens: Tensor, draft_probs: Tensor, target_probs: Tensor) -> tuple[Tensor, Tensor]:
    """P and q `[batch, k]` of the drafts themselves."""
    chosen = tokens[..., None]
    p = target_probs[:, :-1].gather(-1, chosen).squeeze(-1)
    return p, draft_probs.gather(-1, chosen).squeeze(-1)


def _of_real(values: Tensor, counts: Tensor | None) -> Tensor:
    """`values` `[batch, k, ...]` with padding drafts set to zero or false."""
    if counts is None:
        return values
    real = torch.arange(values.shape[1], device=values.device) < counts[:, None]
    return values * real.view(*real.shape, *[1] * (values.dim() - 2))


def _behind(draft_probs: Tensor, counts: Tensor | None) -> Tensor:
    """Q at every position of the block; zero where nothing was drafted after it."""
    return pad(_of_real(draft_probs, counts), (0, 0, 0, 1))


def _at(probs: Tensor, positions: Tensor) -> Tensor:
    """`[batch, vocab]` the distribution at one position of each row."""
    return probs[torch.arange(len(positions), device=positions.device), positions]


def _coins(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.rand(like.shape, generator=generator, device=like.device, dtype=like.dtype)


def chain_verdict(tokens: Tensor, accepted: Tensor, ending: Tensor) -> Verdict:
    """Keep the first `accepted` `[batch]` drafts, then the target's tokens `ending`."""
    kept = torch.cat([tokens, ending[:, None]], dim=1)
    return Verdict(accepted, kept.scatter(1, accepted[:, None], ending[:, None]))


def longest_branch(tokens: Tensor, tree: Tree, scores: Tensor) -> Verdict:
    """Keep the longest branch whose every token is the target's own greedy choice.

    SpecInfer (Miao et al. 2024), greedy verification.

    Args:
        tokens: `[batch, n]` drafts.
        tree: the token tree.
        scores: `[batch, n + 1, vocab]` target scores after each position.
    """
    target = scores.argmax(-1)
    parents = tree.parents
    wrong = (tokens != target.gather(1, parents.clamp_min(0))) | (parents < 0)
    rejected = (tree.ancestors[:, :, 1:] & wrong[:, None]).any(-1)
    end = tree.depths.masked_fill(rejected, -1).argmax(-1)
    return branch_verdict(tokens, tree, end, target.gather(1, end[:, None])[:, 0])


def sample_branch(
    tokens: Tensor,
    tree: Tree,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    generator: torch.Generator | None = None,
) -> Verdict:
    """Accept a branch so that the output follows the target's distribution exactly.

    Siblings are candidates drawn one after another without replacement, and are judged in that
    order (recursive rejection sampling: Miao et al. 2024, Chen et al. 2024 "Sequoia", Jeon et al.
    2024): x is accepted with probability min(1, p(x) / q(x)); if it is rejected, p becomes the
    residual max(0, p - q) and q loses x, both normalised, for the next sibling. The number of
    children of a position must not depend on the tokens that were drawn.

    Args:
        tokens: `[batch, n]` drafts, siblings in the order in which they were drawn.
        tree: the token tree.
        draft_probs: `[batch, m, vocab]` q after each position; `None` for drafts that were not
            sampled.
        target_probs: `[batch, n + 1, vocab]` p after each position.
        generator: source of the draws; `None` uses torch's global one.
    """
    rows = torch.arange(len(tokens), device=tokens.device)
    children = children_of(tree)
    at = torch.zeros_like(rows)
    going = torch.ones_like(rows, dtype=torch.bool)
    ending = target_probs[:, 0]
    for _ in range(tree.levels):
        p = ending  # of rows that have stopped, what is left for the target's own token
        q = None if draft_probs is None else probs_after(draft_probs, rows, at)
        offered = children[rows, at]
        candidates = tokens.gather(1, (offered - 1).clamp_min(0))
        rank, p = first_accepted(p, q, candidates, (offered > 0) & going[:, None], generator)
        chosen = pad(offered, (1, 0)).gather(1, rank[:, None])[:, 0]
        going = going & (chosen > 0)
        at = torch.where(going, chosen, at)
        ending = torch.where(going[:, None], target_probs[rows, at], p)
    return branch_verdict(tokens, tree, at, draw(ending, generator))


def first_accepted(
    p: Tensor,
    q: Tensor | None,
    candidates: Tensor,
    real: Tensor,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """Judge the candidates for one position in order, each after the rejection of those before it.

    Args:
        p: `[batch, vocab]` target probabilities.
        q: `[batch, vocab]` what the candidates were drawn from without replacement; `None` for
            candidates that were not sampled.
        candidates: `[batch, n]` tokens.
        real: `[batch, n]` which of them there are.
        generator: source of the draws.

    Returns:
        Which one is accepted, from 1 on, or 0 for none; and `[batch, vocab]` what is left of p.
    """
    chosen = torch.zeros_like(candidates[:, 0])
    for rank, token in enumerate(candidates.unbind(-1), 1):
        here = one_hot(token, p) if q is None else q
        accepted, tried = _judge(p, here, token, generator)
        tried = tried & real[:, rank - 1] & (chosen == 0)
        chosen = torch.where(tried & accepted, rank, chosen)
        rejected = (tried & ~accepted)[:, None]
        p = torch.where(rejected, _normalised(residual(p, here)), p)
        if q is not None:
            q = torch.where(rejected, _normalised(q.scatter(1, token[:, None], 0)), q)
    return chosen, p


def _judge(
    p: Tensor, q: Tensor, token: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Whether a candidate is accepted, and whether it is one: q(x) = 0 was never drawn."""
    p_token = p.gather(1, token[:, None])[:, 0]
    q_token = q.gather(1, token[:, None])[:, 0]
    coin = torch.rand(p_token.shape, generator=generator, device=p.device, dtype=p.dtype)
    return coin * q_token < p_token, q_token > 0


def probs_after(draft_probs: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """Q after one position of each row; arbitrary for positions without children."""
    return draft_probs[rows, at.clamp(max=draft_probs.shape[1] - 1)]


def _normalised(probs: Tensor) -> Tensor:
    return probs / probs.sum(-1, keepdim=True).clamp_min(torch.finfo(probs.dtype).tiny)


def children_of(tree: Tree) -> Tensor:
    """`[batch, n + 1, most siblings]` the children of each position, in order, then 0."""
    parents, ranks = tree.parents, tree.ranks
    batch, drafts = parents.shape
    most = tree.siblings
    table = parents.new_zeros(batch, (drafts + 2) * most)
    # Padding has no parent; it goes into a last row, which is cut off.
    index = torch.where(parents < 0, drafts + 1, parents) * most + ranks.clamp(max=most - 1)
    positions = torch.arange(1, drafts + 1, device=parents.device).expand(batch, -1)
    return table.scatter_(1, index, positions).view(batch, drafts + 2, most)[:, : drafts + 1]


def branch_verdict(tokens: Tensor, tree: Tree, end: Tensor, ending: Tensor) -> Verdict:
    """Keep the branch to the positions `end` `[batch]`, then the target's tokens `ending`."""
    accepted = tree.depths.gather(1, end[:, None])[:, 0]
    branch = tree.branch(tree.below(end))
    kept = tokens.gather(1, (branch - 1).clamp_min(0))
    kept = pad(kept, (0, 1))
    return Verdict(accepted, kept.scatter(1, accepted[:, None], ending[:, None]), branch)
