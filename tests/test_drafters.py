"""The law of every drafter: greedy text is the model's own, on any family, under any schedule."""

from functools import cache

import pytest
import torch
from conftest import greedy, prompt, tiny_llama
from test_families import ALL_ROWS, CASES_BY_FAMILY, LONG_ROW, model_of, own_text, prompts
from transformers import AutoModelForCausalLM, AutoTokenizer

from selfspec import DEMO_MODEL, DraftConfig, SelfSpecModel
from selfspec.drafters import DRAFTERS

FAMILIES = ("llama", "gpt2", "qwen3", "gemma3_text", "mistral", "mixtral", "bloom", "gpt_neox")
TREES = {name for name, drafter in DRAFTERS.items() if drafter.makes_trees}
CHAINS = ("cascade", "early_exit", "layer_skip", "two_model")
SCHEDULES = ("fixed", "confidence", "optimal")
SKIP = {"attention": [2], "mlp": [1, 3]}


def draft(drafter, **more):
    return DraftConfig.of({"drafter": drafter, "skip": SKIP, **more})


def test_every_way_to_draft_is_here():
    assert set(DRAFTERS) >= {*CHAINS, "auto", "lookahead", "none", "prompt_lookup", "tree"}


@cache
def family(name):
    model = model_of(name, CASES_BY_FAMILY[name])
    return model, own_text(model, *prompts("left"))


@pytest.mark.parametrize("rows", [LONG_ROW, ALL_ROWS], ids=["one row", "ragged"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
def test_on_any_family(drafter, name, rows):
    model, expected = family(name)
    spec = SelfSpecModel(model, draft_model=model if drafter == "two_model" else None)
    if name == "bloom" and drafter in TREES - {"auto"}:
        with pytest.raises(ValueError, match="index of a key"):
            spec.engine.decoder.check_trees()
        return
    tokens, mask = prompts("left")
    count = expected.shape[1]
    out = spec.generate(
        tokens[rows],
        attention_mask=mask[rows],
        max_new_tokens=count,
        do_sample=False,
        draft=draft(drafter, schedule="optimal" if drafter in CHAINS else "fixed"),
    )
    assert torch.equal(out[:, -count:], expected[rows])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("drafter", CHAINS)
@pytest.mark.parametrize("agreement", ["seldom", "sometimes"])
def test_under_any_schedule(drafter, schedule, agreement):
    model = tiny_llama(agreement)
    ids, mask = prompt(4, 9, 6)
    spec = SelfSpecModel(model, draft_model=tiny_llama(agreement, seed=1))
    out = spec.generate(
        ids, attention_mask=mask, max_new_tokens=24, draft=draft(drafter, schedule=schedule)
    )
    assert torch.equal(out, greedy(model, ids, mask, max_new_tokens=24))


@pytest.mark.parametrize("drafter", sorted(set(DRAFTERS) - {*CHAINS, "none"}))
@pytest.mark.parametrize("schedule", ["confidence", "optimal"])
def test_a_schedule_that_is_not_asked_is_refused(drafter, schedule):
    spec = SelfSpecModel(tiny_llama())
    with pytest.raises(ValueError, match=f"'{drafter}' does not use it; leave it out, or"):
        spec.generate(prompt(4)[0], draft=draft(drafter, schedule=schedule))


@pytest.mark.parametrize("drafter", sorted(set(DRAFTERS) - {"two_model", "none"}))
def test_a_draft_model_that_would_not_draft_is_refused(drafter):
    spec = SelfSpecModel(tiny_llama())
    with pytest.raises(ValueError, match=f"'small' is for .*, got drafter='{drafter}'"):
        spec.generate(prompt(4)[0], draft=draft(drafter, draft_model="small"))


@pytest.fixture(scope="module")
def demo():
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    ids = tokenizer("The old man looked out of the window, and", return_tensors="pt").input_ids
    return model, ids, greedy(model, ids, max_new_tokens=32, pad_token_id=0)


@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
def test_on_the_demo_target(drafter, demo):
    model, ids, expected = demo
    spec = SelfSpecModel(model, DEMO_MODEL, draft_model=model if drafter == "two_model" else None)
    options = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(spec.generate(ids, draft=draft(drafter), **options), expected)
