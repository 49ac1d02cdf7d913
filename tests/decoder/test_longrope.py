"""Rotary embeddings that choose their frequencies by the length: the text is plain decoding's."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import pytest
import torch
from conftest import TINY, prompt, quieten, tiny_llama
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
)

from selfspec import SelfSpecModel
from selfspec.decoder import CACHE

SWITCH = 16
# Before transformers 5.20 Phi-3's own `generate` with a cache forgets the text at the switch.
FORGETS = (
    "next_sequence_length"
    not in inspect.unwrap(Phi3ForCausalLM.prepare_inputs_for_generation).__code__.co_consts
)
remembers = pytest.mark.skipif(
    FORGETS, reason="before transformers 5.20 Phi-3's own generate forgets the text at the switch"
)
VOCAB = 64
_SHAPE: dict[str, Any] = {
    **TINY,
    "num_hidden_layers": 3,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 3.0, 2.0, 6.0],
    "original_max_position_embeddings": SWITCH,
}
_MSCALES = {"short_mscale": 1.0, "long_mscale": 1.3}
_DYNAMIC = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 100.0}
CONFIGS: dict[str, Any] = {
    "longrope": (LlamaConfig, {"rope_parameters": _LONG}),
    "dynamic": (LlamaConfig, {"rope_parameters": _DYNAMIC, "max_position_embeddings": SWITCH}),
    # These prefill again at the switch.
    "phi3": (
        Phi3Config,
        {"rope_parameters": _LONG, "original_max_position_embeddings": SWITCH},
    ),
    "phimoe": (
        PhimoeConfig,
        {"rope_parameters": {**_LONG, **_MSCALES}, "num_local_experts": 4},
    ),
}
KINDS = ("longrope", "dynamic", "phi3")
OF_OWN_CACHE = ("longrope", "dynamic", pytest.param("phi3", marks=remembers))
DRAFTS: dict[str, Any] = {
    "none": "none",
    "early_exit": {"exit_layer": 2, "num_draft_tokens": 5},
    "tree": {"drafter": "tree", "exit_layer": 2},
    "skip_sublayers": {"drafter": "skip_sublayers"},
    "cascade": {"drafter": "cascade", "exit_layer": 2},
    "lookahead": "lookahead",
    "prompt_lookup": "prompt_lookup",
    "default": None,
}
# Far before the switch, just before it, at it, and beyond it; rows of a batch get there apart.
LENGTHS = [(SWITCH,), (SWITCH - 3, 9, 5)]
BEYOND = [(SWITCH + 1, 6, SWITCH - 3)]


@cache
def model_of(kind: str) -> Any:
    config_class, own = CONFIGS[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**{**_SHAPE, **own})).eval()
    # PhiMoE's experts have no double precision.
    return model if kind == "phimoe" else quieten(model.double(), 0.15)


def fresh(kind: str) -> Any:
    """The model, which forgets the longest pass of earlier tests (dynamic NTK)."""
    model = model_of(kind)
    model(torch.ones(1, 1, dtype=torch.long))
    return model


def cases(kind: str) -> list[tuple[int, ...]]:
    # Prompts beyond the positions of the model are refused, which for dynamic NTK is the switch.
    return LENGTHS + ([] if kind == "dynamic" else BEYOND)


def both(kind: str, draft: str, ids: Any, mask: Any, **options: Any) -> tuple[Any, Any]:
    """The text of the model's own `generate`, and ours."""
    model = fresh(kind)
    options = {"attention_mask": mask, "max_new_tokens": 22, "do_sample": False, **options}
    cached = not (FORGETS and kind in ("phi3", "phimoe"))
    own = model.generate(ids, use_cache=cached, **options)
    return own, SelfSpecModel(model).generate(ids, draft=DRAFTS[draft], **options)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "draft"),
    [
        # PhiMoE, whose experts take long, does outside its layers what Phi-3 does.
        (kind, draft)
        for kind in CONFIGS
        for draft in (DRAFTS if kind != "phimoe" else ["early_exit"])
    ],
)
def test_text_across_the_switch_is_the_models_own(kind: str, draft: str) -> None:
    for lengths in cases(kind):
        own, ours = both(kind, draft, *prompt(*lengths))
        assert torch.equal(ours, own), lengths


@pytest.mark.parametrize("kind", OF_OWN_CACHE)
def test_padding_in_front_of_all_rows_changes_nothing(kind: str) -> None:
    for lengths in cases(kind):
        ids, mask = (torch.nn.functional.pad(part, (3, 0)) for part in prompt(*lengths))
        own, ours = both(kind, "early_exit", ids, mask)
        assert torch.equal(ours, own), lengths


@pytest.mark.matrix
@pytest.mark.parametrize("chunk", [5, SWITCH])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prefill_in_pieces_is_the_models_own(kind: str, chunk: int) -> None:
    for lengths in cases(kind):
        own, ours = both(kind, "early_exit", *prompt(*lengths), prefill_chunk_size=chunk)
        assert torch.equal(ours, own), lengths


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft", ["none", "early_exit"])
def test_rows_that_end_early_still_count(kind: str, draft: str) -> None:
    # In plain decoding a row that has ended goes on with padding, and its position counts.
    ids, mask = prompt(SWITCH - 6, 4, 9)
    first = model_of(kind).generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    ends = first[0, -1].item()
    own, ours = both(kind, draft, ids, mask, eos_token_id=ends)
    assert torch.equal(ours, own)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", OF_OWN_CACHE)
@pytest.mark.parametrize("start", [6, SWITCH - 2, SWITCH])
@pytest.mark.parametrize("known", [DynamicCache, None])
def test_a_cache_from_an_earlier_turn_may_end_before_the_switch(kind, start, known) -> None:
    if kind == "dynamic" and start == SWITCH:
        return  # the second prompt would be longer than the model's positions
    model, (ids, mask) = model_of(kind), prompt(start)
    spec = SelfSpecModel(model)
    more = {"do_sample": False, "return_dict_in_generate": True}
    draft = DRAFTS["early_exit"]
    end = SWITCH if kind == "dynamic" else SWITCH + 5
    for new in (1, max(1, end - start)):  # then the second turn begins before or after the switch
        turns = []
        for run in (model.generate, lambda *a, **k: spec.generate(*a, draft=draft, **k)):
            fresh(kind)
            cache = DynamicCache(config=model.config) if known or run == model.generate else None
            one = run(ids, attention_mask=mask, max_new_tokens=new, **more, **{CACHE: cache})
            text = torch.cat([one.sequences, torch.full((1, 1), 7)], dim=1)
            if kind == "dynamic" and text.shape[1] > SWITCH:
                text = text[:, :SWITCH]
            cache, ones = one.past_key_values, torch.ones_like(text)  # 0 is padding, too
            two = run(text, attention_mask=ones, max_new_tokens=20, **more, **{CACHE: cache})
            turns.append(two)
        assert torch.equal(turns[1].sequences, turns[0].sequences), new


@remembers
def test_the_cache_that_is_returned_was_computed_anew() -> None:
    model, (ids, _) = model_of("phi3"), prompt(SWITCH - 4)
    more = {"do_sample": False, "return_dict_in_generate": True, "max_new_tokens": 12}
    own = model.generate(ids, **more).past_key_values
    cache = DynamicCache(config=model.config)
    SelfSpecModel(model).generate(ids, past_key_values=cache, draft="prompt_lookup", **more)
    length = min(own.get_seq_length(), cache.get_seq_length())
    for ours, theirs in zip(cache.layers, own.layers, strict=True):
        torch.testing.assert_close(ours.keys[:, :, :length], theirs.keys[:, :, :length])


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft", ["early_exit", "tree"])
def test_requests_of_a_batch_switch_each_for_itself(kind: str, draft: str) -> None:
    model = model_of(kind)
    spec = SelfSpecModel(model)
    prompts = [[int(t) for t in prompt(n)[0][0]] for n in (3, SWITCH - 1, SWITCH, 11)]
    options = {"max_new_tokens": 22, "do_sample": False}
    outputs = spec.generate_batch(prompts, batch_size=2, draft=DRAFTS[draft], **options)
    for one, output in zip(prompts, outputs.values(), strict=True):
        own = fresh(kind).generate(torch.tensor([one]), **options)[0, len(one) :]
        assert output.error is None and output.generated_tokens == own.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_the_models_embedding_is_left_as_it_was(kind: str) -> None:
    model, (ids, mask) = model_of(kind), prompt(8)
    rotary = model.model.rotary_emb
    model(ids)  # sets what it keeps
    before = {name: str(value) for name, value in vars(rotary).items()}
    SelfSpecModel(model).generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
    assert {name: str(value) for name, value in vars(rotary).items()} == before


def test_a_draft_model_may_switch_too() -> None:
    small = model_of("phi3")
    ids, mask = prompt(SWITCH - 5, 4)
    options = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False}
    target = tiny_llama("sometimes")
    ours = SelfSpecModel(target, draft_model=small).generate(ids, draft="two_model", **options)
    assert torch.equal(ours, target.generate(ids, **options))
