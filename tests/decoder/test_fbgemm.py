"""Products by FBGEMM are as exact as others: of a few tokens, or of all where oneDNN has none."""

import copy

import pytest
import torch
from conftest import greedy_logits, tiny_llama
from families import CASES_BY_FAMILY, FAMILIES, VOCAB, build
from peft import LoraConfig, get_peft_model

from selfspec import SelfSpecModel
from selfspec.decoder import Decoder
from selfspec.decoder.kernels import fbgemm, lean_layer, prepacked

HALF = torch.bfloat16
pytestmark = pytest.mark.skipif(
    not fbgemm.is_faster(), reason="this CPU has AMX, or no kernels of FBGEMM for half precision"
)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def onednn():
    """OneDNN has kernels for half precision, too."""
    if not prepacked.onednn_computes(HALF):
        pytest.skip("this CPU has no kernels of oneDNN for bfloat16")


@pytest.fixture
def alone(monkeypatch):
    """As on a CPU without AVX-512, where oneDNN has none."""
    monkeypatch.setattr(prepacked, "onednn_computes", lambda dtype: False)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (1, 1), (1, 2), (4, 1), (1, 0)])
def test_products_are_rounded_once(shape, biased):
    """Of one state alone, of none, of rows and of a batch."""
    weight, bias = torch.randn(96, 64).to(HALF), torch.randn(96).to(HALF) if biased else None
    states = torch.randn(*shape, 64).to(HALF)
    made = fbgemm.product(weight, bias)(states)
    right = torch.nn.functional.linear(
        states.double(), weight.double(), None if bias is None else bias.double()
    )
    assert made.dtype == HALF and made.shape == right.shape
    # Half a unit in the last of the 8 bits, and what float32 sums lose.
    torch.testing.assert_close(made.double(), right, rtol=2**-8 * 1.01, atol=1e-4)


def test_a_product_does_not_depend_on_the_tokens_beside_it():
    weight, states = torch.randn(96, 64).to(HALF), torch.randn(4, 64).to(HALF)
    product = fbgemm.product(weight, None)
    assert torch.equal(product(states), torch.cat([product(one[None]) for one in states]))


@pytest.mark.parametrize("dtype", [HALF, torch.float16])
@pytest.mark.parametrize("scale", [1e-6, 0.02, 3e4])
def test_float16_holds_weights_of_any_size(scale, dtype):
    """Also of sizes that differ within a weight."""
    weight = torch.zeros(64, 32, dtype=dtype)
    weight[:, 0], weight[:, 1] = scale, torch.randn(64) * scale / 1000
    states = torch.zeros(1, 32, dtype=dtype)
    for column in (0, 1):
        states.zero_()[0, column] = 1.0
        assert torch.equal(fbgemm.product(weight, None)(states)[0], weight[:, column])


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30])
def test_weights_that_no_scale_fits_are_left_to_onednn(value):
    weight = torch.randn(96, 64).to(HALF)
    assert fbgemm.product(weight, None) is not None
    weight[3, 5] = value
    assert fbgemm.product(weight, None) is None
    assert fbgemm.product(torch.zeros(96, 64, dtype=HALF), None) is None


@pytest.fixture
def seen(monkeypatch):
    """Takes the tokens of each product."""
    seen, run = [], fbgemm.multiply

    def multiply(states, packed, inverse):
        seen.append(states.numel() // states.shape[-1])
        return run(states, packed, inverse)

    for module in (fbgemm, lean_layer):
        monkeypatch.setattr(module, "multiply", multiply)
        monkeypatch.setattr(module, "scripted", lambda function: function)
    return seen


def test_only_passes_of_a_few_tokens_are_computed_by_it(onednn, seen):
    model, prompt = tiny_llama("sometimes", dtype=HALF), torch.randint(1, 64, (1, 9))
    told = {}
    for kernels in ("prepacked", "eager"):
        spec = SelfSpecModel(model, kernels=kernels)
        told[kernels] = spec.generate(
            prompt, max_new_tokens=6, return_dict_in_generate=True, output_logits=True
        ).logits
    assert seen and max(seen) <= prepacked.most_tokens(HALF)
    torch.testing.assert_close(told["prepacked"][0], told["eager"][0], rtol=0.05, atol=0.05)


def test_where_two_copies_do_not_fit_there_is_one(onednn, monkeypatch):
    model = tiny_llama("sometimes", dtype=HALF)
    size = prepacked.packed_bytes(model)
    memory = type("Memory", (), {"available": size})
    monkeypatch.setattr(prepacked.psutil, "virtual_memory", lambda: memory)
    assert prepacked.packed_bytes(model) == size // 2
    spec = SelfSpecModel(model, kernels="prepacked")
    spec.generate(torch.randint(1, 64, (1, 9)), max_new_tokens=2)
    held = [prepacked._PACKED[m] for m in model.modules() if m in prepacked._PACKED]
    assert held and not any(packed.fbgemm for packed in held)


# Where oneDNN has no kernels


def logits(model, kernels, draft="none", new_tokens=10):
    """All logits `[tokens, rows, vocab]` of a greedy call on rows of different lengths."""
    spec, options = (
        SelfSpecModel(model, kernels=kernels),
        {"vocab": VOCAB, "new_tokens": new_tokens},
    )
    return greedy_logits(spec, 9, 5, 2, draft=draft, **options).float()


@pytest.mark.matrix(share=4)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, HALF) for family in FAMILIES), ("llama", torch.float16), ("gpt2", torch.float16)],
)
def test_alone_it_computes_every_family_as_exactly_as_its_own_code(family, dtype, alone):
    model = build(family, CASES_BY_FAMILY[family]).to(dtype)
    assert Decoder(model).kernels == "prepacked"
    own, made = (logits(model, kernels, new_tokens=1) for kernels in ("eager", "prepacked"))
    exact = logits(model.float(), "eager", new_tokens=1)
    assert (made - exact).abs().mean() <= 2 * (own - exact).abs().mean()


def test_alone_it_computes_passes_of_any_number_of_tokens(alone, seen):
    model = tiny_llama("sometimes", dtype=HALF)
    for draft in ("none", {"exit_layer": 2, "num_draft_tokens": 3}, "prompt_lookup"):
        seen.clear()
        logits(model, "prepacked", draft)
        assert 27 in seen and min(seen) <= 12  # the prompts' three rows of nine tokens, then rounds


def test_alone_it_holds_weights_once_more(alone):
    model = tiny_llama("sometimes", dtype=HALF)
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert prepacked.packed_bytes(model) == sum(linear.weight.nbytes for linear in linears)


def test_alone_it_packs_weights_that_change_anew(alone):
    model = tiny_llama("sometimes", dtype=HALF)
    before = logits(model, "prepacked")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 2
    after = logits(model, "prepacked")
    assert not torch.equal(after, before)
    assert torch.equal(after, logits(copy.deepcopy(model), "prepacked"))


def test_alone_it_packs_maps_that_leave_and_join_a_product_anew(alone):
    model = tiny_llama("sometimes", dtype=HALF)
    spec = SelfSpecModel(model, kernels="prepacked")

    def assert_is_right():
        exact = greedy_logits(SelfSpecModel(model, kernels="eager"), 6, new_tokens=1)
        found = greedy_logits(spec, 6, new_tokens=1)
        assert (found - exact).norm() < 0.05 * exact.norm()

    assert_is_right()
    config = LoraConfig(r=2, target_modules=["k_proj", "up_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, config).eval()  # queries are now projected alone
    assert_is_right()
    adapted.merge_and_unload()
    assert_is_right()
    model.model.layers[1].self_attn.o_proj.bias = torch.nn.Parameter(4 * torch.ones(32, dtype=HALF))
    assert_is_right()


def test_alone_it_leaves_weights_that_no_scale_fits_as_they_are(alone):
    model = tiny_llama("sometimes", dtype=HALF)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.zero_()
    made, own = (logits(model, kernels, new_tokens=1) for kernels in ("prepacked", "eager"))
    torch.testing.assert_close(made, own, rtol=0.05, atol=0.05)
    assert not any(layer.mlp.down_proj in prepacked._PACKED for layer in model.model.layers)
    assert all(
        layer.mlp.up_proj in prepacked._PACKED or layer.mlp.gate_proj in prepacked._PACKED
        for layer in model.model.layers
    )


def test_alone_it_packs_in_place(alone, monkeypatch):
    monkeypatch.setattr(lean_layer, "has_scripts", lambda: False)  # they round less often
    model = tiny_llama("sometimes", dtype=HALF)
    before = logits(model, "prepacked")
    prepacked.prepack_(model)
    assert torch.equal(logits(model, "auto"), before)
    with pytest.raises(RuntimeError, match="prepack_ has packed the weights"):
        model.float()
