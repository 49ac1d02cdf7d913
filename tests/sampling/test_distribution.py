"""Sampled output follows the target's own distribution, computed exactly, over several tokens.

The vocabulary is small enough to enumerate every continuation with the model's own forward and the
processors that `generate` prepares. A chi-square test then compares draws with the exact numbers;
planted faults show that it would catch what goes wrong in practice.
"""

import pytest
import torch
from distribution_tools import POINTWISE, WARPED, draws, exact, p_values
from head_tools import own_head

from selfspec import DraftConfig
from selfspec.config import TreeConfig
from selfspec.decoder import Decoder
from selfspec.drafters.tree import TreeExpansion
from selfspec.sampling.sampler import Sampler

ONE, TWO = (DraftConfig(exit_layer=1, num_draft_tokens=k) for k in (1, 2))
TOKENWISE = DraftConfig(exit_layer=1, num_draft_tokens=2, rule="token")
TREE, DEEP = (
    DraftConfig(drafter="tree", exit_layer=1, num_draft_tokens=levels, tree=TreeConfig(nodes=nodes))
    for levels, nodes in ((2, 6), (3, 7))
)
PROCESSORS = pytest.mark.parametrize("options", [POINTWISE, WARPED], ids=["pointwise", "prefix"])


@PROCESSORS
def test_sampled_text_follows_the_target(target, options):
    counts, acceptance = draws(target, options, TWO)
    assert 0.5 < acceptance < 0.8  # both ways of writing a token are taken
    assert min(p_values(counts, exact(target, options))) > 1e-3


@pytest.mark.parametrize("draft", [TOKENWISE, TREE, DEEP], ids=["token", "tree", "deep tree"])
@PROCESSORS
def test_any_rule_and_any_tree_follow_the_target(target, options, draft):
    counts, acceptance = draws(target, options, draft, total=8000)
    assert 0.4 < acceptance < 0.95
    assert min(p_values(counts, exact(target, options))) > 1e-3


@pytest.mark.parametrize("draft", [ONE, "none"], ids=["one draft", "no drafts"])
def test_sampled_text_follows_the_target_whatever_the_draft(target, draft):
    counts, _ = draws(target, WARPED, draft, total=10_000)
    assert min(p_values(counts, exact(target, WARPED))) > 1e-3


@pytest.mark.parametrize(
    ("kind", "trimmed", "draft", "options"),
    [
        ("block", False, TWO, {}),
        ("lens", True, TWO, {}),
        ("fused parallel", False, TWO, {}),
        ("block parallel", True, DEEP, {}),
        ("dflash rnn", False, TWO, {}),
        ("dflash", False, TWO, {"selector_rank": 4, "selector_top_k": 3, "conv_kernel_size": 2}),
        ("dflash", True, DEEP, {"selector_rank": 4, "selector_top_k": 4}),
    ],
)
def test_sampled_text_follows_the_target_with_a_head_of_its_own(
    target, kind, trimmed, draft, options
):
    head = own_head(Decoder(target), kind, 1, trimmed=trimmed, noise=0.1, **options)
    draft = draft.model_copy(update={"exit_layer": head.exit_layer})
    counts, acceptance = draws(target, WARPED, draft, total=10_000, heads=[head])
    assert 0.1 < acceptance < 0.9
    assert min(p_values(counts, exact(target, WARPED))) > 1e-3


@PROCESSORS
def test_a_draft_temperature_off_by_5_percent_is_caught(target, options, monkeypatch):
    """The recorded q is not the q that was drawn from."""
    drawn = Sampler.draw

    def colder(self, scores, context, depth):
        tokens, _ = drawn(self, scores / 0.95, context, depth)
        return tokens, scores.softmax(-1)

    monkeypatch.setattr(Sampler, "draw", colder)
    counts, _ = draws(target, options, TWO)
    assert min(p_values(counts, exact(target, options))) < 1e-9


def test_a_trees_q_off_by_5_percent_is_caught(target, monkeypatch):
    extend = TreeExpansion._extend

    def colder(self, state, logits, growth, width):
        drawn = extend(self, state, logits, growth, width)
        growth.probs[-1] = (growth.probs[-1].log() / 0.95).softmax(-1)
        return drawn

    monkeypatch.setattr(TreeExpansion, "_extend", colder)
    counts, _ = draws(target, POINTWISE, TREE, total=20_000)
    assert min(p_values(counts, exact(target, POINTWISE))) < 1e-9


@PROCESSORS
def test_a_bonus_token_from_unprocessed_logits_is_caught(target, options, monkeypatch):
    scored = Sampler.scores

    def careless(self, logits, context, offset=0):
        scores = scored(self, logits, context, offset)
        if logits.shape[1] == 2:  # verification of one draft: the last position is the bonus
            # What the processors exclude stays excluded, so that only proportions are wrong.
            excluded = scores[:, -1].isinf()
            scores[:, -1] = logits[:, -1].float().masked_fill(excluded, -torch.inf)
        return scores

    monkeypatch.setattr(Sampler, "scores", careless)
    counts, _ = draws(target, options, ONE, total=10_000)
    assert min(p_values(counts, exact(target, options))) < 1e-9
