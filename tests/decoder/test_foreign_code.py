"""Code of others in a model may do with tensors what it may in the model's own `generate`.

It may keep them, change them later, and compute gradients. Other code runs in inference mode.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from conftest import EXIT, equal_to_generate, greedy, prompt, tiny_llama
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils.parametrize import register_parametrization
from transformers import LlamaForCausalLM

from selfspec import SelfSpecModel
from selfspec.decoder import has_foreign_code

DRAFTS: dict[str, Any] = {
    "none": "none",
    "early_exit": {"exit_layer": EXIT, "num_draft_tokens": 3},
    "tree": {"drafter": "tree", "exit_layer": EXIT},
    "cascade": {"drafter": "cascade", "exit_layer": EXIT},
    "default": None,
}
EVERY_DRAFT = pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
IDS, MASK = prompt(4, 9, 6)
NEW = 12


class Summing(nn.Module):
    """A module of others, whose buffer is another tensor after every pass."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, states: Tensor) -> Tensor:
        self.seen = self.seen + states.sum()
        return self.inner(states)


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


class Own(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def downhill(_: nn.Module, __: object, output: Any) -> Any:
    """A hook that moves states against a gradient."""
    states = output[0] if isinstance(output, tuple) else output
    with torch.enable_grad():
        leaf = states.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(leaf.pow(3).sum(), leaf)
    moved = states - 0.1 * gradient
    return (moved, *output[1:]) if isinstance(output, tuple) else moved


def in_sparse(model: Any, to: Any) -> None:
    for layer in model.model.layers:
        weight = to(layer.mlp.down_proj.weight.detach())
        layer.mlp.down_proj.weight = nn.Parameter(weight, requires_grad=False)


@EVERY_DRAFT
def test_a_hook_may_compute_gradients(draft):
    model = tiny_llama("sometimes")
    before = greedy(model, IDS, MASK, max_new_tokens=NEW)
    model.model.layers[1].register_forward_hook(downhill)
    text = equal_to_generate(SelfSpecModel(model), IDS, MASK, [draft], max_new_tokens=NEW)
    assert not torch.equal(text, before)


@EVERY_DRAFT
@pytest.mark.parametrize("batched", [False, True])
def test_what_a_hook_or_module_keeps_may_be_changed_and_trained_on(batched, draft):
    model, kept = tiny_llama("sometimes"), list[Tensor]()
    summing = model.model.layers[1].mlp = Summing(model.model.layers[1].mlp)
    model.model.norm.register_forward_hook(lambda *given: kept.append(given[-1]))
    spec, options = SelfSpecModel(model), {"max_new_tokens": NEW, "do_sample": False}
    if batched:
        spec.generate_batch(IDS.tolist(), draft=draft, **options)
    else:
        spec.generate(IDS, attention_mask=MASK, draft=draft, **options)
    nn.Linear(32, 1, dtype=torch.float64)(kept[0]).sum().backward()
    kept[0].zero_()
    summing.seen.zero_()


@EVERY_DRAFT
@pytest.mark.parametrize("to", [Tensor.to_sparse, Tensor.to_sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_weights_run(to, draft):
    model = tiny_llama("sometimes")
    in_sparse(model, to)
    equal_to_generate(SelfSpecModel(model), IDS, MASK, [draft], max_new_tokens=NEW)


@EVERY_DRAFT
@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_hooks_may_come_and_go_between_calls(dtype, draft):
    spec = SelfSpecModel(tiny_llama("sometimes"), kv_cache_dtype=dtype)
    layer, text, cache = spec.model.model.layers[1], IDS[1:2], None
    for turn in range(4):
        hook = layer.register_forward_hook(lambda *_: None) if turn % 2 else None
        given = {"attention_mask": torch.ones_like(text), "past_key_values": cache}
        options = {"do_sample": False, "draft": draft, "return_dict_in_generate": True}
        out = spec.generate(text, max_new_tokens=NEW, **given, **options)
        text, cache = out.sequences, out.past_key_values
        if hook is not None:
            hook.remove()
    whole = spec.generate(IDS[1:2], max_new_tokens=4 * NEW, do_sample=False, draft="none")
    assert torch.equal(text, whole)


def lora(model: Any) -> None:
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))


def wrapped(model: Any) -> None:
    own = model.model.norm.forward
    model.model.norm.forward = lambda states: own(states)


CHANGES: dict[str, tuple[Any, bool]] = {
    "nothing": (lambda model: None, False),
    "LoRA": (lora, False),
    "device hooks": (lambda model: cpu_offload(model, torch.device("cpu")), False),
    "hook": (lambda model: model.lm_head.register_forward_pre_hook(lambda *_: None), True),
    "module": (lambda model: setattr(model.model, "norm", Summing(model.model.norm)), True),
    "forward": (wrapped, True),
    "subclass": (lambda model: setattr(model, "__class__", Own), True),
    "parametrization": (
        lambda model: register_parametrization(model.lm_head, "weight", Halved()),
        True,
    ),
    "sparse": (lambda model: in_sparse(model, Tensor.to_sparse), True),
}


@pytest.mark.parametrize(("change", "foreign"), CHANGES.values(), ids=CHANGES)
def test_what_is_code_of_others(change, foreign):
    model = tiny_llama()
    change(model)
    assert has_foreign_code(model) is foreign


def test_hooks_on_all_modules_are_code_of_others():
    hook = torch_module.register_module_forward_hook(lambda *_: None)
    assert has_foreign_code(tiny_llama())
    hook.remove()
    assert not has_foreign_code(tiny_llama())
