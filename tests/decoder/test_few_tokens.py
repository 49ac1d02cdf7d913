"""In float32 on a CPU, products of a few tokens are computed transposed, as exactly, in passes."""

from typing import Any

import pytest
import torch
from conftest import equal_to_generate, gates, greedy_logits, prompt, tiny_llama
from families import CASES_BY_FAMILY, FAMILIES, VOCAB, build

from selfspec import SelfSpecModel
from selfspec.decoder.kernels import few_tokens

pytestmark = pytest.mark.skipif(not few_tokens.is_faster(), reason="this torch has no MKL")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def seen(monkeypatch):
    """Transposes products of tiny weights, too; takes the shapes of their inputs."""
    seen, product = [], few_tokens.transposed_product

    def transposed_product(input, weight, bias):
        seen.append(tuple(input.shape))
        return product(input, weight, bias)

    monkeypatch.setattr(few_tokens, "_SMALLEST", 1)
    monkeypatch.setattr(few_tokens, "transposed_product", transposed_product)
    return seen


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(2,), (5,), (1, 3), (4, 1), (2, 2)])
def test_a_transposed_product_is_as_exact_as_torchs_own(shape, biased):
    weight, bias = torch.randn(300, 256), torch.randn(300) if biased else None
    states = torch.randn(*shape, 2 * 256)[..., ::2]  # views are taken, too
    made = few_tokens.transposed_product(states, weight, bias)
    right = torch.nn.functional.linear(
        states.double(), weight.double(), None if bias is None else bias.double()
    )
    assert made.is_contiguous() and made.shape == right.shape and made.dtype == torch.float32
    torch.testing.assert_close(made.double(), right, rtol=1e-5, atol=1e-4)


@pytest.mark.matrix(share=4)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_writes_what_its_own_code_writes(family, seen):
    """Alone and in batches, plainly and with drafts."""
    model = build(family, CASES_BY_FAMILY[family]).float()
    for lengths in ((9,), (9, 5, 2)):
        ids, mask = prompt(*lengths, vocab=VOCAB)
        drafts = ("none", {"exit_layer": 2, "num_draft_tokens": 3}, "prompt_lookup")
        equal_to_generate(SelfSpecModel(model), ids, mask, drafts, max_new_tokens=8)
    assert seen or not any(type(part) is torch.nn.Linear for part in model.modules())


def test_only_products_of_2_to_5_tokens_are_transposed(seen):
    spec = SelfSpecModel(tiny_llama("sometimes", dtype=torch.float32))
    seen.clear()  # wrapping runs passes, too
    greedy_logits(spec, 9)
    assert not seen
    greedy_logits(spec, 9, draft={"exit_layer": 2, "num_draft_tokens": 6})
    greedy_logits(spec, *[4] * 5)
    counts = {rows * width for rows, width, _ in seen}
    assert counts and min(counts) > 1 and max(counts) == 5


@pytest.mark.parametrize("kernels", ["auto", "direct", "eager"])
def test_all_kernels_but_eager_transpose_them(kernels, seen):
    model = tiny_llama("sometimes", dtype=torch.float32)
    greedy_logits(SelfSpecModel(model, kernels=kernels), 9, 5)
    assert bool(seen) == (kernels != "eager") and not gates(model)


def test_weights_are_read_anew_in_every_call(seen):
    model = tiny_llama("sometimes", dtype=torch.float32)
    spec = SelfSpecModel(model)
    before = greedy_logits(spec, 9, 5, new_tokens=3)
    with torch.no_grad():
        model.lm_head.weight += 1
    mlp: Any = model.model.layers[1].mlp
    mlp.up_proj.weight = torch.nn.Parameter(torch.randn(48, 32))
    after = greedy_logits(spec, 9, 5, new_tokens=3)
    own = greedy_logits(SelfSpecModel(model, kernels="eager"), 9, 5, new_tokens=3)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, own, rtol=1e-4, atol=1e-4)


def test_other_weights_are_left_to_torch(seen):
    """In half precision, kept elsewhere, or with values that something else brings."""
    linear = torch.nn.Linear(8, 8)
    linear.weight = torch.nn.Parameter(torch.randn(8, 8).t())  # not contiguous
    parametrized = torch.nn.Linear(8, 8)
    torch.nn.utils.parametrize.register_parametrization(parametrized, "weight", torch.nn.Tanh())
    owned = torch.nn.Linear(8, 8)
    owned.forward = owned.forward
    others = [linear, parametrized, owned, torch.nn.Linear(8, 8, device="meta")]
    others += [torch.nn.Linear(8, 8, dtype=dtype) for dtype in (torch.bfloat16, torch.float64)]
    assert not [*few_tokens.transposed_forwards(*others)]
    assert len([*few_tokens.transposed_forwards(torch.nn.Linear(8, 8), *others)]) == 1
