"""What others do to a model before or after it is wrapped acts as in plain decoding, or is told.

Wrappers around forwards, casts, and modules that take the place of others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.state import AcceleratorState
from conftest import EXIT, VOCAB, equal_to_generate, greedy, prompt, tiny_llama
from head_tools import KINDS, own_head
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaForCausalLM,
    LlamaModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding
from transformers.utils import ModelOutput

from selfspec import SelfSpecModel
from selfspec.decoder import Decoder
from selfspec.decoder.families import LOOP
from selfspec.decoder.kernels import lean
from selfspec.decoder.passes import cache_name
from selfspec.heads import Calibrator

SKIPS = {"attention": [2], "mlp": [1, 2]}
DRAFTS: dict[str, Any] = {
    "none": "none",
    "early_exit": {"exit_layer": EXIT, "num_draft_tokens": 3},
    "tree": {"drafter": "tree", "exit_layer": EXIT},
    "skip_sublayers": {"drafter": "skip_sublayers", "skip": SKIPS},
    "default": None,
}
EVERY_DRAFT = pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
IDS, MASK = prompt(4, 9, 6)
NEW = 12


def decorated(forward: Any, change: Any) -> Any:
    """A decorated forward that reaches the original by a global name, as at the top of a script."""
    names = {"original": forward, "change": change}
    code = "def patched(self, *args, **kwargs): return change(original(self, *args, **kwargs))"
    exec(code, names)
    return functools.wraps(forward)(names["patched"])


# Forwards that others wrap


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """One for mixed precision; all of a process share their state."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(mixed_precision="bf16", cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.matrix
@EVERY_DRAFT
@pytest.mark.parametrize("hooked", [False, True], ids=["alone", "on device hooks"])
def test_mixed_precision_of_accelerate_acts(accelerator, hooked, draft):
    model = tiny_llama(dtype=torch.float32)
    if hooked:
        add_hook_to_module(model, AlignDevicesHook("cpu", io_same_device=True))
    model = accelerator.prepare(model)
    spec, options = SelfSpecModel(model), {"max_new_tokens": NEW, "do_sample": False}
    text = spec.generate(IDS, attention_mask=MASK, draft=draft, **options)
    assert torch.equal(text, model.generate(IDS, attention_mask=MASK, **options))


class Shifted(LlamaForCausalLM):
    """Adds to the embeddings in its own forward."""

    def forward(self, input_ids=None, inputs_embeds=None, **kwargs: Any) -> Any:
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
            inputs_embeds = inputs_embeds + torch.linspace(-1, 1, 32, dtype=inputs_embeds.dtype)
        return super().forward(inputs_embeds=inputs_embeds, **kwargs)


@pytest.mark.matrix
@EVERY_DRAFT
@pytest.mark.parametrize("how", ["subclass", "instance"])
def test_a_forward_that_changes_its_inputs_acts(how, draft):
    model = tiny_llama("sometimes")
    before = greedy(model, IDS, MASK, max_new_tokens=NEW)
    if how == "subclass":
        model.__class__ = Shifted
    else:
        model.forward = shifted(model)
    text = equal_to_generate(SelfSpecModel(model), IDS, MASK, [draft], max_new_tokens=NEW)
    assert not torch.equal(text, before)


def shifted(model: Any) -> Any:
    own = model.forward

    @functools.wraps(own)
    def forward(input_ids=None, inputs_embeds=None, **kwargs: Any) -> Any:
        if inputs_embeds is None:
            inputs_embeds = model.get_input_embeddings()(input_ids)
            inputs_embeds = inputs_embeds + torch.linspace(-1, 1, 32, dtype=inputs_embeds.dtype)
        return own(inputs_embeds=inputs_embeds, **kwargs)

    return forward


def reading(model: Any) -> Any:
    """A forward that reads its body's output in all the ways that a `ModelOutput` has.

    Others write such forwards, in which the head is fused with the loss, for example.
    """

    def forward(input_ids=None, return_dict=None, **kwargs: Any) -> Any:
        output = model.model(input_ids=input_ids, **kwargs)
        assert isinstance(output, ModelOutput) and "last_hidden_state" in output
        logits = model.lm_head(output.to_tuple()[0].roll(1, -1))
        # Since transformers 5.24 the cache has another name, and this one is still taken.
        return CausalLMOutputWithPast(logits=logits, past_key_values=output.past_key_values)

    return forward


@pytest.mark.matrix
@EVERY_DRAFT
@pytest.mark.parametrize("place", ["object", "class"])
def test_a_forward_of_others_gets_what_transformers_returns(place, draft, monkeypatch):
    model = tiny_llama("sometimes")
    before = greedy(model, IDS, MASK, max_new_tokens=NEW)
    if place == "object":
        model.forward = reading(model)
    else:
        monkeypatch.setattr(LlamaForCausalLM, "forward", lambda *args, **kw: reading(*args)(**kw))
    text = equal_to_generate(SelfSpecModel(model), IDS, MASK, [draft], max_new_tokens=NEW)
    assert not torch.equal(text, before)


@pytest.mark.matrix
@EVERY_DRAFT
@pytest.mark.parametrize("kind", ["LlamaAttention", "LlamaMLP", "LlamaModel", "LlamaForCausalLM"])
def test_autocast_around_a_forward_of_a_class_acts(kind, draft, monkeypatch):
    model = tiny_llama("sometimes", dtype=torch.float32)
    patched = getattr(modeling_llama, kind)
    mixed = torch.autocast("cpu", torch.bfloat16)(patched.forward)
    monkeypatch.setattr(patched, "forward", mixed)
    spec, options = SelfSpecModel(model), {"max_new_tokens": NEW, "do_sample": False}
    text = spec.generate(IDS, attention_mask=MASK, draft=draft, **options)
    assert torch.equal(text, model.generate(IDS, attention_mask=MASK, **options))


@pytest.mark.matrix
@EVERY_DRAFT
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("LlamaAttention", lambda output: (output[0] * 3, output[1])),
        ("LlamaMLP", lambda output: output * 3),
        ("LlamaDecoderLayer", lambda output: output * 1.5 + output.roll(1, -1)),
        ("LlamaModel", lambda output: output),
        ("LlamaForCausalLM", lambda output: output),
    ],
)
def test_a_decorated_forward_of_a_class_acts(kind, change, draft, monkeypatch):
    model = tiny_llama("sometimes")
    SelfSpecModel(model)  # what was found of the class must not be taken for that of the patch
    patched = getattr(modeling_llama, kind)
    monkeypatch.setattr(patched, "forward", decorated(patched.forward, change))
    equal_to_generate(SelfSpecModel(model), IDS, MASK, [draft], max_new_tokens=NEW)


@pytest.mark.parametrize("kind", ["LlamaRMSNorm", "LlamaMLP", "LlamaAttention"])
def test_packed_kernels_leave_decorated_forwards_as_they_are(kind, monkeypatch):
    model = tiny_llama("sometimes", dtype=torch.bfloat16)
    SelfSpecModel(model, kernels="direct")

    def doubled(output: Any) -> Any:
        return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output

    patched = getattr(modeling_llama, kind)
    monkeypatch.setattr(patched, "forward", decorated(patched.forward, doubled))
    same_logits_of_packed_kernels(model)


@pytest.mark.parametrize("name", ["LlamaRMSNorm", "LlamaMLP", "apply_rotary_pos_emb"])
def test_packed_kernels_know_code_that_was_replaced_before_they_first_ran(name, monkeypatch):
    model = tiny_llama("sometimes", dtype=torch.bfloat16)
    lean._kinds.cache_clear()
    lean._in_file.cache_clear()
    patched = getattr(modeling_llama, name)
    if isinstance(patched, type):
        own = patched.forward
        monkeypatch.setattr(patched, "forward", lambda self, states: 2 * own(self, states))
    else:
        monkeypatch.setattr(modeling_llama, name, lambda query, key, *_, **__: (9 * query, key))
    same_logits_of_packed_kernels(model)


def same_logits_of_packed_kernels(model: Any) -> None:
    found = []
    for kernels in ("eager", "prepacked"):
        spec = SelfSpecModel(model, kernels=kernels)
        options = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 2}
        logits = spec.generate(IDS, attention_mask=MASK, draft="none", **options).logits
        found.append(torch.stack(logits))  # of the prompt, and of one token
    torch.testing.assert_close(*found, rtol=0.05, atol=0.3)


def test_a_check_is_made_anew_when_a_patch_is_gone(monkeypatch):
    """A class that was refused is not refused for ever."""
    model, own = tiny_llama("sometimes"), LlamaModel.forward

    @functools.wraps(own)
    def looks_back(self, *args: Any, **kwargs: Any) -> Any:
        output = own(self, *args, **kwargs)
        output.last_hidden_state = output.last_hidden_state.cumsum(1)
        return output

    with monkeypatch.context() as patch:
        patch.setattr(LlamaModel, "forward", looks_back)
        with pytest.raises(ValueError, match="gives other logits"):
            SelfSpecModel(model)
    equal_to_generate(SelfSpecModel(model), IDS, MASK, max_new_tokens=NEW)


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_a_hook_that_compresses_the_kv_cache_is_refused(dtype):
    model = tiny_llama()

    def halve(attention: Any, _: Any, kwargs: Any, output: Any) -> None:
        layer = kwargs[cache_name(type(attention).forward)].layers[attention.layer_idx]
        layer.keys, layer.values = layer.keys[:, :, ::2], layer.values[:, :, ::2]

    hooks = [
        layer.self_attn.register_forward_hook(halve, with_kwargs=True)
        for layer in model.model.layers
    ]
    spec = SelfSpecModel(model, kv_cache_dtype=dtype)
    with pytest.raises(ValueError, match=r"keys .* KV cache were replaced.* own generate"):
        spec.generate(IDS, attention_mask=MASK, max_new_tokens=NEW, do_sample=False)
    for hook in hooks:
        hook.remove()
    assert len(spec.generate(IDS, attention_mask=MASK, max_new_tokens=NEW, do_sample=False))


@pytest.mark.parametrize("name", LOOP)
def test_a_loop_over_tokens_that_was_changed_on_the_object_is_refused(name):
    model = tiny_llama("sometimes")
    own, spec = getattr(model, name), SelfSpecModel(model)
    setattr(model, name, own)  # as PEFT leaves it
    equal_to_generate(spec, IDS, MASK, max_new_tokens=NEW)
    setattr(model, name, lambda *args, **kwargs: own(*args, **kwargs))
    with pytest.raises(ValueError, match=f"{name} of this Llama.* replaced"):
        spec.generate(IDS, attention_mask=MASK, max_new_tokens=NEW)
    delattr(model, name)
    equal_to_generate(spec, IDS, MASK, max_new_tokens=NEW)


# Casts and modules that take the place of others


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_heads_follow_a_target_that_is_cast(kind):
    model = tiny_llama("sometimes", dtype=torch.float32)
    spec = SelfSpecModel(model, [own_head(Decoder(model), kind, EXIT, trimmed=True)])
    draft = {"head": spec.heads[0].kind, "exit_layer": spec.heads[0].exit_layer}
    for dtype in (torch.float64, torch.float32, torch.float64):
        model.to(dtype)
        equal_to_generate(spec, IDS, MASK, max_new_tokens=NEW, draft=draft)
        weights = [
            p for part in (spec.heads[0], spec.heads[0].lm_head) if part for p in part.parameters()
        ]
        assert {weight.dtype for weight in weights} <= {dtype}
        assert not any(weight.is_inference() for weight in weights)


def test_a_cast_leaves_the_targets_own_weights_and_calibrators_alone():
    model = tiny_llama("sometimes", dtype=torch.float32)
    head = own_head(Decoder(model), "lora", EXIT)
    head.calibrators["greedy"] = Calibrator()
    spec, draft = SelfSpecModel(model, [head]), {"exit_layer": EXIT, "head": "lora"}
    model.to(torch.bfloat16)
    model.lm_head.float()
    model.lm_head.register_forward_pre_hook(lambda module, given: (given[0].float(),))
    spec.generate(IDS, attention_mask=MASK, max_new_tokens=NEW, draft=draft)
    assert model.lm_head.weight.dtype == torch.float32
    assert {part.dtype for part in head.calibrators.buffers()} == {torch.float32}
    assert {part.dtype for part in head.norm.parameters()} == {torch.bfloat16}


def dynamic_rotary(model: Any) -> None:
    config = type(model.config)(**model.config.to_dict())
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model.model.rotary_emb = LlamaRotaryEmbedding(config)


def pruned(model: Any) -> None:
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:3], 3


def another_body(model: Any) -> None:
    model.model = tiny_llama("sometimes", seed=3).model


@pytest.mark.parametrize(
    ("change", "part"),
    [(pruned, "layers"), (another_body, "body"), (dynamic_rotary, "rotary embedding")],
)
def test_parts_that_changed_after_wrapping_are_named(change, part):
    model = tiny_llama("sometimes")
    spec = SelfSpecModel(model)
    change(model)
    with pytest.raises(
        ValueError, match=f"the {part} of LlamaForCausalLM changed .* wrap it again"
    ):
        spec.generate(IDS, attention_mask=MASK, max_new_tokens=NEW)
    equal_to_generate(SelfSpecModel(model), IDS, MASK, max_new_tokens=NEW)


@EVERY_DRAFT
def test_a_sublayer_that_was_replaced_is_the_one_that_runs(draft):
    model = tiny_llama("sometimes")
    spec = SelfSpecModel(model)
    before = equal_to_generate(spec, IDS, MASK, [draft], max_new_tokens=NEW)
    torch.manual_seed(3)
    for layer in model.model.layers:
        layer.mlp = LlamaMLP(model.config).double()
    after = equal_to_generate(spec, IDS, MASK, [draft], max_new_tokens=NEW)
    assert not torch.equal(after, before)


# Attentions


def sharper(module: nn.Module, query: Tensor, *others: Any, **kwargs: Any) -> Any:
    return sdpa_attention_forward(module, query * 1.3, *others, **kwargs)


def added(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Any:
    """Attention that adds what it is given as a mask, and without one sees everything."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    weights = query @ key.transpose(-1, -2) + (0 if mask is None else mask)
    return (weights.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def inverted(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Any:
    """Attention that takes masks of bools only, and zeros of other masks for what is hidden."""
    shape = *query.shape[:3], key.shape[2]
    seen = torch.ones(shape, dtype=torch.bool).tril(shape[-1] - shape[-2]) if mask is None else mask
    hidden = torch.zeros(shape, dtype=query.dtype).masked_fill(seen.logical_not(), -1e9)
    return added(module, query, key, value, hidden)


@pytest.fixture
def register(monkeypatch) -> Any:
    """Registers an attention, and what makes its masks, for one test."""
    attentions, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping

    def register(attention: Any, makes_masks: Any = None) -> str:
        monkeypatch.setitem(attentions, "own", attention)
        if makes_masks is not None:
            monkeypatch.setitem(masks, "own", makes_masks)
        return "own"

    return register


@pytest.mark.matrix
@EVERY_DRAFT
@pytest.mark.parametrize("attention", [(sharper, sdpa_mask), (added, eager_mask)])
@pytest.mark.parametrize("kernels", ["eager", "direct"])
def test_an_attention_of_others_that_takes_masks_acts(kernels, attention, draft, register):
    model = tiny_llama("sometimes")
    before = greedy(model, IDS, MASK, max_new_tokens=NEW)
    model.set_attn_implementation(register(*attention))
    spec = SelfSpecModel(model, kernels=kernels)
    text = equal_to_generate(spec, IDS, MASK, [draft], max_new_tokens=NEW)
    assert not torch.equal(text, before)


def test_an_attention_of_others_is_checked_with_the_model(register):
    model = tiny_llama("sometimes")
    spec = SelfSpecModel(model)
    model.set_attn_implementation(register(sharper, sdpa_mask))
    with pytest.raises(ValueError, match=r"the attention of LlamaForC.* changed .* wrap it again"):
        spec.generate(IDS, attention_mask=MASK, max_new_tokens=NEW)
    equal_to_generate(SelfSpecModel(model), IDS, MASK, max_new_tokens=NEW)
    register(inverted, sdpa_mask)
    with pytest.raises(ValueError, match="gives other logits"):
        SelfSpecModel(model)


def test_an_attention_of_others_without_masks_is_refused(register):
    model = tiny_llama("sometimes")
    model.set_attn_implementation(register(sharper))
    with pytest.raises(ValueError, match=r"no mask per row.*MaskInterface.register\('own', sdpa_"):
        SelfSpecModel(model)


# What is refused


def test_an_attention_that_is_chosen_after_wrapping_is_refused_if_it_takes_no_mask_per_row():
    model = tiny_llama("sometimes")
    spec = SelfSpecModel(model)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="'flex_attention', which takes no mask per row"):
        spec.generate(IDS, attention_mask=MASK, max_new_tokens=NEW)
    model.set_attn_implementation("eager")
    equal_to_generate(spec, IDS[1:2], max_new_tokens=NEW)


OLD = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:`torch.jit.trace", "ignore:.*quantize_per_tensor"
)


@OLD
def test_a_traced_module_is_refused():
    model = tiny_llama("sometimes", dtype=torch.float32)
    states = torch.randn(1, 3, 32)
    model.model.layers[0].mlp = torch.jit.trace(model.model.layers[0].mlp, states)
    with pytest.raises(ValueError, match=r"a \w+ that is scripted or traced"):
        SelfSpecModel(model)


@OLD
def test_activations_quantized_by_pass_are_refused():
    model = tiny_llama("sometimes", dtype=torch.float32)
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ValueError, match="quantized dynamically, with one scale for all tokens"):
        SelfSpecModel(quantized)


def test_weights_in_one_buffer_are_packed():
    """A view may begin at any number of the buffer."""
    model = tiny_llama("sometimes", dtype=torch.bfloat16)
    parts: list[Tensor] = [*model.parameters()]
    flat, at = (
        torch.cat([torch.zeros(1, dtype=torch.bfloat16), *(p.data.flatten() for p in parts)]),
        1,
    )
    for part in parts:
        part.data, at = flat[at : at + part.numel()].view_as(part), at + part.numel()
    text = SelfSpecModel(model).generate(IDS, attention_mask=MASK, max_new_tokens=NEW)
    assert text.shape == (3, IDS.shape[1] + NEW) and text.max() < VOCAB


@pytest.mark.parametrize("draft", ["none", "early_exit", {"exit_layer": 4, "precision": "int8"}])
@pytest.mark.parametrize(
    ("kernels", "dtype", "around"),
    [
        ("direct", torch.float32, torch.bfloat16),
        ("direct", torch.float32, torch.float16),
        ("prepacked", torch.bfloat16, torch.float16),
        ("prepacked", torch.float16, torch.bfloat16),
    ],
)
def test_autocast_around_a_call_acts_and_ends_with_it(kernels, dtype, around, draft):
    """Weights that are packed or rounded there for the first time are those of other calls."""
    spec, twin = (
        SelfSpecModel(tiny_llama("sometimes", dtype=dtype, spread=1.0), kernels=kernels)
        for _ in range(2)
    )
    options = {"attention_mask": MASK, "max_new_tokens": NEW, "do_sample": False}
    with torch.autocast("cpu", around):
        text = spec.generate(IDS, **options, draft=draft)
        if dtype == torch.float32:
            assert torch.equal(text, spec.model.generate(IDS, **options))
    text = spec.generate(IDS, **options, draft=draft)
    assert torch.equal(text, twin.generate(IDS, **options, draft=draft))
