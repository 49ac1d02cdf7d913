"""Wrapping refuses what passes would compute differently, touches nothing, and asks once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from conftest import tiny_llama
from families import CASES_BY_FAMILY, FAMILIES, HYBRIDS, build
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel

from selfspec import SelfSpecModel
from selfspec.decoder import CACHE, wrapping_check
from selfspec.decoder.wrapping_check import check_passes, difference, small_model

_SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
}
# Positions counted by the cache, bodies without token ids, models without a KV cache.
COUNTERS = ("Bart", "MBart", "PLBart", "Mvp", "Pegasus", "Marian", "Blenderbot", "BlenderbotSmall")
ENCODERS = {
    "Bert": "BertLMHeadModel",
    "Roberta": "RobertaForCausalLM",
    "Electra": "ElectraForCausalLM",
    "Ernie": "ErnieForCausalLM",
    "RoFormer": "RoFormerForCausalLM",
    "Xmod": "XmodForCausalLM",
    "BertGeneration": "BertGenerationDecoder",
    "Camembert": "CamembertForCausalLM",
    "MegatronBert": "MegatronBertForCausalLM",
}
CACHELESS: dict[str, tuple[str, dict[str, Any]]] = {
    "OpenAIGPT": ("OpenAIGPTLMHeadModel", {"n_embd": 32, "n_layer": 3, "n_head": 4}),
    "XLM": ("XLMWithLMHeadModel", {"n_words": 61, "emb_dim": 32, "n_layers": 3, "n_heads": 4}),
    "XLNet": ("XLNetLMHeadModel", {"d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 48}),
    "ImageGPT": ("ImageGPTForCausalImageModeling", {"n_embd": 32, "n_layer": 3, "n_head": 4}),
    "Reformer": (
        "ReformerModelWithLMHead",
        {
            "attn_layers": ["local"] * 3,
            "axial_pos_embds_dim": (16, 16),
            "axial_pos_shape": (4, 4),
            "feed_forward_size": 48,
            "attention_head_size": 8,
        },
    ),
}
REFUSED = [
    *((name, f"{name}ForCausalLM", _SEQ2SEQ) for name in COUNTERS),
    *((name, kind, {}) for name, kind in ENCODERS.items()),
    *((name, kind, own) for name, (kind, own) in CACHELESS.items()),
]


@pytest.mark.parametrize(("name", "kind", "own"), REFUSED, ids=[kind for _, kind, _ in REFUSED])
def test_models_that_passes_cannot_run_are_refused_by_name(name: str, kind: str, own: Any) -> None:
    shape = (
        _SHAPE if own is not _SEQ2SEQ else {k: v for k, v in _SHAPE.items() if "hidden" not in k}
    )
    shape = {k: v for k, v in shape.items() if name not in ("XLM", "Reformer") or "layers" not in k}
    model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**shape, **own))
    with pytest.raises(ValueError, match=kind) as refusal:
        SelfSpecModel(model.eval())
    assert "\n" not in str(refusal.value)


@pytest.mark.matrix(share=4)
@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_every_tested_family_passes(family: str) -> None:
    with torch.no_grad():
        small = small_model(build(family, CASES_BY_FAMILY.get(family, "eager")))
        assert small is not None and difference(small) is None


class CountingBody(LlamaModel):
    """A body that counts positions from the length of its cache."""

    def forward(
        self, input_ids=None, position_ids=None, cache=None, past_key_values=None, **kwargs
    ):
        cache = past_key_values if cache is None else cache
        seen = cache.get_seq_length() if cache is not None else 0
        position_ids = torch.arange(seen, seen + input_ids.shape[1])[None]
        kwargs |= {"position_ids": position_ids, CACHE: cache}
        return super().forward(input_ids, **kwargs)


class LengthBody(LlamaModel):
    """A body that shifts all embeddings by the largest position of the pass."""

    def forward(
        self, input_ids=None, position_ids=None, cache=None, past_key_values=None, **kwargs
    ):
        cache = past_key_values if cache is None else cache
        embeds = self.embed_tokens(input_ids)
        if position_ids is not None:
            embeds = embeds + position_ids.max()
        kwargs |= {"position_ids": position_ids, CACHE: cache}
        return super().forward(**{**kwargs, "inputs_embeds": embeds})


class RememberingBody(LlamaModel):
    """A body that keeps something from pass to pass outside the cache."""

    past: Any = 0.0

    def forward(
        self, input_ids=None, position_ids=None, cache=None, past_key_values=None, **kwargs
    ):
        cache = past_key_values if cache is None else cache
        kwargs |= {"position_ids": position_ids, CACHE: cache}
        output = super().forward(input_ids, **kwargs)
        output.last_hidden_state = output.last_hidden_state + self.past
        self.past = output.last_hidden_state.mean()
        return output


@pytest.mark.parametrize("body", [CountingBody, LengthBody, RememberingBody])
def test_a_family_that_does_more_outside_its_layers_is_refused(body: type) -> None:
    class Strange(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model = body(config)

    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ValueError, match="Strange gives other logits"):
            SelfSpecModel(Strange(tiny_llama().config).to(dtype))


class PreparesInputs(LlamaForCausalLM):
    """Reads other tokens than those that it is given."""

    def prepare_inputs_for_generation(self, input_ids, *args, attention_mask=None, **kwargs):
        return super().prepare_inputs_for_generation(
            input_ids // 2, *args, attention_mask=attention_mask, **kwargs
        )


class UpdatesInputs(LlamaForCausalLM):
    """Takes back the position of the last token."""

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs):
        kept = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
        return {**kept, "position_ids": kept["position_ids"] - 1}


@pytest.mark.parametrize("kind", [PreparesInputs, UpdatesInputs])
def test_a_class_that_prepares_other_inputs_is_refused(kind: type) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__} gives other logits"):
        SelfSpecModel(kind(tiny_llama().config))


@pytest.mark.parametrize("name", ["_sample", "_prefill"])
def test_a_class_with_a_loop_over_tokens_of_its_own_is_refused(name: str) -> None:
    own = getattr(LlamaForCausalLM, name)
    methods = {name: lambda *args, **kwargs: own(*args, **kwargs)}
    kind = type("Looping", (LlamaForCausalLM,), methods)
    with pytest.raises(ValueError, match=f"Looping has a {name} of its own"):
        SelfSpecModel(kind(tiny_llama().config))


def test_the_check_is_made_once_for_a_class_and_config(monkeypatch) -> None:
    asked, make = [], wrapping_check.small_model
    monkeypatch.setattr(wrapping_check, "_known", {})
    monkeypatch.setattr(wrapping_check, "small_model", lambda m: asked.append(m) or make(m))
    first = tiny_llama()
    for model in (first, first, tiny_llama(seed=1), first.to(torch.bfloat16)):
        SelfSpecModel(model)
    assert len(asked) == 1
    SelfSpecModel(tiny_llama(num_hidden_layers=5))
    assert len(asked) == 2


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "phimoe"])
def test_the_check_touches_nothing(family: str, monkeypatch) -> None:
    monkeypatch.setattr(wrapping_check, "_known", {})
    model = build(family, "eager").train()
    calls = []
    model.register_forward_hook(lambda *_: calls.append("hook"))
    config, state = copy.deepcopy(model.config.to_dict()), torch.get_rng_state()
    before = [dict(vars(part)) for part in model.modules()]
    check_passes(model)
    assert torch.equal(torch.get_rng_state(), state) and not calls and model.training
    assert model.config.to_dict() == config and torch.get_default_dtype() == torch.float32
    assert [dict(vars(part)) for part in model.modules()] == before


def test_the_check_needs_no_weights_of_the_model(monkeypatch) -> None:
    monkeypatch.setattr(wrapping_check, "_known", {})
    with torch.device("meta"):  # as are weights that are offloaded
        check_passes(LlamaForCausalLM(tiny_llama().config))
        assert list(wrapping_check._known.values()) == [None]
    large = LlamaConfig(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64)
    with torch.device("meta"):
        model = LlamaForCausalLM(large)
    small = small_model(model)
    assert small is not None and small.num_parameters() < 1e6
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check_passes(model)


def strange(body: type, picky: bool = False) -> LlamaForCausalLM:
    """A model with another body, which may take no vocabulary but its own."""

    class Strange(LlamaForCausalLM):
        def __init__(self, config):
            if picky and config.vocab_size != 1000:
                raise RuntimeError("made for 1000 tokens")
            super().__init__(config)
            self.model = body(config)

    vocab = 1000 if picky else tiny_llama().config.vocab_size
    config = LlamaConfig(**{**tiny_llama().config.to_dict(), "vocab_size": vocab})
    return Strange(config).eval()


def test_a_class_that_takes_no_other_shape_is_checked_in_its_own() -> None:
    assert small_model(strange(LlamaModel, picky=True)) is not None
    SelfSpecModel(strange(LlamaModel, picky=True))
    with pytest.raises(ValueError, match="Strange gives other logits"):
        SelfSpecModel(strange(LengthBody, picky=True))


@pytest.fixture
def none_small(monkeypatch):
    """No class makes a small model; gives the models that are checked."""
    asked, check = [], wrapping_check.difference
    monkeypatch.setattr(wrapping_check, "_known", {})
    monkeypatch.setattr(wrapping_check, "_unknown", set())
    monkeypatch.setattr(wrapping_check, "small_model", lambda model: None)
    monkeypatch.setattr(wrapping_check, "difference", lambda m: asked.append(m) or check(m))
    return asked


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("body", [CountingBody, LengthBody, RememberingBody])
def test_without_a_small_model_the_first_call_refuses(body: type, batch: bool, none_small) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        spec = SelfSpecModel(strange(body).to(dtype))
        with pytest.raises(ValueError, match="Strange gives other logits"):
            if batch:
                spec.generate_batch([[5, 6, 7]], max_new_tokens=2)
            else:
                spec.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_small_model_one_call_checks_and_changes_nothing(dtype, none_small) -> None:
    model, ids = tiny_llama(dtype=dtype).train(), torch.tensor([[5, 6, 7]])
    # In half precision the default kernels round less often than `generate`.
    spec, state = SelfSpecModel(model, kernels="eager"), torch.get_rng_state()
    options = {"max_new_tokens": 9, "do_sample": False}
    spec.generate(ids, **options)
    assert not none_small  # in training mode a pass may be another each time
    model.eval()
    for wrapped in (spec, spec, SelfSpecModel(model, kernels="eager"), copy.deepcopy(spec)):
        assert torch.equal(wrapped.generate(ids, **options), model.generate(ids, **options))
    assert none_small == [model] and torch.equal(torch.get_rng_state(), state)
