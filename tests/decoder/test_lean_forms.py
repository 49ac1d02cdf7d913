"""Lean norms, MLPs and attention: the family's own output within the rounding of half precision."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from types import MethodType

import pytest
import torch
from conftest import gates, tiny_llama
from families import CASES_BY_FAMILY, FAMILIES, build
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.nn.utils import parametrize

from selfspec.decoder import Decoder, Span
from selfspec.decoder.kernels import fbgemm, lean_layer
from selfspec.decoder.kernels.lean import lean_forwards
from selfspec.decoder.kernels.prepacked import onednn_computes
from selfspec.decoder.passes import Approximation, Skips

HALF = torch.bfloat16


def passes(model, kernels, rows):
    """Logits of a prompt, of one token, and of four, in rows of equal or different lengths."""
    decoder = Decoder(model, kernels)
    tokens = torch.arange(rows * 24).view(rows, 24).remainder(61)
    whole, made = Span(0, decoder.depth), []
    with torch.no_grad(), decoder:
        slots = decoder.new_slots(rows)
        for start, width, counts in [
            (0, 9, range(9, 9 - rows, -1)),
            (9, 1, [1] * rows),
            (10, 4, [2] * rows),
        ]:
            part = tokens[:, start : start + width]
            made.append(decoder.run(part, whole, slots, unembed=True).output.float())
            slots.commit([*counts])
    return torch.cat(made, dim=1)


def leans(model):
    """How many modules of each kind have lean forms."""
    return Counter(type(m).__name__.removeprefix("Llama") for m, _ in lean_forwards([model]))


# They round less often. Rounding may choose other experts, which moves single logits far.
@pytest.mark.matrix(share=4)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_as_near_to_its_weights_as_its_own_code(family, rows):
    model = build(family, CASES_BY_FAMILY[family]).to(dtype=HALF)
    own, lean = passes(model, "eager", rows), passes(model, "prepacked", rows)
    exact = passes(model.float(), "eager", rows)
    assert (lean - exact).abs().mean() <= 2 * (own - exact).abs().mean()


ALL = {"Attention": 4, "MLP": 4, "RMSNorm": 9}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "ministral"])
def test_families_with_the_code_of_llama_are_lean_throughout(family):
    model = build(family, "sdpa").to(dtype=HALF)
    names = {type(module) for module, _ in lean_forwards([model])}
    layer = model.model.layers[0]
    assert names == {type(layer.self_attn), type(layer.mlp), type(layer.input_layernorm)}


def test_few_tokens_over_slots_take_the_lean_attention(monkeypatch):
    """Whatever name this release of transformers has for the cache."""
    model, calls = tiny_llama(dtype=HALF), []
    monkeypatch.setattr(lean_layer, "has_scripts", lambda: False)
    monkeypatch.setattr(
        "selfspec.decoder.kernels.lean_attention.scaled_dot_product_attention",
        lambda query, *args, **options: calls.append(len(query)) or attend(query, *args, **options),
    )
    passes(model, "prepacked", 3)
    assert calls == [3] * 2 * 4  # of the passes over one token and over four, in four layers


# ernie4_5 has Llama's attention but rotates neighbours; gemma's norm multiplies by 1 + weight.
@pytest.mark.parametrize(
    ("family", "missing"), [("ernie4_5", "Attention"), ("gemma", "RMSNorm"), ("gpt2", "")]
)
def test_other_code_runs_as_it_is(family, missing):
    model = build(family, "sdpa").to(dtype=HALF)
    assert not any(type(module).__name__.endswith(missing) for module, _ in lean_forwards([model]))


def test_norms_of_heads_with_other_code_keep_their_attention_as_it_is():
    model = build("qwen3", "sdpa").to(dtype=HALF)
    attention = model.model.layers[0].self_attn
    attention.q_norm.__class__ = type(
        "Norm", (type(attention.q_norm),), {"forward": lambda s, x: x}
    )
    lean = [module for module, _ in lean_forwards([model])]
    assert attention not in lean and model.model.layers[1].self_attn in lean


class Same(nn.Module):
    def forward(self, weight):
        return weight


def hooked(model):
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *args: None)
    return Counter(Attention=1)


def replaced(model):
    mlp = model.model.layers[0].mlp
    mlp.forward = MethodType(type(mlp).forward, mlp)
    return Counter(MLP=1)


def parametrized(model):
    parametrize.register_parametrization(model.model.norm, "weight", Same())
    return Counter(RMSNorm=1)


def of_another_class(model):
    norm = model.model.norm
    norm.__class__ = type("Norm", (type(norm),), {"forward": lambda self, x: self.weight * x})
    return Counter(RMSNorm=1)


def with_an_adapter(model):
    get_peft_model(model, LoraConfig(r=2, target_modules=["up_proj"]))
    return Counter(MLP=4)


def in_training(model):
    model.train()
    return Counter(ALL)


def in_float32(model):
    model.float()
    return Counter(ALL)


CHANGES = (
    hooked,
    replaced,
    parametrized,
    of_another_class,
    with_an_adapter,
    in_training,
    in_float32,
)


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_runs_as_it_is(change):
    model = tiny_llama(dtype=HALF)
    assert leans(model) == Counter(ALL)
    lost = change(model)
    assert leans(model) == Counter(ALL) - lost


def test_eager_means_the_code_of_transformers(monkeypatch):
    model = tiny_llama(dtype=HALF)
    monkeypatch.setattr("selfspec.decoder.gates.lean_forwards", lambda *args: 1 / 0)
    passes(model, "eager", 1)


def test_nothing_stays_on_the_model():
    model = tiny_llama(dtype=HALF)
    names = [set(vars(module)) for module in model.modules()]
    passes(model, "prepacked", 1)
    assert [set(vars(module)) for module in model.modules()] == names and not gates(model)


# Layers as two scripts


@pytest.fixture
def scripts_run(monkeypatch):
    """Takes the number of tokens of each run of a script before the cache."""
    if not fbgemm.is_faster() or not fbgemm.has_scripts():
        pytest.skip("this CPU has AMX, or no kernels of FBGEMM; or this Python has no TorchScript")
    seen, scripted = [], lean_layer.scripted

    def recording(function):
        run = scripted(function)

        def recorded(hidden, *rest):
            seen.append(hidden.shape[:2].numel())
            return run(hidden, *rest)

        return recorded if function is lean_layer.before_cache else run

    monkeypatch.setattr(lean_layer, "scripted", recording)
    return seen


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "ministral"])
def test_layers_with_the_code_of_llama_run_few_tokens_as_scripts(family, scripts_run):
    model = build(family, "sdpa").to(dtype=HALF)
    depth = len(model.model.layers)
    many = () if onednn_computes(HALF) else (9, 12, 27)  # oneDNN computes more than four, if it can
    for rows, few in ((1, (1, 4)), (3, (3,))):
        scripts_run.clear()
        passes(model, "prepacked", rows)
        assert [count for count in scripts_run if count not in many] == [
            count for count in few for _ in range(depth)
        ]


def over_slots(decoder):
    """Computes the logits of three tokens after two."""
    slots, tokens, whole = decoder.new_slots(1), torch.arange(5)[None], Span(0, decoder.depth)
    decoder.run(tokens[:, :2], whole, slots)
    slots.commit([2])
    return lambda **options: (
        decoder.run(tokens[:, 2:], whole, slots, unembed=True, **options).output
    )


@pytest.mark.parametrize("skips", [Skips.of([1, 2], []), Skips.of([], [0, 3]), Skips.of([1], [1])])
def test_layers_leave_out_what_a_pass_skips(skips, scripts_run):
    made = []
    for kernels, dtype in (("eager", torch.float32), ("eager", HALF), ("prepacked", HALF)):
        torch.manual_seed(0)
        decoder = Decoder(tiny_llama(dtype=HALF).to(dtype), kernels)
        with torch.no_grad(), decoder:
            run = over_slots(decoder)
            made.append(torch.stack([run(skips=skips), run(), run(skips=skips)]).float())
    exact, own, lean = made
    assert (lean - exact).abs().mean() <= 2 * (own - exact).abs().mean()
    assert torch.equal(lean[0], lean[2]) and not torch.equal(lean[0], lean[1])
    assert scripts_run


def test_layers_read_low_precision_copies_while_a_draft_does(scripts_run):
    model = tiny_llama(dtype=HALF)
    decoder, rounded = Decoder(model, "prepacked"), Approximation("int4", layers=True)
    decoder.gates.low_precision.want(rounded)
    with torch.no_grad(), decoder:
        run = over_slots(decoder)
        exact = run()
        assert scripts_run == [3] * 4
        with decoder.approximating(rounded):
            draft = run()
        assert scripts_run == [3] * 4
        assert torch.equal(run(), exact) and not torch.equal(draft, exact)


def test_a_script_serves_all_layers_and_reads_weights_that_have_changed(scripts_run, monkeypatch):
    model = tiny_llama(dtype=HALF)
    first = passes(model, "prepacked", 1)
    monkeypatch.setattr(torch.jit, "script", lambda function: pytest.fail("made anew"))
    assert torch.equal(passes(model, "prepacked", 1), first)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(2)
        model.model.layers[1].input_layernorm.weight.mul_(2)
    changed = passes(model, "prepacked", 1)
    own, exact = passes(model, "eager", 1), passes(model.float(), "eager", 1)
    assert (changed - exact).abs().mean() <= 2 * (own - exact).abs().mean()


@pytest.mark.slow
def test_the_package_is_imported_where_torch_has_no_fbgemm():
    lines = (
        "import torch",
        "torch.backends.quantized.__class__.supported_engines = ['none', 'qnnpack']",
        "assert 'fbgemm' not in torch.backends.quantized.supported_engines",
        "from selfspec.decoder.kernels import fbgemm, lean_layer",
        "assert not fbgemm.is_faster()",
    )
    subprocess.run([sys.executable, "-c", "; ".join(lines)], check=True)
