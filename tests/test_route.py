"""A route makes the same calls as the model's own code, or there is none."""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import pytest
import torch
from conftest import gates, prompt, tiny_llama
from families import FAMILIES, LAYERS
from test_families import CASES_BY_FAMILY, model_of
from torch import Tensor
from transformers import LlamaModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from selfspec import SelfSpecModel
from selfspec.decoder import Decoder, Span
from selfspec.decoder.families import path_to
from selfspec.decoder.route import Snapshot

ALL = Span(0, LAYERS)
TOKENS = torch.randint(2, 60, (2, 24), generator=torch.Generator().manual_seed(7))

# Bodies that do more than hand things on: they add learned positions, make a position bias, scale
# what they looked up, or scale logits behind the LM head.
WITHOUT = {"bloom", "falcon_alibi", "gpt2", "gpt_neo", "gpt_bigcode", "mpt", "opt", "xglm"}
WITHOUT |= {"biogpt", "granite", "granitemoe"}


def several_passes(decoder: Decoder, routed: bool) -> list[Tensor]:
    """What passes of all kinds leave behind a prefill, each kind twice."""
    slots = decoder.new_slots(2)
    left: list[Tensor] = []
    with torch.no_grad(), decoder:
        decoder.gates.bare = decoder.gates.bare and routed
        decoder.run(TOKENS[:, :20], ALL, slots)
        slots.commit([20, 20])
        for width in (1, 3) * 2:
            tokens = TOKENS[:, 20 : 20 + width]
            below = decoder.run(tokens, Span(0, 2), slots)
            read = decoder.run(tokens, Span(0, 2), slots, unembed=True)
            above = decoder.run(tokens, Span(2, LAYERS), slots, below.hidden, unembed=True)
            whole = decoder.run(tokens, ALL, slots, keep=(0, 1, LAYERS))
            left += [below.hidden, read.output, above.output, whole.output, *whole.kept]
        found = [route is not None for route in decoder._runner.routes.values()]
    assert bool(found) == routed or not decoder.gates.bare
    return left


@pytest.mark.parametrize("family", FAMILIES)
def test_a_route_is_the_models_own_code_to_the_bit(family: str) -> None:
    decoder = Decoder(model_of(family, CASES_BY_FAMILY[family]))
    routed, plain = several_passes(decoder, True), several_passes(decoder, False)
    assert all(map(torch.equal, routed, plain))
    assert not gates(decoder.causal_lm)


@pytest.mark.parametrize("family", sorted({*FAMILIES} - WITHOUT))
def test_most_families_have_a_route(family: str) -> None:
    decoder = Decoder(model_of(family, CASES_BY_FAMILY[family]))
    assert any(routes_of(decoder))


@pytest.mark.parametrize("family", sorted(WITHOUT))
def test_a_body_that_does_more_has_none_from_its_tokens(family: str) -> None:
    decoder = Decoder(model_of(family, CASES_BY_FAMILY[family]))
    assert not all(routes_of(decoder))


def routes_of(decoder: Decoder) -> list[bool]:
    """Whether there is a route, for each kind of pass."""
    slots = decoder.new_slots(1)
    with torch.no_grad(), decoder:
        decoder.run(TOKENS[:1, :20], ALL, slots)
        slots.commit([20])
        for width in (1, 3):
            for unembed in (False, True):
                decoder.run(TOKENS[:1, 20 : 20 + width], ALL, slots, unembed=unembed)
        return [route is not None for route in decoder._runner.routes.values()]


class Meddling(LlamaModel):
    """A body that does more than hand things on."""

    meddle = ""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        hidden = self.embed_tokens(input_ids)
        if self.meddle == "first":
            hidden = hidden * 2
        turned = self.rotary_emb(hidden, position_ids=position_ids)
        for index, layer in enumerate(self.layers):
            hidden = layer(
                hidden,
                attention_mask=attention_mask,
                position_embeddings=tuple(turned) if self.meddle != "copies" else [*turned],
                past_key_values=past_key_values,
            )
            if self.meddle == "between" and index == 1:
                hidden = hidden + 1
            if self.meddle == "in place" and index == 1:
                hidden.mul_(2)
        hidden = self.norm(hidden)
        if self.meddle == "last":
            hidden.neg_()
        return BaseModelOutputWithPast(last_hidden_state=hidden)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("meddle", ["", "first", "copies", "between", "in place", "last"])
def test_what_a_body_does_by_itself_leaves_no_route(meddle: str, inference: bool) -> None:
    model = tiny_llama(num_hidden_layers=LAYERS)
    model.model.__class__ = Meddling
    model.model.meddle = meddle  # pyright: ignore[reportAttributeAccessIssue]
    decoder = Decoder(model)
    with torch.inference_mode(inference):
        assert any(routes_of(decoder)) == (meddle == "")
    routed, plain = several_passes(decoder, True), several_passes(decoder, False)
    assert all(map(torch.equal, routed, plain))


def test_hooks_on_the_body_are_called_in_every_pass() -> None:
    model, calls = tiny_llama(), []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    spec = SelfSpecModel(model)
    ids, mask = prompt(6)
    spec.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False, draft="none")
    assert len(calls) >= 9  # prefill reads its logits in a call of its own
    assert not spec.engine.decoder._runner.routes


def of_a_call(spec: SelfSpecModel) -> dict[Any, Any]:
    """The routes that hold when a call of `generate` begins, whose text is the model's own."""
    with spec.engine.decoder:
        before = dict(spec.engine.decoder._runner.routes)
    ids, mask = prompt(6)
    options = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False}
    own = spec.causal_lm.generate(ids, **options)
    assert torch.equal(spec.generate(ids, **options), own)
    return before


def test_a_route_lasts_as_long_as_the_model_is_what_it_was() -> None:
    spec = SelfSpecModel(tiny_llama(dtype=torch.float32))
    assert not of_a_call(spec)
    routes = of_a_call(spec)
    assert any(routes.values()) and of_a_call(spec) == routes
    spec.causal_lm.double()  # routes hold modules, not weights
    assert of_a_call(spec) == routes


def meddling(model: Any, monkeypatch: Any) -> None:
    model.model.__class__, model.model.meddle = Meddling, "first"


def renamed(model: Any, monkeypatch: Any) -> None:
    """A name that the body's forward looks up means something else."""
    known = inspect.unwrap(LlamaModel.forward).__globals__
    mask = known["create_causal_mask"]
    monkeypatch.setitem(known, "create_causal_mask", lambda *args, **kwargs: mask(*args, **kwargs))


def rewritten(model: Any, monkeypatch: Any) -> None:
    """The body's forward has other code, in place, as reloading a module in a notebook gives it."""
    forward = inspect.unwrap(LlamaModel.forward)
    monkeypatch.setattr(forward, "__code__", forward.__code__.replace(co_firstlineno=1))


CHANGES: dict[str, Any] = {
    "code": rewritten,
    "mode": lambda model, _: model.train(),
    "method": lambda model, _: setattr(model.model, "post", lambda hidden: hidden),
    "parameter": lambda model, _: setattr(model.model, "shift", torch.nn.Parameter(torch.zeros(1))),
    "embedding": lambda model, _: model.set_input_embeddings(deepcopy(model.model.embed_tokens)),
    "attention": lambda model, _: model.set_attn_implementation("eager"),
    "config": lambda model, _: setattr(model.config, "pretraining_tp", 2),
    "inside config": lambda model, _: model.config.rope_parameters.update(note=1),
    "attribute": lambda model, _: setattr(model.model, "scale", 2.0),
    "child": lambda model, _: setattr(model.model, "rotary_emb", deepcopy(model.model.rotary_emb)),
    "class": meddling,
    "global": renamed,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_has_changed_is_surveyed_anew(change: str, monkeypatch: Any) -> None:
    spec = SelfSpecModel(tiny_llama(dtype=torch.float32))
    of_a_call(spec)
    assert of_a_call(spec)
    CHANGES[change](spec.causal_lm, monkeypatch)
    assert not of_a_call(spec)


@pytest.mark.parametrize("family", ["gemma3_text", "mistral", "mixtral", "gpt_neox", "gpt2"])
def test_routes_of_families_last_and_their_absence_does_not(family: str) -> None:
    decoder = Decoder(model_of(family, CASES_BY_FAMILY[family]))
    routes_of(decoder)
    found = {key: route for key, route in decoder._runner.routes.items() if route is not None}
    with decoder:
        assert decoder._runner.routes == found
    assert len(found) < 4 if family == "gpt2" else found


def test_gates_are_taken_out_where_a_look_at_the_model_fails(monkeypatch: Any) -> None:
    decoder = Decoder(tiny_llama(num_hidden_layers=LAYERS))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="boom"):
        patch.setattr(decoder._runner, "begin", raising)
        with decoder:
            pass
    assert not gates(decoder.causal_lm) and decoder.gates.entered == 0
    with ThreadPoolExecutor(1) as pool:  # a thread that would wait for another's lock
        assert pool.submit(routes_of, decoder).result(timeout=60)


def raising() -> None:
    raise RuntimeError("boom")


def test_a_snapshot_bears_anything() -> None:
    module: Any = torch.nn.Linear(1, 1)
    module.config, module.itself, module.nan = {"a": [1, {"b": 2}]}, [], float("nan")
    module.itself.append(module.itself)
    module.tensors = [torch.zeros(2)]
    before = Snapshot([module])
    assert before == Snapshot([module]) and before != Snapshot([module], [module])
    module.config["a"][1]["b"] = 3
    assert before != Snapshot([module])


def test_the_path_to_the_body_names_what_lies_between() -> None:
    inner, model = tiny_llama(), torch.nn.Module()
    model.language, model.other = torch.nn.ModuleDict({"model": inner}), torch.nn.Linear(1, 1)
    assert path_to(inner.model, model) == [model, model.language, inner, inner.model]
    assert path_to(model, model) == [model]


@pytest.mark.parametrize("part", ["embed_tokens", "norm", "layers.2", "layers.2.mlp"])
def test_hooks_that_come_between_calls_are_called(part: str) -> None:
    spec = SelfSpecModel(tiny_llama(dtype=torch.float32))
    of_a_call(spec)
    calls: list[int] = []
    module = spec.causal_lm.model.get_submodule(part)
    hook = module.register_forward_hook(lambda *_: calls.append(1))
    ids, mask = prompt(6)
    spec.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False, draft="none")
    assert len(calls) >= 9  # in every pass, though there was a route
    hook.remove()
    calls.clear()
    of_a_call(spec)
    assert not calls


@pytest.mark.parametrize("part", ["embed_tokens", "norm", "layers.2.mlp"])
def test_a_forward_that_is_replaced_between_calls_is_called(part: str) -> None:
    spec = SelfSpecModel(tiny_llama(dtype=torch.float32))
    of_a_call(spec)
    module = spec.causal_lm.model.get_submodule(part)
    own = module.forward
    ids, mask = prompt(6)
    options = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False}
    before = spec.generate(ids, **options)
    module.forward = lambda *args: own(*args).flip(-1)
    of_a_call(spec)
    assert not torch.equal(spec.generate(ids, **options), before)


def test_a_survey_leaves_no_hooks() -> None:
    model = tiny_llama(num_hidden_layers=LAYERS)
    routes_of(Decoder(model))
    hooks = [m._forward_hooks or m._forward_pre_hooks for m in model.modules()]
    assert not any(hooks) and not gates(model)
