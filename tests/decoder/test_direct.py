"""What a pass leaves out of a family's forward changes nothing in what it computes."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import equal_to_generate, greedy, prompt, tiny_llama
from families import CASES_BY_FAMILY, FAMILIES, FLOAT32, build
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from selfspec import SelfSpecModel
from selfspec.decoder import Decoder, Span
from selfspec.decoder.cache import SlicedViews, Window
from selfspec.decoder.direct import Direct, direct, grouped_attention, lean_forward, shortcuts
from selfspec.decoder.rotary import RotaryTables, is_static

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
    return tiny_llama(max_position_embeddings=16, rope_parameters=DYNAMIC[kind])


@pytest.mark.parametrize("kernels", ["eager", "direct"])
def test_eager_calls_modules_as_transformers_does_and_direct_does_not(monkeypatch, kernels):
    called, call = set(), torch.nn.Module.__call__

    def counted(module, *args, **kwargs):
        called.add(module)
        return call(module, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "__call__", counted)
    spec = SelfSpecModel(tiny_llama(), kernels=kernels)
    called.clear()
    spec.generate(prompt(5)[0], max_new_tokens=4, draft="none")
    inside = {module for layer in spec.decoder.layers for module in layer.children()}
    assert inside and called & inside == (inside if kernels == "eager" else set())


@pytest.mark.matrix(share=4)
@pytest.mark.parametrize("drafter", ["none", "early_exit"])
@pytest.mark.parametrize("family", FAMILIES)
def test_eager_writes_the_models_own_text(family, drafter):
    model = build(family, CASES_BY_FAMILY[family])
    model = model.float() if family in FLOAT32 else model.double()
    spec = SelfSpecModel(model, kernels="eager")
    equal_to_generate(spec, prompt(7, vocab=61)[0], max_new_tokens=12, draft=drafter)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_views_of_rotary_tables_are_what_the_family_computes(family, dtype):
    base = SelfSpecModel(build(family, CASES_BY_FAMILY[family])).decoder.base
    x, counted = torch.zeros(1, dtype=dtype), SlicedViews(torch.arange(1024)[None], dim=1)
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
    own = greedy(dynamic_llama(kind), tokens, max_new_tokens=5)
    draft = {"exit_layer": 2, "num_draft_tokens": 1}
    ours = SelfSpecModel(model).generate(tokens, max_new_tokens=5, do_sample=False, draft=draft)
    assert torch.equal(ours, own)


@pytest.mark.parametrize("dim", [0, 1])
def test_pieces_are_views_of_their_places(dim):
    whole = torch.arange(300).view(150, 2) if dim == 0 else torch.arange(300).view(2, 150)
    pieces = SlicedViews(whole, whole + 1, dim=dim)
    for start, width in [(0, 1), (63, 1), (64, 1), (149, 1), (3, 1), (0, 150), (62, 5), (148, 2)]:
        view, next_view = pieces.view(start, width)
        assert torch.equal(view, whole.narrow(dim, start, width))
        assert torch.equal(next_view, view + 1)
        assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


# Modules called by their forward


def test_children_are_called_directly_while_gates_are_in_and_at_no_other_time():
    decoder = Decoder(build("llama", "sdpa"))
    attention = decoder.layers[1].self_attn
    before = [dict(vars(module)) for module in decoder.causal_lm.modules()]
    q_proj = attention.q_proj
    with decoder:
        assert type(attention.q_proj) is Direct
        states = torch.randn(1, 2, q_proj.in_features, dtype=decoder.dtype)
        assert torch.equal(attention.q_proj(states), q_proj(states))
        assert dict(attention.named_children())["q_proj"] is q_proj
    assert [dict(vars(module)) for module in decoder.causal_lm.modules()] == before


def test_what_is_called_directly_is_the_module_in_everything_else():
    module = torch.nn.Linear(3, 4)
    stand_in: Any = direct(module)
    assert isinstance(stand_in, torch.nn.Linear)
    assert stand_in.weight is module.weight
    stand_in.note = 7
    assert vars(module)["note"] == 7
    with pytest.raises(AttributeError, match="nowhere"):
        _ = stand_in.nowhere
    copied = copy.deepcopy(stand_in)
    assert type(copied) is torch.nn.Linear and torch.equal(copied.weight, module.weight)


def hooked(module, kind):
    """Register what notes calls of a module (or of all, if it is `None`)."""
    seen = []
    owner = torch.nn.modules.module if module is None else module
    register = getattr(owner, kind)
    handle = register(lambda called, *_: seen.append(called))
    return seen, handle


@pytest.mark.parametrize(
    ("whose", "kind"),
    [
        ("child", "register_forward_hook"),
        ("child", "register_forward_pre_hook"),
        ("layer", "register_forward_hook"),
        ("all", "register_module_forward_hook"),
    ],
)
def test_hooks_are_called(whose, kind):
    tokens = torch.tensor([[5, 17, 3, 44]])
    spec = SelfSpecModel(build("llama", "sdpa"))
    options = {"max_new_tokens": 6, "do_sample": False, "draft": {"exit_layer": 2}}
    text = spec.generate(tokens, **options)
    layer = spec.decoder.layers[0]
    module = layer if whose == "layer" else layer.self_attn.q_proj
    seen, handle = hooked(None if whose == "all" else module, kind)
    assert torch.equal(spec.generate(tokens, **options), text)
    handle.remove()
    passes = sum(called is module for called in seen)
    assert passes >= 1 + spec.last_stats.rounds
    spec.generate(tokens, **options)
    assert sum(called is module for called in seen) == passes


@pytest.mark.parametrize("whose", ["child", "layer"])
def test_hooks_that_come_while_gates_are_in_are_called(whose):
    decoder = Decoder(build("llama", "sdpa"))
    slots, everything = decoder.new_slots(1), Span(0, decoder.depth)
    layer = decoder.layers[0]
    with decoder:
        for token in (5, 17):
            decoder.run(torch.tensor([[token]]), everything, slots, unembed=True)
            slots.commit([1])
        module = layer if whose == "layer" else layer.self_attn.q_proj._module
        seen, handle = hooked(module, "register_forward_hook")
        for _ in range(2):
            decoder.run(torch.tensor([[3]]), everything, slots, unembed=True)
        handle.remove()
        assert len(seen) == 2
        seen, handle = hooked(module, "register_forward_hook")
        decoder.causal_lm(torch.tensor([[3]]))  # as a streamer might
        handle.remove()
        assert len(seen) == 1


def test_hooks_on_gradients_are_called():
    module = torch.nn.Linear(3, 3)
    assert type(direct(module)) is Direct
    module.register_full_backward_hook(lambda *_: None)
    assert direct(module) is module


def test_a_module_with_a_call_of_its_own_and_one_that_is_compiled_are_called_whole():
    class Doubled(torch.nn.Linear):
        def __call__(self, *args):
            return 2 * super().__call__(*args)

    doubled, compiled = Doubled(3, 3), torch.nn.Sequential(torch.nn.Linear(3, 3))
    compiled.compile(backend="eager")
    parent = torch.nn.Module()
    parent.doubled, parent.compiled = doubled, compiled
    parent.several = torch.nn.Sequential(torch.nn.Linear(3, 3))
    parent.plain = torch.nn.Linear(3, 3)
    assert {name for _, name, _ in shortcuts([parent])} == {"plain", "0"}
    assert all(part is not compiled for part, _, _ in shortcuts([parent]))
    assert direct(doubled) is doubled


def test_a_child_that_is_replaced_while_gates_are_in_stays():
    decoder = Decoder(build("llama", "sdpa"))
    mlp = decoder.layers[0].mlp
    other = copy.deepcopy(mlp.up_proj)
    with decoder:
        mlp.up_proj = other
    assert mlp.up_proj is other
    with ThreadPoolExecutor(1) as pool:  # the lock is free
        assert pool.submit(lambda: decoder.__enter__() and decoder.__exit__() is None).result(5)


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.LayerNorm, torch.nn.Identity])
def test_a_module_called_directly_is_what_it_is_called_whole(kind):
    module = {torch.nn.Embedding: lambda: kind(9, 4, padding_idx=2)}.get(kind, lambda: kind(4))()
    given = torch.tensor([[2, 8]]) if kind is torch.nn.Embedding else torch.randn(2, 4)
    assert torch.equal(direct(module)(given), module(given))
    assert direct(module) is not module
    module.register_forward_hook(lambda *_: None)
    assert direct(module) is module


def test_a_model_that_is_cast_between_calls_gets_new_tables():
    tokens = torch.tensor([[5, 17, 3, 44]])
    model = build("llama", "sdpa")
    spec = SelfSpecModel(model)
    for cast in (torch.float32, torch.float64):
        model.to(cast)
        equal_to_generate(spec, tokens, max_new_tokens=8, draft={"exit_layer": 2})


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


def writes_its_own(spec: SelfSpecModel) -> None:
    equal_to_generate(spec, *prompt(6), max_new_tokens=9)


@pytest.mark.parametrize("part", ["embed_tokens", "norm", "layers.2", "layers.2.mlp"])
def test_hooks_that_come_between_calls_are_called(part: str) -> None:
    spec = SelfSpecModel(tiny_llama(dtype=torch.float32))
    writes_its_own(spec)
    calls: list[int] = []
    module = spec.causal_lm.model.get_submodule(part)
    hook = module.register_forward_hook(lambda *_: calls.append(1))
    ids, mask = prompt(6)
    spec.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False, draft="none")
    assert len(calls) >= 9  # in every pass
    hook.remove()
    calls.clear()
    writes_its_own(spec)
    assert not calls


@pytest.mark.parametrize("part", ["embed_tokens", "norm", "layers.2.mlp"])
def test_a_forward_that_is_replaced_between_calls_is_called(part: str) -> None:
    spec = SelfSpecModel(tiny_llama(dtype=torch.float32))
    writes_its_own(spec)
    module = spec.causal_lm.model.get_submodule(part)
    own = module.forward
    ids, mask = prompt(6)
    options = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False}
    before = spec.generate(ids, **options)
    module.forward = lambda *args: own(*args).flip(-1)
    writes_its_own(spec)
    assert not torch.equal(spec.generate(ids, **options), before)


# Heads that share keys: what transformers' own attention makes, which copies them for each head.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("heads", [(4, 2, 8), (9, 3, 64), (32, 8, 64), (6, 1, 24)])
def test_keys_that_heads_share_are_read_in_place(heads, dtype):
    count, shared, size = heads
    module = torch.nn.Module()
    module.num_key_value_groups = count // shared
    torch.manual_seed(0)
    for rows, width, keys in [(1, 1, 9), (1, 2, 40), (3, 5, 17), (1, 8, 700), (2, 33, 130)]:
        query = torch.randn(rows, width, count, size).to(dtype).transpose(1, 2)
        key, value = torch.randn(2, rows, shared, keys + 30, size).to(dtype)[..., :keys, :]
        hidden = torch.arange(keys) > torch.arange(keys - width, keys)[:, None]
        mask = torch.zeros(rows, 1, width, keys, dtype=dtype)
        mask.masked_fill_(hidden, torch.finfo(dtype).min)
        given = (module, query, key, value, mask)
        with torch.no_grad():
            expected, _ = sdpa_attention_forward(*given, dropout=0.0, scaling=0.3)
            made, _ = grouped_attention(*given, dropout=0.0, scaling=0.3)
        if dtype != torch.bfloat16:
            assert torch.equal(made, expected)
        else:  # heads are joined, and bits are those of float32 in another order
            wide = (module, query.double(), key.double(), value.double(), mask.double())
            exact, _ = sdpa_attention_forward(*wide, dropout=0.0, scaling=0.3)
            errors = [(found.double() - exact).abs().amax() for found in (made, expected)]
            assert errors[0] <= max(2 * errors[1], 2e-3)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "mixtral", "phi3", "glm4"])
def test_passes_over_several_tokens_copy_no_keys(family, monkeypatch):
    model, calls = build(family, "sdpa"), []
    ids, mask = prompt(9, 5, vocab=61)
    attend = torch.nn.functional.scaled_dot_product_attention

    def counted(query, key, value, **options):
        if query.shape[2] > 1:
            calls.append(key.shape[1] == 2)
        return attend(query, key, value, **options)

    def logits():
        options = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False}
        draft = {"exit_layer": 2, "num_draft_tokens": 3}
        spec = SelfSpecModel(model)
        out = spec.generate(ids, attention_mask=mask, max_new_tokens=9, draft=draft, **options)
        return torch.stack(out.logits)

    SelfSpecModel(model)  # the check at wrapping, kept from then on, also decodes plainly
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    made = logits()
    assert calls and all(calls)
    calls.clear()
    monkeypatch.setattr("selfspec.decoder.direct.grouped_attention", sdpa_attention_forward)
    assert torch.equal(made, logits()) and not all(calls)
