"""The rules one by one: the extremes, the parts, and which of them is taken."""

import pytest
import torch
from law_tools import VOCAB, distributions, p_value, seeded

from selfspec.generation.rounds import fetch
from selfspec.sampling import (
    accept,
    block_verify,
    longest_match,
    one_hot,
    rejection_sample,
    residual,
)
from selfspec.sampling.draft import Draft
from selfspec.sampling.sampler import Sampler

ROWS = 200_000


def drafted(probs, rows, generator):
    """Drafts `[rows, k]` drawn from q `[k, vocab]`."""
    draws = [torch.multinomial(q, rows, replacement=True, generator=generator) for q in probs]
    return torch.stack(draws, dim=1)


# Longest match


@pytest.mark.parametrize("k", [0, 1, 4])
def test_longest_match_keeps_exactly_the_common_prefix(k):
    scores = torch.randn(500, k + 1, 3, generator=seeded())
    tokens = torch.randint(0, 3, (500, k), generator=seeded(1))
    verdict = longest_match(tokens, scores)
    choice = scores.argmax(-1)
    for row in range(500):
        kept = 0
        while kept < k and tokens[row, kept] == choice[row, kept]:
            kept += 1
        assert verdict.accepted[row] == kept
        assert verdict.tokens[row, : kept + 1].tolist() == choice[row, : kept + 1].tolist()


def test_greedy_fast_path_is_the_rule_on_one_hot_probabilities():
    scores = torch.randn(2000, 4, VOCAB, generator=seeded())
    tokens = scores[:, :3].argmax(-1)
    wrong = torch.rand(tokens.shape, generator=seeded(1)) < 0.3
    tokens = torch.where(wrong, (tokens + 1) % VOCAB, tokens)
    fast = longest_match(tokens, scores)
    certain = one_hot(scores.argmax(-1), scores)
    rule = rejection_sample(tokens, one_hot(tokens, scores), certain, seeded(2))
    assert torch.equal(fast.accepted, rule.accepted)
    for row, kept in enumerate(fast.accepted.tolist()):
        assert torch.equal(fast.tokens[row, : kept + 1], rule.tokens[row, : kept + 1])


# Rejection sampling: the extremes


def test_a_draft_that_the_target_cannot_write_is_never_accepted():
    p = torch.tensor([0.5, 0.5, 0, 0, 0, 0]).expand(5000, 3, -1)
    q = torch.tensor([0, 0, 0.2, 0.3, 0.5, 0]).expand(5000, 2, -1)
    tokens = drafted(q[0], 5000, seeded())
    verdict = rejection_sample(tokens, q, p, seeded(1))
    assert bool((verdict.accepted == 0).all())
    assert set(verdict.tokens[:, 0].tolist()) == {0, 1}


def test_a_certain_draft_stands_with_the_targets_probability():
    p = distributions(2).expand(ROWS, -1, -1)
    token = torch.full((ROWS, 1), 2)
    verdict = rejection_sample(token, one_hot(token, p), p, seeded())
    expected = p[0, 0, 2].item()
    deviation = (expected * (1 - expected) / ROWS) ** 0.5
    assert abs(verdict.accepted.double().mean().item() - expected) < 5 * deviation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_residual_is_what_q_leaves_of_p_and_p_where_it_leaves_nothing(dtype):
    p, q = (distributions(50, seed=seed).to(dtype) for seed in (0, 1))
    left = (p - q).clamp_min(0)
    torch.testing.assert_close(residual(p, q), left, rtol=0, atol=1e-20)
    # q above p everywhere, as rounding may leave it.
    for nothing in (residual(p, p), residual(p, p + 1e-6)):
        torch.testing.assert_close(nothing / nothing.sum(-1, keepdim=True), p)


# Rejection sampling: the law


def test_emitted_distribution_is_p_exactly():
    """P(x) = q(x) min(1, p(x) / q(x)) + P(reject) residual(x) = p(x), in float64."""
    p, q = distributions(1000), distributions(1000, seed=1)
    kept = torch.minimum(p, q)
    rest = residual(p, q)
    emitted = kept + (1 - kept.sum(-1, keepdim=True)) * rest / rest.sum(-1, keepdim=True)
    torch.testing.assert_close(emitted, p, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_the_bonus_follows_p_behind_the_last_draft(k):
    probs = distributions(k + 1)
    tokens = drafted(probs[:k], ROWS, seeded()) if k else torch.empty(ROWS, 0, dtype=torch.long)
    p = probs.expand(ROWS, -1, -1)
    verdict = rejection_sample(tokens, p[:, :k], p, seeded(1))
    assert p_value(torch.bincount(verdict.tokens[:, k], minlength=VOCAB), probs[k]) > 1e-3


# The entry


def test_accept_takes_the_rule_that_fits_the_sampler():
    scores = distributions(100, 3).log()
    tokens = torch.randint(0, VOCAB, (100, 2), generator=seeded())
    by_match = accept(Draft(tokens), scores, Sampler())
    assert torch.equal(by_match.tokens, longest_match(tokens, scores).tokens)
    sampled = accept(Draft(tokens), scores, Sampler(do_sample=True, generator=seeded(1)))
    certain = one_hot(tokens, scores)
    same = block_verify(tokens, certain, scores.softmax(-1), seeded(1))
    assert torch.equal(sampled.tokens, same.tokens)


def test_draws_come_from_the_given_generator():
    probs = distributions(2).expand(100, -1, -1)
    tokens = drafted(probs[0, :1], 100, seeded())
    first, second = (rejection_sample(tokens, probs[:, :1], probs, seeded(7)) for _ in range(2))
    assert torch.equal(first.tokens, second.tokens)
    state = torch.get_rng_state()
    rejection_sample(tokens, probs[:, :1], probs, seeded(7))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_device_is_read_in_one_transfer():
    parts = [
        torch.tensor([1, 0]),
        torch.tensor([[1, 2, 3], [4, 5, 6]]),
        torch.empty(2, 0, dtype=torch.long),
        torch.tensor([[True, False], [False, False]]),
    ]
    assert fetch(parts) == [part.tolist() for part in parts]
