"""The laws of the rules: what is emitted follows the target exactly, and faults would be seen."""

import itertools
import math

import pytest
import torch
from law_tools import (
    PAIRS,
    SHAPES,
    VOCAB,
    Pair,
    Shapes,
    chain_round,
    distributions,
    draw,
    p_value,
    pair,
    planted,
    seeded,
    tree_round,
)

from selfspec.sampling import (
    acceptance,
    block_verify,
    longest_branch,
    longest_match,
    one_hot,
    rejection_sample,
    sample_branch,
    typical_lossy,
)
from selfspec.sampling.acceptance import first_accepted
from selfspec.sampling.draft import Tree

ROWS, TREES = 100_000, 50_000
LOSSLESS = {"block": block_verify, "token": rejection_sample}


def fits(outcome, pair):
    return p_value(outcome.counts, pair.joint)


# Chains


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("kind", PAIRS)
def test_chains_follow_the_target_and_are_kept_as_promised(rule, kind):
    both = pair(kind, 3)
    outcome, exact = chain_round(both, LOSSLESS[rule], ROWS), both.reach(rule == "block")
    assert fits(outcome, both) > 1e-3
    deviation = (exact * (1 - exact) / ROWS).clamp_min(0).sqrt()
    assert bool(((outcome.kept - exact).abs() <= 5 * deviation + 1e-12).all())


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("kind", PAIRS)
def test_rows_with_fewer_drafts_follow_the_target(rule, kind):
    both = pair(kind, 2)
    assert fits(chain_round(both, LOSSLESS[rule], ROWS, ragged=True), both) > 1e-3


@pytest.mark.parametrize("kind", PAIRS)
def test_a_block_keeps_no_fewer_than_draft_by_draft(kind):
    both = pair(kind, 3)
    gain = (both.reach(whole=True) - both.reach(whole=False)).sum()
    assert gain > 0.01 if kind in ("random", "too sure", "zeros") else gain > -1e-12


@pytest.mark.parametrize("seed", range(5))
def test_the_gain_is_never_negative_whatever_the_pair(seed):
    target, draft = distributions(4, VOCAB, seed=seed), distributions(3, VOCAB, seed=seed + 90)
    both = Pair(target, draft)
    assert bool((both.reach(True) >= both.reach(False) - 1e-12).all())


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_draft_equal_to_the_target_is_always_accepted(dtype, rule):
    probs = distributions(4).to(dtype).expand(ROWS, -1, -1)
    tokens = torch.stack([draw(probs[:, i], seeded(i)) for i in range(3)], 1)
    verdict = LOSSLESS[rule](tokens, probs[:, :3], probs, seeded(9))
    assert bool((verdict.accepted == 3).all())
    assert torch.equal(verdict.tokens[:, :3], tokens)


@pytest.mark.parametrize("rule", [*LOSSLESS.values(), typical_lossy])
def test_no_row_keeps_more_than_its_own_drafts(rule):
    probs = distributions(4).expand(4000, -1, -1)
    tokens = draw(probs.flatten(0, 1), seeded()).view(4000, 4)[:, :3]
    counts = torch.arange(4000) % 4
    verdict = rule(tokens, probs[:, :3], probs, seeded(1), counts)
    assert bool((verdict.accepted <= counts).all())
    if rule is not typical_lossy:  # each draft was drawn from p itself
        assert torch.equal(verdict.accepted, counts)


# What each fault says in place of what is right, and the kind of pair that shows it.
CHAIN_FAULTS = {
    "residual without the weight": (
        block_verify,
        "left = _at(rest.add_(target_probs, alpha=_EPSILON), accepted)",
        "left = residual(_at(target_probs, accepted), _at(_behind(draft_probs, counts), accepted))",
    ),
    "mass without the weight": (
        block_verify,
        "rest = weight[..., None] * target_probs",
        "rest = target_probs.clone()",
    ),
    "coin against the ratio": (block_verify, "< hold,", "< ratios,"),
    "coin against the weight": (block_verify, "< hold,", "< weight[:, 1:],"),
    "weight not cut at 1": (block_verify, ".clamp_(max=1))", ")"),
    "stops at the first that falls": (
        block_verify,
        "(stands * positions).amax(-1)",
        "stands.cumprod(-1).sum(-1)",
    ),
    "q behind the last draft": (
        acceptance._of_real,
        "if counts is None",
        "if counts is None or values.dim() == 3",
    ),
    "replacement from p": (
        rejection_sample,
        "residual(_at(target_probs, accepted), _at(behind, accepted))",
        "_at(target_probs, accepted)",
    ),
    "keeps what is likely enough": (rejection_sample, "coins * q < p,", "coins < p,"),
    "residual not cut at 0": (acceptance.residual, ".clamp_min_(0)", ".abs()"),
}


@pytest.mark.parametrize("fault", CHAIN_FAULTS)
def test_faults_of_chain_rules_are_caught(monkeypatch, fault):
    function, right, wrong = CHAIN_FAULTS[fault]
    name = "rejection_sample" if function is acceptance.residual else "block_verify"
    name = function.__name__ if function in LOSSLESS.values() else name
    monkeypatch.setattr(acceptance, function.__name__, planted(function, right, wrong))
    both = pair("too sure", 3)
    ragged = fault == "q behind the last draft"
    assert fits(chain_round(both, getattr(acceptance, name), ROWS, ragged=ragged), both) < 1e-9


@pytest.mark.parametrize("rule", LOSSLESS)
def test_a_q_that_is_not_what_was_drawn_from_is_caught(rule):
    both = pair("random", 2)
    outcome = chain_round(both, LOSSLESS[rule], ROWS, said=lambda q: (q.log() * 1.15).softmax(-1))
    assert fits(outcome, both) < 1e-9


# Trees


@pytest.mark.matrix
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", PAIRS)
def test_trees_follow_the_target(shape, kind):
    shapes = SHAPES[shape]
    both = pair(kind, shapes.levels)
    assert fits(tree_round(both, sample_branch, shapes, TREES), both) > 1e-3


@pytest.mark.parametrize("shape", SHAPES)
def test_trees_that_are_certain_of_their_tokens_follow_the_target(shape):
    shapes = SHAPES[shape]
    both = pair("random", shapes.levels)
    outcome = tree_round(both, sample_branch, shapes, TREES, certain=True)
    assert fits(outcome, both) > 1e-3
    assert outcome.kept[0] > 0


def test_a_candidate_twice_over_changes_nothing():
    """Sources that do not know each other may propose the same token."""
    p = distributions(3).expand(ROWS, -1, -1)
    tokens = torch.tensor([[2, 2]]).expand(ROWS, -1)
    parents = torch.zeros_like(tokens)
    verdict = sample_branch(tokens, Tree(parents, 1, 2), None, p, seeded())
    first = torch.bincount(verdict.tokens[:, 0], minlength=VOCAB)
    assert p_value(first, p[0, 0]) > 1e-3


TREE_FAULTS = {
    "q not renormalised": (
        first_accepted,
        "_normalised(q.scatter(1, token[:, None], 0))",
        "q.scatter(1, token[:, None], 0)",
    ),
    "q keeps what has fallen": (
        first_accepted,
        "_normalised(q.scatter(1, token[:, None], 0))",
        "q",
    ),
    "p not replaced by the residual": (
        first_accepted,
        "_normalised(residual(p, here))",
        "p",
    ),
    "residual not renormalised": (
        first_accepted,
        "_normalised(residual(p, here))",
        "residual(p, here)",
    ),
    "ends with p itself": (
        sample_branch,
        "draw(ending, ",
        "draw(target_probs[rows, at], ",
    ),
    "q of another place": (
        sample_branch,
        "probs_after(draft_probs, rows, at)",
        "probs_after(draft_probs, rows, at * 0)",
    ),
}
DRAFTING_FAULTS = ["out of order", "depends on the draw"]


@pytest.mark.parametrize("fault", TREE_FAULTS)
def test_faults_of_the_tree_rule_are_caught(fault, monkeypatch):
    both = pair("too sure", 2)
    function, right, wrong = TREE_FAULTS[fault]
    monkeypatch.setattr(acceptance, function.__name__, planted(function, right, wrong))
    outcome = tree_round(both, acceptance.sample_branch, SHAPES["binary"], TREES)
    assert fits(outcome, both) < 1e-9


@pytest.mark.parametrize("fault", DRAFTING_FAULTS)
def test_trees_that_are_not_drawn_as_promised_are_caught(fault):
    both = pair("too sure", 1)
    outcome = tree_round(both, sample_branch, SHAPES["fan"], TREES, fault=fault)
    assert fits(outcome, both) < 1e-9


def test_siblings_drawn_with_replacement_cost_candidates_and_no_more():
    """One that has fallen before is passed over; the others come from what is left of q."""
    both = pair("too sure", 1)
    shapes = SHAPES["fan"]
    again = tree_round(both, sample_branch, shapes, TREES, fault="with replacement")
    assert fits(again, both) > 1e-3
    assert again.kept[0] < tree_round(both, sample_branch, shapes, TREES).kept[0] - 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_first_candidates_of_the_target_itself_are_always_accepted(dtype):
    """Each place's first child stands, so the branch of first children does."""
    probs = distributions(1).to(dtype).expand(20_000, 7, -1)
    race = probs / torch.empty_like(probs).exponential_(generator=seeded())
    first, second = race.argsort(-1, descending=True)[..., :2].unbind(-1)
    tokens = torch.stack([first[:, 0], second[:, 0], first[:, 1], second[:, 1]], 1)
    tree = Tree(torch.tensor([[0, 0, 1, 1]]).expand(20_000, -1), 2, 2)
    verdict = sample_branch(tokens, tree, probs[:, :3], probs[:, :5], seeded(1))
    assert bool((verdict.accepted == 2).all())
    assert verdict.branch.unique(dim=0).tolist() == [[1, 3]]


def test_what_the_target_cannot_write_is_never_accepted():
    outcome = tree_round(pair("disjoint", 2), sample_branch, SHAPES["binary"], 20_000)
    assert outcome.kept.tolist() == [0, 0]


def test_more_candidates_are_kept_more_often():
    both, one = pair("random", 1), Shapes([[0]], 1, 1)
    shares = [
        tree_round(both, sample_branch, shapes, TREES).kept[0] for shapes in (one, SHAPES["fan"])
    ]
    assert shares[1] > shares[0] + 0.05


def test_a_tree_of_width_1_is_a_chain_kept_draft_by_draft():
    both = pair("random", 2)
    outcome = tree_round(both, sample_branch, SHAPES["path"], TREES)
    exact = both.reach(whole=False)
    assert bool(((outcome.kept - exact).abs() < 5 * (exact * (1 - exact) / TREES).sqrt()).all())


# Greedy trees


def random_tree(rows, drafts, source):
    """Trees of any shape, with padding; siblings have different tokens."""
    parents = torch.full((rows, drafts), -1)
    tokens = torch.zeros(rows, drafts, dtype=torch.long)
    for row in range(rows):
        real = [0]
        for place in range(1, drafts + 1):
            above = real[int(torch.randint(len(real), (1,), generator=source))]
            token = int(torch.randint(3, (1,), generator=source))
            taken = tokens[row][parents[row] == above].tolist()
            if token not in taken:
                parents[row, place - 1], tokens[row, place - 1] = above, token
                real.append(place)
    return tokens, Tree(parents, drafts, 3)


def test_longest_branch_is_the_longest_of_all_branches():
    tokens, tree = random_tree(300, 7, seeded())
    scores = torch.randn(300, 8, 3, generator=seeded(1))
    verdict, choice = longest_branch(tokens, tree, scores), scores.argmax(-1)
    for row in range(300):
        best: list[int] = []
        for place in range(1, 8):
            way = [place]
            while way[0] > 0:
                way.insert(0, int(tree.parents[row, way[0] - 1]))
            if way[0] < 0:
                continue
            right = all(
                tokens[row, child - 1] == choice[row, above]
                for above, child in itertools.pairwise(way)
            )
            if right and len(way) - 1 > len(best):
                best = way[1:]
        kept = len(best)
        assert verdict.accepted[row] == kept
        assert verdict.branch[row, :kept].tolist() == best
        assert verdict.tokens[row, :kept].tolist() == [tokens[row, i - 1] for i in best]
        assert verdict.tokens[row, kept] == choice[row, best[-1] if best else 0]


def test_the_greedy_path_is_the_tree_rule_on_one_hot_probabilities():
    tokens, tree = random_tree(500, 7, seeded(2))
    scores = torch.randn(500, 8, 3, generator=seeded(1))
    fast = longest_branch(tokens, tree, scores)
    rule = sample_branch(tokens, tree, None, one_hot(scores.argmax(-1), scores), seeded(3))
    assert torch.equal(fast.accepted, rule.accepted) and torch.equal(fast.branch, rule.branch)
    kept = torch.arange(8) <= fast.accepted[:, None]
    assert torch.equal(fast.tokens[kept], rule.tokens[kept])


def test_the_greedy_tree_of_width_1_is_the_greedy_chain():
    scores = torch.randn(500, 5, 3, generator=seeded())
    tokens = torch.randint(0, 3, (500, 4), generator=seeded(1))
    by_chain = longest_match(tokens, scores)
    path = longest_branch(tokens, Tree(torch.arange(4).expand(500, -1), 4, 1), scores)
    assert torch.equal(path.accepted, by_chain.accepted)
    kept = torch.arange(5) <= by_chain.accepted[:, None]
    assert torch.equal(path.tokens[kept], by_chain.tokens[kept])
    assert torch.equal(path.branch, torch.arange(1, 5).expand(500, -1))


# The lossy rule


def test_typical_acceptance_keeps_what_is_typical():
    p, tokens = distributions(2000, 4), torch.randint(0, VOCAB, (2000, 3), generator=seeded())
    never_looked_at = torch.full((2000, 3, VOCAB), torch.nan, dtype=torch.float64)
    verdict = typical_lossy(tokens, never_looked_at, p, seeded(1))
    for row in range(2000):
        kept = 0
        for place, token in enumerate(tokens[row]):
            probs = p[row, place].tolist()
            entropy = -sum(x * math.log(x) for x in probs)
            if probs[token] <= min(0.09, 0.3 * math.exp(-entropy)):
                break
            kept += 1
        assert verdict.accepted[row] == kept
        assert verdict.tokens[row, :kept].tolist() == tokens[row, :kept].tolist()
    assert verdict.accepted.unique().tolist() == [0, 1, 2, 3]


def test_behind_typical_drafts_the_target_draws():
    both = pair("equal", 1)
    outcome = chain_round(both, typical_lossy, ROWS)
    words = outcome.verdict.tokens[outcome.verdict.accepted == 1]
    for token in words[:, 0].unique():
        behind = torch.bincount(words[words[:, 0] == token, 1], minlength=VOCAB)
        assert p_value(behind, both.target[1, token]) > 1e-3


def test_typical_acceptance_is_lossy():
    both = pair("random", 2)
    assert fits(chain_round(both, typical_lossy, ROWS), both) < 1e-9
