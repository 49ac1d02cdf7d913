"""Sampled output follows the target's own distribution, computed exactly, over several tokens.

The vocabulary is small enough to enumerate every continuation with the model's own forward and the
processors that `generate` prepares. A chi-square test then compares draws with the exact numbers;
planted faults show that it would catch what goes wrong in practice.
"""

import itertools

import pytest
import torch
from conftest import quieten, tiny_llama
from head_tools import own_head
from law_tools import p_value

from selfspec import DraftConfig, SelfSpecModel
from selfspec.config import TreeConfig
from selfspec.decoder import Decoder
from selfspec.drafters.tree import TreeExpansion
from selfspec.sampling.sampler import Sampler

VOCAB, HORIZON, DRAWS, BATCH = 12, 4, 36_000, 2000
PROMPT = torch.tensor([[7, 7, 1]])
WARPED = {"temperature": 0.8, "top_k": 9, "top_p": 0.95, "repetition_penalty": 1.3}
POINTWISE = {"temperature": 0.7, "top_k": 0}
ONE, TWO = (DraftConfig(exit_layer=1, num_draft_tokens=k) for k in (1, 2))
TOKENWISE = DraftConfig(exit_layer=1, num_draft_tokens=2, rule="token")
TREE, DEEP = (
    DraftConfig(drafter="tree", exit_layer=1, num_draft_tokens=levels, tree=TreeConfig(nodes=nodes))
    for levels, nodes in ((2, 6), (3, 7))
)
PROCESSORS = pytest.mark.parametrize("options", [POINTWISE, WARPED], ids=["pointwise", "prefix"])


@pytest.fixture(scope="module")
def target():
    shape = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16}
    heads = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny_llama("seldom", dtype=torch.float32, spread=0.4, seed=20, **shape, **heads)
    return quieten(model, 0.3, above=1)  # most drafts are kept, not all


def prepared_processors(model, options):
    """What transformers makes of the options, in its order."""
    found = []

    def custom(model, input_ids, logits_processor, **kwargs):
        found.append(logits_processor)
        return input_ids

    model.generate(PROMPT, do_sample=True, custom_generate=custom, max_new_tokens=3, **options)
    return found[0]


@torch.no_grad()
def exact(model, options):
    """`[VOCAB] * HORIZON` probabilities of every continuation under plain decoding."""
    processors = prepared_processors(model, options)
    joint = torch.ones((), dtype=torch.float64)
    for length in range(HORIZON):
        words = list(itertools.product(range(VOCAB), repeat=length))
        behind = torch.tensor(words, dtype=torch.long).view(len(words), length)
        text = torch.cat([PROMPT.expand(len(words), -1), behind], dim=1)
        scores = processors(text, model(text).logits[:, -1].float())
        step = scores.double().softmax(-1).view([VOCAB] * (length + 1))
        joint = joint[..., None] * step
    return joint


def draws(model, options, draft, total=DRAWS, seed=0, heads=(), store=None):
    """Counts of the continuations that speculation writes, and its acceptance rate."""
    spec = SelfSpecModel(model, heads, store=store)
    generator = torch.Generator().manual_seed(seed)
    counts, rates = torch.zeros(VOCAB**HORIZON), []
    for _ in range(total // BATCH):
        text = spec.generate(
            PROMPT,
            attention_mask=torch.ones_like(PROMPT),
            do_sample=True,
            max_new_tokens=HORIZON,
            num_return_sequences=BATCH,
            generator=generator,
            draft=draft,
            **options,
        )
        cells = (text[:, PROMPT.shape[1] :] * VOCAB ** torch.arange(HORIZON - 1, -1, -1)).sum(-1)
        counts += torch.bincount(cells, minlength=VOCAB**HORIZON)
        rates.append(spec.last_stats.acceptance_rate)
    return counts.double().view([VOCAB] * HORIZON), sum(rates) / len(rates)


def p_values(counts, probs):
    """The test over each token alone and over the first 2, 3, 4: few cells see small faults best.

    Prefill writes the first token; the next two are drafted, the last is corrected or the bonus.
    """
    alone = [(token,) for token in range(HORIZON)]
    together = [tuple(range(length)) for length in range(2, HORIZON + 1)]
    others = [tuple({*range(HORIZON)} - {*kept}) for kept in (*alone, *together[:-1])]
    marginals = [(counts.sum(dim=rest), probs.sum(dim=rest)) for rest in others]
    return [p_value(*pair) for pair in (*marginals, (counts, probs))]


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
