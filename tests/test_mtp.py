"""Multi-token prediction layers are found in a checkpoint, and draft what transformers' draft."""

import json

import pytest
import torch
from cli_tools import call, one_object
from conftest import VOCAB, greedy, prompt
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from selfspec import SelfSpecModel
from selfspec.bench.config import MethodConfig
from selfspec.bench.prompts import Batch
from selfspec.bench.run import make_method
from selfspec.heads import draft_states, target_states

DEPTH, WIDTH = 3, 32
IDS, MASK = prompt(4, 9, 6)
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
ROUTED = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
FAMILIES = {
    "deepseek_v3": {**ROUTED, **LATENT},
    "glm4_moe": ROUTED,
    "glm4_moe_lite": {**ROUTED, **LATENT},
    "mimo": {"model_type": "qwen2"},  # MiMo's own code is not in transformers; it is a Qwen2
    "exaone4": {"layer_types": ["full_attention"]},
    "qwen3_next": {
        **EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        "decoder_sparse_step": 1,
        **LINEAR,
    },
    "qwen3_5_text": LINEAR,
    "ernie4_5_moe": {
        "moe_intermediate_size": 16,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
}
# Published names of the parts around the layer, and the prefix of the layer itself.
MTP = ("mtp.layers.0.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"))
OUTSIDE = {
    "mimo": (
        "model.mtp_layers.0.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    ),
    "exaone4": MTP,
    "qwen3_next": MTP,
    "qwen3_5_text": MTP,
    "ernie4_5_moe": (
        "model.mtp_block.0.",
        ("mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0", None),
    ),
}
DEEPSEEK = (f"model.layers.{DEPTH}.", ("enorm", "hnorm", "eh_proj", "shared_head.norm"))


def config_of(family, layers):
    keys = {**SHAPE, **FAMILIES[family], "num_hidden_layers": layers}
    if "layer_types" in keys:
        keys["layer_types"] = (keys["layer_types"] * layers)[:layers]
    return AutoConfig.for_model(keys.pop("model_type", family), **keys)


def checkpoint(folder, family):
    """A random checkpoint whose last layer is stored as a multi-token prediction layer."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config_of(family, DEPTH + 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    block, (embedding, hidden, projection, norm) = OUTSIDE.get(family, DEEPSEEK)
    root = "mtp." if block == MTP[0] else {"ernie4_5_moe": "model."}.get(family, block)
    old = f"model.layers.{DEPTH}."
    tensors = {n.replace(old, block) if n.startswith(old) else n: t for n, t in tensors.items()}
    for name in (embedding, hidden, norm):
        if name is not None:
            tensors[f"{root}{name}.weight"] = 1 + 0.2 * torch.randn(WIDTH)
    tensors[f"{root}{projection}.weight"] = 0.2 * torch.randn(WIDTH, 2 * WIDTH)
    if family == "deepseek_v3":  # which stores copies
        tensors[f"{root}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{root}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": DEPTH, "num_nextn_predict_layers": 1, "num_mtp_layers": 1}
    for name, value in list(config.items()):
        if isinstance(value, list) and len(value) == DEPTH + 1:
            config[name] = value[:DEPTH]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def wrapped(request, tmp_path_factory):
    folder = checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    return request.param, folder, SelfSpecModel.from_pretrained(folder)


def test_a_checkpoint_drafts_with_its_own_layer_by_default(wrapped):
    _, _, spec = wrapped
    assert [(head.kind, head.exit_layer) for head in spec.heads] == [("mtp", 0)]
    own = greedy(spec.model, IDS, MASK, max_new_tokens=10)
    for draft in (None, {"num_draft_tokens": 1}, {"drafter": "tree"}, {"drafter": "auto"}):
        if draft == {"drafter": "tree"} and spec.engine.decoder.recurrent_layers:
            continue
        text = spec.generate(IDS, attention_mask=MASK, max_new_tokens=10, draft=draft)
        assert torch.equal(text, own), draft
        if draft != {"drafter": "auto"}:  # which may find drafts too slow
            assert spec.last_stats.drafted > 0


@torch.no_grad()
def test_its_drafts_are_transformers_own(wrapped):
    """transformers loads the layers of two of these families."""
    family, _, spec = wrapped
    if family not in ("deepseek_v3", "glm4_moe"):
        pytest.skip(f"transformers has no multi-token prediction for {family}")
    # Where transformers looks: at the depths of published checkpoints.
    spec.model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{DEPTH}\..*"]
    theirs = MtpModel.from_pretrained(spec.model).eval()
    tokens = IDS[1:2]
    decoder, (head,) = spec.engine.decoder, spec.heads
    last = spec.model.model(tokens).last_hidden_state
    positions = torch.arange(1, tokens.shape[1])[None]
    embedded = spec.model.get_input_embeddings()(tokens[:, 1:])
    layer = theirs.layers[0]
    rotary = spec.model.model.rotary_emb(embedded, positions)
    expected = layer(embedded, last[:, :-1], rotary, None, positions, None)
    known = target_states(decoder, tokens, None, head.input_layers)
    (state, *_) = draft_states(decoder, head, known, 2)
    logits = head.logits(decoder, state)[:, 1:]
    torch.testing.assert_close(logits, spec.model.lm_head(expected), rtol=1e-4, atol=1e-4)


def test_transformers_own_is_a_peer_of_the_benchmark(wrapped, monkeypatch):
    family, _, spec = wrapped
    method = MethodConfig(name="HF use_mtp", peer="use_mtp")
    if family not in ("deepseek_v3", "glm4_moe"):
        monkeypatch.delattr(spec.engine.decoder.config, "num_mtp_layers", raising=False)
        with pytest.raises(ValueError, match="where the config names num_mtp_layers"):
            make_method(spec, method)
        return
    patterns = [rf"model\.layers\.{DEPTH}\..*"]
    monkeypatch.setattr(spec.model, "_keys_to_ignore_on_load_unexpected", patterns)
    ids = IDS[1:2]
    batch = Batch.of(ids)
    written = make_method(spec, method)(batch, {"max_new_tokens": 8, "do_sample": False}, 0)
    own = greedy(spec.model, ids, max_new_tokens=8)
    assert written.texts == own[:, ids.shape[1] :].tolist()


def test_what_is_fed_back(wrapped):
    family, _, spec = wrapped
    raw = family in ("glm4_moe", "glm4_moe_lite", "ernie4_5_moe")
    assert spec.heads[0].options["feeds_normed"] is not raw


def test_info_names_what_was_found(wrapped):
    _, folder, _ = wrapped
    facts = one_object(call("info", "--model", folder, "--json"))
    assert [head["kind"] for head in facts["exit_heads"]] == ["mtp"]
    assert facts["default_draft"]["head"] == "mtp"


def test_the_head_is_saved_with_the_target(wrapped, tmp_path):
    _, _, spec = wrapped
    spec.save_pretrained(tmp_path)
    again = SelfSpecModel.from_pretrained(tmp_path)
    (one,), (other,) = spec.heads, again.heads
    assert one.options == other.options
    weights = other.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in one.state_dict().items())


def test_heads_that_are_given_go_before(wrapped):
    _, folder, _ = wrapped
    assert SelfSpecModel.from_pretrained(folder, heads=[]).heads == []


def test_a_layer_that_cannot_be_read_is_left_out_with_the_reason(tmp_path):
    folder = checkpoint(tmp_path, "mimo")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.mtp_layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"mtp_layers.0.\* of .* is not used: .*up_proj"):
        spec = SelfSpecModel.from_pretrained(folder)
    assert spec.heads == []
