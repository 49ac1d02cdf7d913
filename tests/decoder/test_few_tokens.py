"""Products of a few tokens by FBGEMM are as exact as others."""

import pytest
import torch
from conftest import tiny_llama

from selfspec import SelfSpecModel
from selfspec.decoder.kernels import few_tokens, lean_layer, prepacked

HALF = torch.bfloat16
pytestmark = pytest.mark.skipif(
    not few_tokens.is_faster() or not prepacked.computes(HALF),
    reason="this CPU has AMX, or no kernels of FBGEMM for half precision",
)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (1, 1), (1, 2), (4, 1), (1, 0)])
def test_products_are_rounded_once(shape, biased):
    """Of one state alone, of none, of rows and of a batch."""
    weight, bias = torch.randn(96, 64).to(HALF), torch.randn(96).to(HALF) if biased else None
    states = torch.randn(*shape, 64).to(HALF)
    made = few_tokens.product(weight, bias)(states)
    right = torch.nn.functional.linear(
        states.double(), weight.double(), None if bias is None else bias.double()
    )
    assert made.dtype == HALF and made.shape == right.shape
    # Half a unit in the last of the 8 bits, and what float32 sums lose.
    torch.testing.assert_close(made.double(), right, rtol=2**-8 * 1.01, atol=1e-4)


def test_a_product_does_not_depend_on_the_tokens_beside_it():
    weight, states = torch.randn(96, 64).to(HALF), torch.randn(4, 64).to(HALF)
    product = few_tokens.product(weight, None)
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
        assert torch.equal(few_tokens.product(weight, None)(states)[0], weight[:, column])


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30])
def test_weights_that_no_scale_fits_are_left_to_onednn(value):
    weight = torch.randn(96, 64).to(HALF)
    assert few_tokens.product(weight, None) is not None
    weight[3, 5] = value
    assert few_tokens.product(weight, None) is None
    assert few_tokens.product(torch.zeros(96, 64, dtype=HALF), None) is None


def test_only_passes_of_a_few_tokens_are_computed_by_it(monkeypatch):
    model, seen, run = tiny_llama("sometimes", dtype=HALF), [], few_tokens.Product.forward

    def forward(product, states):
        seen.append(states.numel() // states.shape[-1])
        return run(product, states)

    monkeypatch.setattr(few_tokens.Product, "forward", forward)
    for module in (few_tokens, lean_layer):
        monkeypatch.setattr(module, "scripted", lambda module: module.forward)
    prompt = torch.randint(1, 64, (1, 9))
    told = {}
    for kernels in ("prepacked", "eager"):
        spec = SelfSpecModel(model, kernels=kernels)
        told[kernels] = spec.generate(
            prompt, max_new_tokens=6, return_dict_in_generate=True, output_logits=True
        ).logits
    assert seen and max(seen) <= few_tokens.MOST_TOKENS
    torch.testing.assert_close(told["prepacked"][0], told["eager"][0], rtol=0.05, atol=0.05)


def test_where_two_copies_do_not_fit_there_is_one(monkeypatch):
    model = tiny_llama("sometimes", dtype=HALF)
    size = prepacked.packed_bytes(model)
    memory = type("Memory", (), {"available": size})
    monkeypatch.setattr(prepacked.psutil, "virtual_memory", lambda: memory)
    assert prepacked.packed_bytes(model) == size // 2
    spec = SelfSpecModel(model, kernels="prepacked")
    spec.generate(torch.randint(1, 64, (1, 9)), max_new_tokens=2)
    held = [prepacked._PACKED[m] for m in model.modules() if m in prepacked._PACKED]
    assert held and not any(packed.few for packed in held)
