"""Random checkpoints with a multi-token prediction layer, stored as each family publishes it."""

from __future__ import annotations

import json

import torch
from conftest import VOCAB
from families import skip_if_too_old
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

DEPTH, WIDTH = 3, 32
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
    skip_if_too_old(model)
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


MIMO, GLM = "model.mtp_layers.0.", DEEPSEEK[0]


def split(folder, root, file, named=True):
    """Move the layer into a file of its own, which an index names or leaves out."""
    tensors = load_file(folder / "model.safetensors")
    layer = {name: tensors.pop(name) for name in [*tensors] if name.startswith(root)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(layer, folder / file, metadata={"format": "pt"})
    places = dict.fromkeys(tensors, "model.safetensors")
    places |= dict.fromkeys(layer, file) if named else {}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
