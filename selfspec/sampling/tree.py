"""Rules for a tree of drafts.

Legend: batch = rows, n = drafted tokens of a row; place = index in the block (0 the pending token);
p = the target's distribution behind a place, q = what its children were drawn from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.sampling.chain import one_hot, residual
from selfspec.sampling.draft import Tree, Verdict
from selfspec.sampling.sampler import draw


def longest_branch(tokens: Tensor, tree: Tree, scores: Tensor) -> Verdict:
    """Keep the longest branch whose every token is the target's own greedy choice.

    SpecInfer (Miao et al. 2024), greedy verification.

    Args:
        tokens: `[batch, n]` drafts.
        tree: which continues which.
        scores: `[batch, n + 1, vocab]` target scores behind each place.
    """
    target = scores.argmax(-1)
    parents = tree.parents
    wrong = (tokens != target.gather(1, parents.clamp_min(0))) | (parents < 0)
    falls = (tree.ancestors[:, :, 1:] & wrong[:, None]).any(-1)
    end = tree.depths.masked_fill(falls, -1).argmax(-1)
    return _verdict(tokens, tree, end, target.gather(1, end[:, None])[:, 0])


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
    2024): x stands with probability min(1, p(x) / q(x)); where it falls, p becomes the residual
    max(0, p - q) and q loses x, both normalised, for the next. How many children a place has must
    not depend on which tokens were drawn for them.

    Args:
        tokens: `[batch, n]` drafts, siblings in the order in which they were drawn.
        tree: which continues which.
        draft_probs: `[batch, m, vocab]` q behind each place; `None` for candidates that were not
            drawn, but are proposed with certainty.
        target_probs: `[batch, n + 1, vocab]` p behind each place.
        generator: source of the draws; `None` takes torch's global one.
    """
    rows = torch.arange(len(tokens), device=tokens.device)
    children = _children(tree)
    at = torch.zeros_like(rows)
    going = torch.ones_like(rows, dtype=torch.bool)
    ending = target_probs[:, 0]
    for _ in range(tree.levels):
        p = ending  # of rows that have stopped, what is left for the target's own token
        q = None if draft_probs is None else _known(draft_probs, rows, at)
        chosen = torch.zeros_like(at)
        for child in children[rows, at].unbind(-1):
            token = tokens.gather(1, (child - 1).clamp_min(0)[:, None])[:, 0]
            here = one_hot(token, p) if q is None else q
            stands, tried = _judge(p, here, token, generator)
            tried = tried & going & (child > 0) & (chosen == 0)
            chosen = torch.where(tried & stands, child, chosen)
            fell = (tried & ~stands)[:, None]
            p = torch.where(fell, _normalised(residual(p, here)), p)
            if q is not None:
                q = torch.where(fell, _normalised(q.scatter(1, token[:, None], 0)), q)
        going = going & (chosen > 0)
        at = torch.where(going, chosen, at)
        ending = torch.where(going[:, None], target_probs[rows, at], p)
    return _verdict(tokens, tree, at, draw(ending, generator))


def _judge(
    p: Tensor, q: Tensor, token: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Whether a candidate stands, and whether it is one: what q rules out was never drawn."""
    p_token = p.gather(1, token[:, None])[:, 0]
    q_token = q.gather(1, token[:, None])[:, 0]
    coin = torch.rand(p_token.shape, generator=generator, device=p.device, dtype=p.dtype)
    return coin * q_token < p_token, q_token > 0


def _known(draft_probs: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """Q behind a place of each row; any will do behind a place without children."""
    return draft_probs[rows, at.clamp(max=draft_probs.shape[1] - 1)]


def _normalised(probs: Tensor) -> Tensor:
    return probs / probs.sum(-1, keepdim=True).clamp_min(torch.finfo(probs.dtype).tiny)


def _children(tree: Tree) -> Tensor:
    """`[batch, n + 1, most siblings]` the places that continue each place, in order, then 0."""
    parents, ranks = tree.parents, tree.ranks
    batch, drafts = parents.shape
    most = tree.siblings
    table = parents.new_zeros(batch, (drafts + 2) * most)
    # Padding has no parent; it is put behind the last place, which is cut off.
    index = torch.where(parents < 0, drafts + 1, parents) * most + ranks.clamp(max=most - 1)
    places = torch.arange(1, drafts + 1, device=parents.device).expand(batch, -1)
    return table.scatter_(1, index, places).view(batch, drafts + 2, most)[:, : drafts + 1]


def _verdict(tokens: Tensor, tree: Tree, end: Tensor, ending: Tensor) -> Verdict:
    accepted = tree.depths.gather(1, end[:, None])[:, 0]
    branch = tree.branch(tree.below(end))
    kept = tokens.gather(1, (branch - 1).clamp_min(0))
    kept = torch.nn.functional.pad(kept, (0, 1))
    return Verdict(accepted, kept.scatter(1, accepted[:, None], ending[:, None]), branch)
