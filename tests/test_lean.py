"""What a pass leaves out of a family's forward changes nothing in what it computes."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, build
from test_families import CASES_BY_FAMILY
from transformers import LlamaConfig, LlamaForCausalLM

from selfspec import SelfSpecModel
from selfspec.decoder.lean import lean_forward
from selfspec.decoder.rotary import RotaryTables, is_static
from selfspec.slots import Pieces, Window

DYNAMIC = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "original_max_position_embeddings": 16,
    },
}


def dynamic_llama(kind):
    """A tiny Llama whose frequencies depend on how long the text is."""
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=16,
        rope_parameters=DYNAMIC[kind],
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).double().eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_views_of_rotary_tables_are_what_the_family_computes(family, dtype):
    base = SelfSpecModel(build(family, CASES_BY_FAMILY[family])).engine.decoder.base
    x, counted = torch.zeros(1, dtype=dtype), Pieces(torch.arange(1024)[None], 1)
    for module in filter(is_static, base.children()):
        tables = RotaryTables(module.forward)
        kinds = list(module.rope_type) if isinstance(module.rope_type, dict) else [None]
        for start, width, rows in [(0, 5, 1), (3, 1, 3), (300, 1, 1), (299, 9, 2), (3, 2, 1)]:
            window = Window([start] * rows, width, counted)
            for kind in kinds:
                more = () if kind is None else (kind,)
                own = module.forward(x, window.positions, *more)
                for view, computed in zip(tables.view(x, window, *more), own, strict=True):
                    assert torch.equal(view, computed)


@pytest.mark.parametrize("kind", DYNAMIC)
def test_frequencies_that_follow_the_length_have_no_tables(kind):
    model = dynamic_llama(kind)
    assert not is_static(model.model.rotary_emb)
    tokens = torch.tensor([[5, 17, 3, 44, 29, 8, 51, 2, 33, 12]])
    own = dynamic_llama(kind).generate(tokens, max_new_tokens=5, do_sample=False)
    draft = {"exit_layer": 2, "num_draft_tokens": 1}
    ours = SelfSpecModel(model).generate(tokens, max_new_tokens=5, do_sample=False, draft=draft)
    assert torch.equal(ours, own)


def test_a_model_that_is_cast_between_calls_gets_new_tables():
    tokens, text = torch.tensor([[5, 17, 3, 44]]), {"max_new_tokens": 8, "do_sample": False}
    model = build("llama", "sdpa")
    spec = SelfSpecModel(model)
    for cast in (torch.float32, torch.float64):
        model.to(cast)
        own = model.generate(tokens, **text)
        assert torch.equal(spec.generate(tokens, draft={"exit_layer": 2}, **text), own)


def test_a_lean_forward_leaves_the_models_module_as_it_was():
    model = build("llama", "sdpa")
    before = dict(type(model).forward.__globals__)
    tokens = torch.tensor([[5, 17, 3, 44]])
    lean = lean_forward(type(model).forward)(model, input_ids=tokens)
    whole = model(input_ids=tokens)
    assert torch.equal(lean.logits, whole.logits)
    assert type(lean) is not type(whole)
    assert torch.equal(lean[0], whole[0])
    assert torch.equal(lean["logits"], whole["logits"])
    assert type(model).forward.__globals__ == before
