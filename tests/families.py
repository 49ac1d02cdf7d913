"""Tiny random models of every family that selfspec promises to run, built from configs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    PreTrainedModel,
)

from selfspec.decoder import Decoder

LAYERS = 5
VOCAB = 61
WINDOW = 7

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_SLIDING = {"sliding_window": WINDOW}
_MIXED = {
    **_SLIDING,
    "layer_types": [f"{kind}_attention" for kind in ("sliding full sliding full sliding".split())],
}
_GPT = {"n_embd": 32, "n_head": 4, "n_layer": LAYERS, "n_positions": 96, "n_inner": 48}
_ROTARY_8 = {"rotary_dim": 4}

# What each family needs beside the common values. Keys that a config does not know are dropped.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": _SLIDING,
    "qwen2": {"use_sliding_window": True, **_MIXED},
    "qwen3": {"use_sliding_window": True, **_MIXED},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 8, **_MIXED},
    "gemma3_text": {"query_pre_attn_scalar": 8, **_MIXED},
    "phi": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "phi3": _SLIDING,
    "gpt2": _GPT,
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt_neo": {
        "num_layers": LAYERS,
        "num_heads": 4,
        "attention_types": [[["local", "global"], 2], [["local"], 1]],
        "window_size": WINDOW,
    },
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": {"multi_query": True, "alibi": False},
    "falcon_alibi": {"multi_query": False, "new_decoder_architecture": False, "alibi": True},
    "bloom": {"n_layer": LAYERS, "n_head": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": LAYERS, "max_seq_len": 96},
    "gptj": {**_GPT, **_ROTARY_8},
    "codegen": {**_GPT, **_ROTARY_8, "n_ctx": 96},
    "stablelm": {"partial_rotary_factor": 0.5},
    "olmo": {},
    "olmo2": {},
    "olmo3": _MIXED,
    "cohere": {},
    "cohere2": _MIXED,
    "starcoder2": _SLIDING,
    "mixtral": {**_MOE, **_SLIDING},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 2},
    "qwen3_moe": {**_MOE, "decoder_sparse_step": 2},
    "gpt_oss": {**_MOE, **_MIXED},
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    "granitemoe": _MOE,
    "nemotron": {"partial_rotary_factor": 0.5},
    "persimmon": {"partial_rotary_factor": 0.5},
    "smollm3": {},
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "exaone4": _MIXED,
    "ministral": _MIXED,
    "helium": {},
    "gpt_bigcode": {**_GPT, "multi_query": True},
    "biogpt": {},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": LAYERS, "attention_heads": 4},
    "arcee": {},
    "apertus": {},
    "seed_oss": {},
    "ernie4_5": {},
    "hunyuan_v1_dense": {},
    "bitnet": {},
    "nanochat": {},
    "olmoe": _MOE,
    "phimoe": _MOE,
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
}
_VARIANTS = {"falcon_alibi": "falcon"}

_KINDS = "linear full linear linear full"
_LINEAR = [f"{kind}_attention" for kind in _KINDS.split()]
_CONV = [kind.replace("linear_attention", "conv") for kind in _LINEAR]
_DELTA_NET = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": _LINEAR,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
_SHARED = {"shared_expert_intermediate_size": 24}

# Families with recurrent layers, in the same way.
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_MOE, **_DELTA_NET, **_SHARED, "decoder_sparse_step": 2},
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": {**_MOE, **_DELTA_NET, **_SHARED},
    "olmo_hybrid": _DELTA_NET,
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "lfm2": {"layer_types": _CONV, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**_MOE, "layer_types": _CONV, "num_dense_layers": 1},
    "granitemoehybrid": {
        **_MOE,
        **_MAMBA,
        "shared_intermediate_size": 24,
        "layer_types": _LINEAR,
        "position_embedding_type": "rope",
    },
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "layers_block_type": [*_LINEAR[:2], "mlp", "linear_attention", "moe"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 4]},
    "zamba2": {
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "chunk_size": 16,
        "layers_block_type": [kind.replace("full_attention", "hybrid") for kind in _LINEAR],
        "num_mem_blocks": 1,
        "use_mem_rope": True,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "jamba": {
        **_MOE,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "minimax": {**_MOE, "block_size": 8, "layer_types": _LINEAR},
}

# One family of each kind of recurrence: gated delta rule, Mamba-2, convolution, Mamba, lightning.
RECURRENT = ("qwen3_next", "falcon_h1", "lfm2", "jamba", "minimax")


def build(family: str, attention: str, agreement: float = 1.0, seed: int = 0) -> PreTrainedModel:
    """A random model of `family`.

    Args:
        family: a key of `FAMILIES` or `HYBRIDS`.
        attention: `"eager"` or `"sdpa"`.
        agreement: factor on what the upper half of the layers adds to the residual stream: 1 is a
            plain random model, whose exits rarely agree with it; 0 makes every exit in the upper
            half say what the model says.
        seed: seed of the weights.
    """
    config_class = CONFIG_MAPPING[_VARIANTS.get(family, family)]
    own = FAMILIES.get(family) or HYBRIDS.get(family, {})
    wanted = {**_COMMON, **own}
    known = set(config_class().to_dict()) | set(config_class.attribute_map) | set(own)
    config = config_class(**{key: value for key, value in wanted.items() if key in known})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    skip_if_too_old(model)
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    with torch.no_grad():
        for parameter in model.parameters():
            # Random enough that greedy decoding does not settle on one token; a tied model with
            # large embeddings would repeat its input.
            if parameter.ndim >= 2 and parameter.is_floating_point():
                small = tied or parameter is not embedding
                parameter.normal_(0, 0.25 if small else 0.6)
    _damp(model, agreement)
    return model.eval()


def skip_if_too_old(model: PreTrainedModel) -> None:
    """Skip a test whose model has recurrent layers that need a newer transformers.

    Before 5.21 MiniMax alone has a cache that it asks for its states.
    """
    if hasattr(Cache, "get_conv_state") or model.config.model_type == "minimax":
        return
    layers = DynamicCache(config=model.config).layers
    if any("LinearAttention" in type(layer).__name__ for layer in layers):
        pytest.skip("selfspec runs these recurrent layers with transformers 5.21 or newer")


def _damp(model: PreTrainedModel, factor: float) -> None:
    def damped(layer: Any, args: Any, kwargs: Any, output: Any) -> Any:
        before = args[0] if args else kwargs["hidden_states"]
        after = output[0] if isinstance(output, tuple) else output
        mixed = before + factor * (after - before)
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

    if factor != 1.0:
        for layer in Decoder(model).layers[LAYERS // 2 :]:
            layer.register_forward_hook(damped, with_kwargs=True)


# Their expert kernels, or constants, have no double precision.
FLOAT32 = {"mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "granitemoe", "olmoe", "phimoe"} | {
    "deepseek_v3",
    "xglm",
}
# These families' own code offers eager attention only.
EAGER_ONLY = {"gemma2", "gpt_neo", "bloom", "mpt", "gptj", "codegen", "gpt_oss", "xglm"}
CASES = [
    (family, attention)
    for family in FAMILIES
    for attention in ("eager", "sdpa")
    if attention == "eager" or family not in EAGER_ONLY
]
NEW_TOKENS = 12
LENGTHS = (5, 2 * WINDOW + 3, WINDOW + 1)
ALL_ROWS, LONG_ROW = slice(0, 3), slice(1, 2)
# The attention that a family uses by default.
CASES_BY_FAMILY = dict(CASES)


def model_of(family: str, attention: str, agreement: float = 1.0) -> Any:
    """A model in the most precise dtype that the family allows."""
    model = build(family, attention, agreement)
    return model if family in FLOAT32 else model.double()


def prompts(side: str = "left", lengths: Sequence[int] = LENGTHS) -> tuple[Tensor, Tensor]:
    """Three rows of different lengths, one longer than two sliding windows."""
    width = max(lengths)
    texts = torch.randint(2, VOCAB, (3, width), generator=torch.Generator().manual_seed(3))
    tokens, mask = torch.zeros_like(texts), torch.zeros_like(texts)
    for row, length in enumerate(lengths):
        place = slice(width - length, None) if side == "left" else slice(length)
        tokens[row, place], mask[row, place] = texts[row, :length], 1
    return tokens, mask


def own_text(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    """What the model's own generate writes behind each row, one row at a time, unpadded."""
    rows = [row[real.bool()][None] for row, real in zip(tokens, mask, strict=True)]
    texts = [model.generate(row, max_new_tokens=NEW_TOKENS, do_sample=False) for row in rows]
    return torch.cat([text[:, -NEW_TOKENS:] for text in texts])
