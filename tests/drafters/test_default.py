"""The default draft: the fastest way of each round; without heads a seed gives one output."""

from __future__ import annotations

import random

import pytest
import torch
from conftest import EXIT, greedy, prompt, quieten, tiny_llama
from families import CASES_BY_FAMILY, build
from head_tools import own_head

from selfspec import DraftConfig, SelfSpecModel
from selfspec.schedule.rounds import Acceptance, Batch

UNFITTED = DraftConfig(drafter="auto", rule="coupled")
IDS, MASK = prompt(40, 33, 38)
REPEATING = torch.tensor([[5, 9, 3, 7] * 10])


@pytest.fixture
def chains(monkeypatch):
    """Of every round, whether it was a chain of drafts."""
    done, choose = [], Batch.choose

    def watched(batch, ways):
        way = choose(batch, ways)
        done.append(way is batch.chain)
        return way

    monkeypatch.setattr(Batch, "choose", watched)
    return done


@pytest.fixture
def broken_clock(monkeypatch):
    """Time goes in all directions, and differently in every call."""
    monkeypatch.setattr("time.perf_counter", random.Random(0).random)


def agreeing() -> SelfSpecModel:
    """A model of which the layers above the first add nothing, and no head was fitted."""
    return SelfSpecModel(quieten(tiny_llama("seldom"), 0.0, above=1))


def test_the_default_depends_on_what_there_is():
    model = tiny_llama()
    bare = SelfSpecModel(model)
    assert bare.default_draft == UNFITTED
    heads = [own_head(bare.decoder, "block", EXIT)]
    assert SelfSpecModel(model, heads).default_draft == DraftConfig(drafter="auto")
    assert SelfSpecModel(tiny_llama(num_hidden_layers=1)).default_draft.drafter == "none"


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma3_text", "opt", "gpt_neox"])
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2}], ids=["plain", "penalised"])
def test_greedy_tokens_are_the_models_own(family, options):
    model = build(family, CASES_BY_FAMILY[family]).double()
    ids, mask = prompt(12, 5, 9, vocab=61)
    options = {"max_new_tokens": 40, **options}
    out = SelfSpecModel(model).generate(ids, attention_mask=mask, do_sample=False, **options)
    assert torch.equal(out, greedy(model, ids, mask, **options))


@pytest.mark.matrix
@pytest.mark.parametrize("make", [agreeing, lambda: SelfSpecModel(tiny_llama("seldom"))])
@pytest.mark.parametrize("ids", [IDS[:1], REPEATING], ids=["random", "repeating"])
@pytest.mark.parametrize("draft", [None, {"schedule": "optimal", "rule": "coupled"}], ids=str)
def test_a_seed_gives_one_output_whatever_the_clock_says(make, ids, draft, broken_clock):
    """In calls one after the other, and in a fresh process."""
    spec, found = make(), []
    for each in (spec, spec, make()):
        torch.manual_seed(3)
        out = each.generate(ids, max_new_tokens=50, do_sample=True, temperature=0.7, draft=draft)
        found.append(out.tolist())
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 3])
def test_an_exit_drafts_if_it_agrees_at_the_end_of_the_prompt(chains, sampled, rows):
    ids, mask = IDS[:rows], MASK[:rows]
    for spec, drafts in ((agreeing(), True), (SelfSpecModel(tiny_llama("seldom")), False)):
        chains.clear()
        spec.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=sampled, top_k=0)
        # Sampled drafts of a random exit are accepted often: its tokens are all about as likely.
        assert any(chains) == drafts or (sampled and not drafts)


@pytest.mark.parametrize("how", [{"precision": "int8"}, {"window": 3}], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_auto_drafts_with_the_whole_model_if_asked(chains, how, rows):
    """Its states at the prompt are exact, so they tell nothing of approximate drafts."""
    model = tiny_llama("seldom", num_hidden_layers=2)
    draft = {"drafter": "auto", "exit_layer": 2, **how}
    options = {"attention_mask": MASK[:rows], "max_new_tokens": 30, "do_sample": False}
    out = SelfSpecModel(model).generate(IDS[:rows], draft=draft, **options)
    assert torch.equal(out, greedy(model, IDS[:rows], MASK[:rows], max_new_tokens=30))
    assert any(chains)


@pytest.mark.parametrize("chunk", [None, 7])
def test_the_prompt_is_judged_the_same_in_one_block_and_in_several(chunk, monkeypatch):
    """In several blocks only the last tokens of the last one count."""
    seen, spec = [], agreeing()
    monkeypatch.setattr(Acceptance, "learn", lambda *args: seen.append(args[1:]))
    options = {} if chunk is None else {"prefill_chunk_size": chunk}
    spec.generate(IDS, attention_mask=MASK, max_new_tokens=1, **options)
    assert {place for place, _ in seen} == {0} and all(chance == 1.0 for _, chance in seen)
    assert len(seen) == 3 * (32 // 3) or chunk is not None


def test_what_replaced_a_key_is_named():
    with pytest.raises(ValueError, match="times are always measured"):
        SelfSpecModel(tiny_llama()).generate(IDS[:1], draft={"times": "assumed"})
