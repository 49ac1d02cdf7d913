"""Prepacked linear maps: the same bits, whatever happens to the weights, and no trace."""

import copy
import gc
import json
import pickle
import weakref
from functools import partial

import pytest
import torch
from cli_tools import PROMPT, call
from conftest import gates, greedy_logits, prompt, tiny_llama
from families import FAMILIES, LAYERS, VOCAB, build
from head_tools import own_head
from peft import LoraConfig, get_peft_model

from selfspec import SelfSpecModel
from selfspec.decoder import Decoder, Packing, Span
from selfspec.decoder.kernels import prepacked
from selfspec.decoder.kernels.lean import lean_forwards
from selfspec.heads import save_heads

HALF = torch.bfloat16
DRAFTS = ("none", {"exit_layer": 2, "num_draft_tokens": 3}, "prompt_lookup")

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="this CPU has no kernels of oneDNN for bfloat16; those of FBGEMM: test_fbgemm.py",
)


@pytest.fixture(autouse=True)
def no_lean_forms(monkeypatch):
    """They round less often, see test_lean_forms.py."""
    monkeypatch.setattr("selfspec.decoder.gates.lean_forwards", lambda *args: ())


@pytest.fixture(autouse=True)
def by_onednn_alone(monkeypatch):
    """FBGEMM's sums have another order, see test_fbgemm.py."""
    monkeypatch.setattr(prepacked.fbgemm, "is_faster", lambda: False)


logits = partial(greedy_logits, vocab=VOCAB)


def eager(model, *lengths, heads=(), **options):
    """The same logits by the model's own linear maps."""
    return logits(SelfSpecModel(model, heads=heads, kernels="eager"), *lengths, **options)


def packed(spec):
    """What of the model is held packed: of maps that are one product, the first."""
    return [m for m in spec.model.modules() if m in prepacked._PACKED]


# Linear maps with and without bias, gpt2's transposed ones, experts, norms of queries and keys,
# joined queries, keys and values.
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "qwen3", "mixtral", "phi3", "opt"])
@pytest.mark.parametrize("lengths", [(6,), (9, 5, 2)])
def test_logits_are_the_same_to_the_bit(family, lengths):
    model = build(family, "sdpa").to(HALF)
    spec = SelfSpecModel(model, kernels="prepacked")
    for draft in DRAFTS:
        made = logits(spec, *lengths, draft=draft)
        assert torch.equal(made, eager(model, *lengths, draft=draft))
    assert packed(spec)


# For some shapes torch takes a product that is not oneDNN's, which rounds differently.
@pytest.mark.matrix(share=4)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_the_same(family):
    model = build(family, "eager").to(HALF)
    spec = SelfSpecModel(model, kernels="prepacked")
    expected, made = eager(model, 9, 5, 2, new_tokens=1), logits(spec, 9, 5, 2, new_tokens=1)
    assert packed(spec)
    torch.testing.assert_close(made, expected, rtol=2**-5, atol=2**-5 * expected.abs().max().item())


def test_maps_of_the_same_states_are_one_product(monkeypatch):
    model, widths = tiny_llama(dtype=HALF), []
    linear = prepacked._OPS._linear_pointwise

    def counted(x, weight, *rest):
        made = linear(x, weight, *rest)
        widths.append(made.shape[-1])
        return made

    monkeypatch.setattr(prepacked._OPS, "_linear_pointwise", counted)
    logits(SelfSpecModel(model, kernels="prepacked"), 6, vocab=64, new_tokens=1)
    layer = model.model.layers[0]
    together = layer.self_attn.q_proj.out_features + 2 * layer.self_attn.k_proj.out_features
    wanted = [together, layer.self_attn.o_proj.out_features, 2 * layer.mlp.up_proj.out_features]
    assert widths[:3] == wanted and len(widths) == 4 * len(model.model.layers) + 1


def test_a_map_that_is_called_with_other_states_is_right():
    joined = torch.nn.Module()
    joined.gate_proj, joined.up_proj = (torch.nn.Linear(8, 6, dtype=HALF) for _ in range(2))
    made = dict(prepacked.PrepackedLinears("it").forwards(joined))
    first, other = torch.randn(2, 3, 8).to(HALF)
    with torch.no_grad():
        for module, x in [
            (joined.up_proj, first),
            (joined.gate_proj, other),
            (joined.up_proj, first),
        ]:
            assert torch.equal(made[module](x), module(x))


def test_heads_are_packed_too():
    model = tiny_llama("sometimes", dtype=HALF)
    head = own_head(Decoder(model), "fused", 0)
    spec = SelfSpecModel(model, heads=[head], kernels="prepacked")
    draft = {"head": "fused", "exit_layer": 0, "num_draft_tokens": 3}
    written = logits(spec, 6, draft=draft, vocab=64)
    drafted = spec.last_trace
    assert torch.equal(written, eager(model, 6, heads=[head], draft=draft, vocab=64))
    assert head.entry in prepacked._PACKED and head.layer.mlp.gate_proj in prepacked._PACKED
    assert drafted is not None and spec.last_stats.drafted


def test_a_draft_model_is_packed_too():
    other = tiny_llama("always", dtype=HALF, seed=3)
    spec = SelfSpecModel(tiny_llama(dtype=HALF), draft_model=other, kernels="prepacked")
    logits(spec, 6, draft="two_model", vocab=64)
    assert other.model.layers[0].mlp.gate_proj in prepacked._PACKED


def all_but_a_column(weight):
    weight.data[:, 1:] = 0  # torch does not count what goes through .data


def one_number(weight):
    weight.data[3, 5] += 2


def two_numbers_changed_places(weight):
    weight.data[3] = weight.data[3].flip(0)


def a_step_of_a_fused_optimizer(weight):
    optimizer = torch.optim.AdamW([weight], lr=1e-2, fused=True)  # nor does it count these
    weight.grad = torch.ones_like(weight)
    optimizer.step()


def another_tensor(weight):
    weight.set_(weight * 2)


CHANGES = (
    all_but_a_column,
    one_number,
    two_numbers_changed_places,
    a_step_of_a_fused_optimizer,
    another_tensor,
)


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_change_between_calls_are_packed_anew(change):
    model = tiny_llama("sometimes", dtype=HALF)
    spec = SelfSpecModel(model, kernels="prepacked")
    before = logits(spec, 6, vocab=64)
    with torch.no_grad():
        change(model.model.layers[1].mlp.up_proj.weight)
    after = logits(spec, 6, vocab=64)
    assert not torch.equal(before, after)
    assert torch.equal(after, eager(model, 6, vocab=64))


def test_an_interrupt_while_packing_leaves_the_model_as_it_was(monkeypatch):
    model, seen = tiny_llama("sometimes", dtype=HALF), []
    names = [set(vars(module)) for module in model.modules()]
    spec, pack = SelfSpecModel(model, kernels="prepacked"), prepacked._pack

    def interrupted(modules, both):
        seen.append(modules)
        if len(seen) == 5:
            raise KeyboardInterrupt
        return pack(modules, both)

    monkeypatch.setattr(prepacked, "_pack", interrupted)
    with pytest.raises(KeyboardInterrupt):
        logits(spec, 6, vocab=64)
    assert [set(vars(module)) for module in model.modules()] == names
    assert torch.equal(logits(spec, 6, vocab=64), eager(model, 6, vocab=64))


def test_adapters_are_merged_and_taken_out():
    config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    adapted = get_peft_model(tiny_llama("sometimes", dtype=HALF), config).eval()
    spec = SelfSpecModel(adapted, kernels="prepacked")
    for step in (lambda: None, adapted.merge_adapter, adapted.unmerge_adapter):
        step()
        assert torch.equal(logits(spec, 6, vocab=64), eager(adapted, 6, vocab=64))


def test_maps_that_leave_and_join_a_product_are_packed_anew():
    model = tiny_llama("sometimes", dtype=HALF)
    spec = SelfSpecModel(model, kernels="prepacked")

    def is_right():
        return torch.equal(logits(spec, 6, vocab=64), eager(model, 6, vocab=64))

    assert is_right()
    config = LoraConfig(r=2, target_modules=["k_proj", "up_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, config).eval()  # queries are now projected alone
    assert is_right()
    adapted.merge_and_unload()
    assert is_right()
    output = model.model.layers[1].self_attn.o_proj
    output.bias = torch.nn.Parameter(torch.ones(32, dtype=HALF))
    assert is_right()


def test_nothing_stays_on_the_model():
    model = tiny_llama(dtype=HALF)
    names = [set(vars(module)) for module in model.modules()]
    logits(SelfSpecModel(model, kernels="prepacked"), 6, vocab=64)
    assert [set(vars(module)) for module in model.modules()] == names and not gates(model)


def test_wrappers_of_one_model_share_what_is_packed():
    model = tiny_llama(dtype=HALF)
    held = []
    for _ in range(2):
        spec = SelfSpecModel(model, kernels="prepacked")
        logits(spec, 6, vocab=64)
        held.append([prepacked._PACKED[module].weight for module in packed(spec)])
    assert held[0] and all(a is b for a, b in zip(*held, strict=True))


def test_gradients_flow():
    model = tiny_llama(dtype=HALF)
    decoder = Decoder(model, "prepacked")
    tokens = torch.arange(6)[None]
    left = decoder.run_packed(tokens, Span(0, 2), Packing.of(torch.zeros(1, 6, dtype=torch.long)))
    left.hidden.float().sum().backward()
    layer = model.model.layers[0]
    for part in (layer.self_attn.q_proj, layer.input_layernorm):  # whose form is a lean one
        assert part.get_parameter("weight").grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_cannot_be_packed_runs_as_it_is_and_says_so_once(dtype):
    model = tiny_llama("sometimes", dtype=dtype)
    spec = SelfSpecModel(model, kernels="prepacked")
    with pytest.warns(UserWarning, match="nothing of LlamaForCausalLM can be prepacked") as told:
        written = [logits(spec, 6, vocab=64) for _ in range(2)]
    assert len(told) == 1 and not packed(spec)
    assert torch.equal(written[0], eager(model, 6, vocab=64))


def test_other_kernels_are_refused():
    with pytest.raises(ValueError, match=r"kernels must be one of .*prepacked.*, got 'fast'"):
        SelfSpecModel(tiny_llama(), kernels="fast")


def test_the_command_line_packs(folder):
    options = ("--model", folder, "--dtype", "bfloat16", "--max-new-tokens", "6", "--json")
    results = [
        json.loads(call("generate", PROMPT, *options, "--kernels", kernels).stdout)
        for kernels in ("eager", "prepacked")
    ]
    plain, text = (result["results"][0]["text"] for result in results)
    assert text == plain and [result["kernels"] for result in results] == ["eager", "prepacked"]


# Full attention, sliding windows, and norms of queries and keys.
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "mixtral", "phi3"])
def test_heads_that_share_keys_attend_to_them_together(family, monkeypatch):
    model, calls = build(family, "sdpa").to(HALF), []
    expected = eager(model, 6)
    attend = torch.nn.functional.scaled_dot_product_attention

    def counted(query, key, value, **options):
        calls.append((query.shape[1] // key.shape[1], query.shape[2]))
        return attend(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    made = logits(SelfSpecModel(model, kernels="prepacked"), 6)
    after_prefill = calls[LAYERS:]
    assert after_prefill and set(after_prefill) == {(1, 2)}  # of two heads with the same keys
    torch.testing.assert_close(made, expected, rtol=2**-5, atol=2**-5 * expected.abs().max().item())


@pytest.mark.parametrize(
    ("family", "attention", "dtype"),
    [("gpt2", "sdpa", HALF), ("llama", "eager", HALF), ("llama", "sdpa", torch.float32)],
)
def test_one_token_needs_no_mask_elsewhere(family, attention, dtype):
    model = build(family, attention).to(dtype)
    assert not prepacked.joins_heads(model)
    assert prepacked.joins_heads(build("llama", "sdpa").to(HALF))


def test_auto_packs_what_can_be_packed_and_fits(monkeypatch):
    half, whole = tiny_llama().to(HALF), tiny_llama()
    assert Decoder(half).kernels == "prepacked" and Decoder(whole).kernels == "direct"
    with torch.device("meta"):
        assert Decoder(tiny_llama()).kernels == "direct"
    layers = [m for m in half.modules() if isinstance(m, torch.nn.Linear)]
    size = sum(layer.weight.nbytes for layer in layers)

    def left(available):
        memory = type("Memory", (), {"available": available})
        monkeypatch.setattr(prepacked.psutil, "virtual_memory", lambda: memory)
        return Decoder(half).kernels

    assert left(2 * size) == "prepacked" and left(size) == "direct"


# In place


@pytest.fixture
def in_place():
    """A model whose weights are held packed only, and its logits before."""
    model = tiny_llama("sometimes", dtype=HALF)
    before = logits(SelfSpecModel(model, kernels="prepacked"), 6, vocab=64)
    prepacked.prepack_(model)
    return model, before


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "qwen3", "mixtral", "opt"])
@pytest.mark.parametrize("lean", [False, True])
def test_packed_in_place_a_model_computes_the_same_in_less_memory(family, lean, monkeypatch):
    model = build(family, "sdpa").to(HALF)
    if lean:
        monkeypatch.setattr("selfspec.decoder.gates.lean_forwards", lean_forwards)
    spec = SelfSpecModel(model, kernels="prepacked")
    before = [logits(spec, 9, 5, 2, draft=draft) for draft in DRAFTS]
    held = {id(m): weakref.ref(m.weight) for m in packed(spec) if m is not spec.decoder.lm_head}
    prepacked.prepack_(model)
    gc.collect()
    assert held and all(weight() is None for weight in held.values())
    for one in (spec, SelfSpecModel(model)):
        after = [logits(one, 9, 5, 2, draft=draft) for draft in DRAFTS]
        assert all(map(torch.equal, after, before))
        assert len(packed(one)) <= 1  # the LM head's


def test_packed_in_place_the_model_generates_by_itself(in_place):
    model, before = in_place
    (ids, mask), options = prompt(6), {"max_new_tokens": 14, "do_sample": False}
    told = {"return_dict_in_generate": True, "output_logits": True}
    out = model.generate(ids, attention_mask=mask, **options, **told)
    assert torch.equal(torch.stack(out.logits), before)


def test_weights_that_others_have_too_stay_as_they_are():
    model = tiny_llama("sometimes", dtype=HALF)
    one, other = (layer.mlp.up_proj for layer in model.model.layers[:2])
    other.weight = one.weight
    prepacked.prepack_(model)
    kept = {n for n, weight in model.named_parameters() if type(weight) is torch.nn.Parameter}
    assert {"model.layers.0.mlp.up_proj.weight", "lm_head.weight"} <= kept
    assert "model.layers.0.mlp.down_proj.weight" not in kept


def test_heads_load_for_a_model_that_is_packed_in_place(in_place, tmp_path):
    whole = tiny_llama("sometimes", dtype=HALF)
    head = own_head(Decoder(whole), "lens", 2)
    save_heads([head], Decoder(whole), tmp_path)
    draft = {"head": "lens", "exit_layer": 2, "num_draft_tokens": 3}
    written, expected = (
        logits(SelfSpecModel(model, heads=tmp_path, kernels="prepacked"), 6, draft=draft, vocab=64)
        for model in (in_place[0], whole)
    )
    assert torch.equal(written, expected)


def trained(model, folder):
    ids, _ = prompt(6)
    model(ids, labels=ids).loss.backward()


def saved(model, folder):
    model.save_pretrained(folder)


def saved_with_heads(model, folder):
    SelfSpecModel(model).save_pretrained(folder)


def copied(model, folder):
    copy.deepcopy(model)


def pickled(model, folder):
    pickle.dumps(model)


def in_another_dtype(model, folder):
    model.to(torch.float32)


def loaded_into(model, folder):
    model.load_state_dict(tiny_llama("sometimes", dtype=HALF).state_dict())


def with_another_weight(model, folder):
    linear = model.model.layers[0].mlp.down_proj
    linear.weight = torch.nn.Parameter(torch.zeros(linear.out_features, linear.in_features))
    logits(SelfSpecModel(model), 6, vocab=64)


def changed(model, folder):
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(2)


def adapted(model, folder):
    merged = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(model, merged).merge_and_unload()


def a_head_starts_from_a_layer(model, folder):
    own_head(Decoder(model), "block", 2)


REFUSED = (
    trained,
    saved,
    saved_with_heads,
    copied,
    pickled,
    in_another_dtype,
    loaded_into,
    with_another_weight,
    changed,
    adapted,
    a_head_starts_from_a_layer,
)


@pytest.mark.parametrize("use", REFUSED)
def test_packed_in_place_a_model_does_nothing_else(use, in_place, tmp_path):
    with pytest.raises(RuntimeError, match="prepack_ has packed the weights of this model"):
        use(in_place[0], tmp_path)


def test_packed_in_place_layers_have_no_low_precision_copies(in_place):
    spec = SelfSpecModel(in_place[0])
    draft = {"exit_layer": spec.decoder.depth, "precision": "int8"}
    with pytest.raises(ValueError, match="a weight is quantized already"):
        logits(spec, 6, draft=draft, vocab=64)


def test_what_cannot_be_packed_in_place_is_refused(in_place):
    for model in (in_place[0], tiny_llama()):
        with pytest.raises(ValueError, match="nothing of LlamaForCausalLM can be packed in place"):
            prepacked.prepack_(model)
    adapters = LoraConfig(r=2, target_modules=["q_proj"])
    with pytest.raises(ValueError, match="merge them first"):
        prepacked.prepack_(get_peft_model(tiny_llama(dtype=HALF), adapters))
