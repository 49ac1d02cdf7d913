"""Sampled output follows the target's own distribution, computed exactly, over several tokens.

The vocabulary is small enough to enumerate every continuation with the model's own forward and the
processors that `generate` prepares. A chi-square test then compares draws with the exact numbers;
planted faults show that it would catch what goes wrong in practice.
"""

from functools import cache, partial

import pytest
import torch
from conftest import tiny_llama
from distribution_tools import DRAWS, POINTWISE, VOCAB, WARPED, draws, exact, follows, p_values
from distribution_tools import target as target
from head_tools import own_head

from selfspec import DraftConfig, TextStore
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


@cache
def near():
    """The target's first layer, or one like it."""
    shape = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    return tiny_llama(dtype=torch.float32, spread=0.4, seed=20, **shape, **heads)


LOOKUP, SKIPPING = (
    partial(DraftConfig, drafter=name, num_draft_tokens=2)
    for name in ("prompt_lookup", "skip_sublayers")
)
SHORT = {"shortest": 1}
CLASP = {"search": "clasp", "layers": 1, "every": 1}
# A draft, with which processors, how many drafts are kept, how many texts are drawn, and the store.
FOLLOW = [
    # Both ways of writing a token are taken.
    *((TWO, options, (0.5, 0.8), DRAWS) for options in (POINTWISE, WARPED)),
    *(
        (draft, options, (0.4, 0.95), 8000)
        for draft in (TOKENWISE, TREE, DEEP)
        for options in (POINTWISE, WARPED)
    ),
    (ONE, WARPED, (0.4, 0.95), 10_000),
    ("none", WARPED, (-1, 1), 10_000),
    (LOOKUP(lookup=SHORT, rule="token"), POINTWISE, (0.05, 0.95), 8000),
    (LOOKUP(lookup=SHORT, rule="block"), WARPED, (0.05, 0.95), 8000),
    *((SKIPPING(skip=skip), WARPED, (0.1, 0.99), 6000) for skip in ({"mlp": (1,)}, CLASP)),
    *(
        (DraftConfig(drafter="two_model", num_draft_tokens=2), options, (0.1, 0.95), 8000)
        for options in (POINTWISE, WARPED)
    ),
]


@pytest.mark.matrix(share=3)
@pytest.mark.parametrize(("draft", "options", "between", "total"), FOLLOW, ids=str)
def test_sampled_text_follows_the_target(target, draft, options, between, total):
    follows(target, options, draft, between, total=total, draft_model=near())


@pytest.mark.matrix
@pytest.mark.parametrize("rule", ["token", "block"])
def test_sampled_text_follows_the_target_with_a_store(target, rule):
    draft = LOOKUP(lookup=SHORT, rule=rule)
    follows(target, POINTWISE, draft, total=8000, store=TextStore(4000))


@pytest.mark.matrix(share=3)
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
    follows(target, WARPED, draft, (0.1, 0.9), total=10_000, heads=[head])


@pytest.mark.matrix
@PROCESSORS
def test_a_draft_temperature_off_by_5_percent_is_caught(target, options, monkeypatch):
    """The recorded q is not the q that was drawn from."""
    drawn = Sampler.draw

    def colder(self, scores, context, depth, scored):
        tokens, _ = drawn(self, scores / 0.95, context, depth, scored)
        return tokens, scores.softmax(-1)

    monkeypatch.setattr(Sampler, "draw", colder)
    counts, _ = draws(target, options, TWO)
    assert min(p_values(counts, exact(target, options))) < 1e-9


@pytest.mark.slow
def test_a_trees_q_off_by_5_percent_is_caught(target, monkeypatch):
    extend = TreeExpansion._extend

    def colder(self, state, logits, growth, width):
        drawn = extend(self, state, logits, growth, width)
        growth.probs[-1] = (growth.probs[-1].log() / 0.95).softmax(-1)
        return drawn

    monkeypatch.setattr(TreeExpansion, "_extend", colder)
    counts, _ = draws(target, POINTWISE, TREE, total=20_000)
    assert min(p_values(counts, exact(target, POINTWISE))) < 1e-9


@pytest.mark.matrix
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
