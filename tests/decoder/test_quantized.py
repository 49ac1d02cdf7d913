"""Targets with quantized weights: their heads are loaded, their text is their own."""

import pytest
import torch
from conftest import EXIT, equal_to_generate, greedy, prompt, tiny_llama
from head_tools import own_head

from selfspec import DEMO_MODEL, SelfSpecModel
from selfspec.decoder import Decoder, is_quantized
from selfspec.heads import FusedHead, load_heads, save_heads

IDS, MASK = prompt(4, 9)
NO_TORCHAO = "torchao is not installed; it quantizes the weights"


def int8(model):
    """The model with the weights of its layers in eight bits, by torchao."""
    quantization = pytest.importorskip("torchao.quantization", reason=NO_TORCHAO)
    config = quantization.Int8WeightOnlyConfig(version=2)
    quantization.quantize_(model.model.layers, config)
    return model


@pytest.mark.parametrize("kind", ["shared", "lens", "block", "fused"])
def test_heads_of_the_full_target_draft_for_the_quantized_one(kind, tmp_path):
    full = Decoder(tiny_llama("sometimes", dtype=torch.float32))
    head = own_head(full, kind, EXIT)
    save_heads([head], full, tmp_path)
    target = int8(tiny_llama("sometimes", dtype=torch.float32))
    spec = SelfSpecModel(target, heads=tmp_path)
    loaded = spec.heads[0].state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in head.state_dict().items())
    draft = {"head": kind, "exit_layer": EXIT, "num_draft_tokens": 3}
    equal_to_generate(spec, IDS, MASK, max_new_tokens=12, draft=draft)
    assert spec.last_stats.drafted > 0


def test_a_copied_layer_has_the_values_of_the_quantized_one():
    decoder = Decoder(int8(tiny_llama(dtype=torch.float32)))
    copied, layer = decoder.copy_layer(1), decoder.layers[1]
    weight = copied.mlp.up_proj.weight
    assert not is_quantized(weight) and weight.requires_grad
    assert torch.equal(weight, layer.mlp.up_proj.weight.dequantize())


def test_the_demo_target_in_eight_bits_takes_its_heads():
    pytest.importorskip("torchao", reason=NO_TORCHAO)
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    quantized = TorchAoConfig(Int8WeightOnlyConfig(version=2))
    spec = SelfSpecModel.from_pretrained(
        DEMO_MODEL, dtype=torch.float32, quantization_config=quantized
    )
    ids = torch.tensor([[5, 300, 21, 8]])
    own = greedy(spec.model, ids, max_new_tokens=12)
    for draft in ({"head": "shared", "exit_layer": 8}, {"head": "lens"}, {"head": "fused"}):
        assert torch.equal(spec.generate(ids, max_new_tokens=12, draft=draft), own)


# Without a library of quantization


class Packed(torch.nn.Linear):
    """A linear map in eight bits with a scale a row, in an order that it alone knows."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        rounded = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = torch.nn.Parameter(rounded.flip(0), requires_grad=False)
        self.bias = linear.bias

    @property
    def values(self):
        return self.weight.flip(0) * self.scale

    def forward(self, x):
        return torch.nn.functional.linear(x, self.values, self.bias)


@pytest.fixture
def packed():
    model = tiny_llama("sometimes", attention_bias=True)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Packed(layer.self_attn.q_proj)
    return model


def test_quantized_weights_are_left_out_of_the_fingerprint(packed, tmp_path):
    full = Decoder(tiny_llama("sometimes", attention_bias=True))
    save_heads([own_head(full, "lens", EXIT)], full, tmp_path)
    (head,) = load_heads(Decoder(packed), tmp_path)
    assert head.kind == "lens"


def test_a_copied_layer_has_the_values_of_any_linear_map(packed):
    decoder = Decoder(packed)
    own = decoder.layers[1].self_attn.q_proj
    torch.nn.init.normal_(own.bias)
    copied = decoder.copy_layer(1).self_attn.q_proj
    assert torch.equal(copied.weight, own.values) and torch.equal(copied.bias, own.bias)
    assert copied.weight.requires_grad and isinstance(own, Packed)


def test_a_layer_with_other_quantized_weights_is_not_copied(packed):
    experts = torch.nn.Parameter(torch.zeros(2, 3, 3, dtype=torch.int8), requires_grad=False)
    packed.model.layers[EXIT].mlp.experts = experts
    with pytest.raises(ValueError, match=r"mlp.experts .* is quantized \(torch.int8\)"):
        FusedHead.build(Decoder(packed), EXIT)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.int8, True)],
)
def test_what_counts_as_quantized(dtype, expected):
    assert is_quantized(torch.zeros(2, 2, dtype=dtype)) is expected
    assert is_quantized(torch.zeros(2, 2).to(torch.float8_e4m3fn))
