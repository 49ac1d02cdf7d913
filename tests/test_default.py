"""The default draft: a chain with heads; without, lookups and plain decoding, by tokens only."""

from __future__ import annotations

import random

import pytest
import torch
from conftest import EXIT, greedy, prompt, quieten, tiny_llama
from families import build
from head_tools import own_head
from test_families import CASES_BY_FAMILY

from selfspec import DraftConfig, SelfSpecModel
from selfspec.drafters.auto import Auto
from selfspec.schedule import RoundModel, Work

UNFITTED = DraftConfig(drafter="auto", times="assumed")
IDS, MASK = prompt(40, 33, 38)
REPEATING = torch.tensor([[5, 9, 3, 7] * 10])


@pytest.fixture
def works(monkeypatch):
    """The work of every round."""
    done, choose = [], Auto._choose
    monkeypatch.setattr(Auto, "_choose", lambda *args: done.append(choose(*args)) or done[-1])
    return done


@pytest.fixture
def broken_clock(monkeypatch):
    """Time goes in all directions, and differently in every call."""
    monkeypatch.setattr("selfspec.schedule.round_model.time.perf_counter", random.Random(0).random)


def agreeing() -> SelfSpecModel:
    """A model of which the layers above the first add nothing, and no head was fitted."""
    return SelfSpecModel(quieten(tiny_llama("seldom"), 0.0, above=1))


def test_the_default_depends_on_what_there_is():
    model = tiny_llama()
    bare = SelfSpecModel(model)
    assert bare.default_draft == UNFITTED
    heads = [own_head(bare.engine.decoder, "block", EXIT)]
    assert SelfSpecModel(model, heads).default_draft == DraftConfig()
    assert SelfSpecModel(tiny_llama(num_hidden_layers=1)).default_draft.drafter == "none"


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma3_text", "opt", "gpt_neox"])
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2}], ids=["plain", "penalised"])
def test_greedy_tokens_are_the_models_own(family, options):
    model = build(family, CASES_BY_FAMILY[family]).double()
    ids, mask = prompt(12, 5, 9, vocab=61)
    options = {"max_new_tokens": 40, **options}
    out = SelfSpecModel(model).generate(ids, attention_mask=mask, do_sample=False, **options)
    assert torch.equal(out, greedy(model, ids, mask, **options))


@pytest.mark.parametrize("make", [agreeing, lambda: SelfSpecModel(tiny_llama("seldom"))])
@pytest.mark.parametrize("ids", [IDS[:1], REPEATING], ids=["random", "repeating"])
@pytest.mark.parametrize("draft", [None, {"schedule": "optimal", "times": "assumed"}], ids=str)
def test_a_seed_gives_one_output_whatever_the_clock_says(make, ids, draft, broken_clock):
    """In calls one after the other, and in a fresh process."""
    spec, found = make(), []
    for each in (spec, spec, make()):
        torch.manual_seed(3)
        out = each.generate(ids, max_new_tokens=50, do_sample=True, temperature=0.7, draft=draft)
        found.append((out.tolist(), each.last_trace.rows))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 3])
def test_an_exit_drafts_if_it_agrees_at_the_end_of_the_prompt(works, sampled, rows):
    ids, mask = IDS[:rows], MASK[:rows]
    for spec, drafts in ((agreeing(), True), (SelfSpecModel(tiny_llama("seldom")), False)):
        works.clear()
        spec.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=sampled, top_k=0)
        assert any(work.drafts for work in works) == drafts
    works.clear()
    few = ids[:1, -3:]
    agreeing().generate(few, max_new_tokens=9, do_sample=sampled)
    assert not any(work.drafts for work in works), "three tokens show nothing"


def test_an_exit_that_is_wrong_after_the_prompt_stops_to_draft(works, monkeypatch):
    spec = SelfSpecModel(tiny_llama("seldom"))
    learn = RoundModel.learn_copies
    monkeypatch.setattr(RoundModel, "learn_copies", learn)
    monkeypatch.setattr(
        Auto,
        "_try_exit",
        lambda auto, *_: [auto.model.drafts[True].learn(0, 1.0) for _ in range(32)],
    )
    spec.generate(IDS[:1], max_new_tokens=60, do_sample=True, top_k=0)
    assert works[0].drafts and not any(work.drafts for work in works[-20:])


@pytest.mark.parametrize("chunk", [None, 7])
def test_the_prompt_is_judged_the_same_in_one_block_and_in_several(chunk, monkeypatch):
    """In several blocks only the last tokens of the last one count."""
    seen, spec = [], agreeing()
    monkeypatch.setattr(
        "selfspec.schedule.round_model.DraftRates.learn", lambda *args: seen.append(args[1:])
    )
    options = {} if chunk is None else {"prefill_chunk_size": chunk}
    spec.generate(IDS, attention_mask=MASK, max_new_tokens=1, **options)
    assert {place for place, _ in seen} == {0} and all(chance == 1.0 for _, chance in seen)
    assert len(seen) == 3 * (32 // 3) or chunk is not None


def test_a_copy_is_made_where_matches_were_right(works):
    spec = SelfSpecModel(tiny_llama("seldom"))
    spec.generate(REPEATING, max_new_tokens=2, do_sample=True)
    works.clear()
    model = spec.engine.round_model(head=spec.engine.head(UNFITTED), times="assumed")
    assert model.best_lookup(False, [2], 40).rate < model.plain(1).rate, "two tokens say little"
    assert model.best_lookup(False, [16], 40).rate > model.plain(1).rate
    for _ in range(30):
        model.learn_copies(False, [(16, 1, 0)])
    assert model.best_lookup(False, [16], 40).rate < model.plain(1).rate


def test_assumed_times_learn_nothing_and_are_made_for_one_call():
    spec = SelfSpecModel(tiny_llama())
    head = spec.engine.head(DraftConfig())
    model = spec.engine.round_model(head=head, times="assumed")
    assert spec.engine.round_model(head=head, times="assumed") is not model
    times = model.times(2)
    before = [times.seconds(work) for work in (Work(), Work(2), Work(copies=3))]
    times.learn(Work(copies=3), 100.0)
    times.learn_draft(100.0)
    assert before == [times.seconds(work) for work in (Work(), Work(2), Work(copies=3))]
    assert before[0] == 1.0 and times.deviation(Work(2)) == 0.0
    assert model.clock() == model.clock() == 0.0
    assert model.times(8).seconds(Work(copies=1)) > times.seconds(Work(copies=1))


@pytest.mark.parametrize("draft", [{"times": "assumed"}, {"drafter": "tree", "times": "assumed"}])
def test_a_drafter_that_weighs_nothing_takes_no_times(draft):
    with pytest.raises(ValueError, match="which weigh costs"):
        SelfSpecModel(tiny_llama()).generate(IDS[:1], draft=draft)
