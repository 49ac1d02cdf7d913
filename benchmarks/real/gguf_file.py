"""Writes a Llama model and its byte-level BPE tokenizer to a GGUF file, for llama.cpp.

Names of keys and tensors are those of the GGUF specification
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TYPES = {
    torch.float32: gguf.GGMLQuantizationType.F32,
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path) -> Path:
    """Write a Llama model, matrices in its own dtype and norms in float32.

    Raises:
        ValueError: the model is not a Llama, or its dtype is neither float32 nor bfloat16.
    """
    config: Any = model.config
    if config.model_type != "llama" or model.dtype not in _TYPES:
        raise ValueError(
            f"a Llama in float32 or bfloat16 is needed, got a {config.model_type} in {model.dtype}"
        )
    writer = gguf.GGUFWriter(path, "llama")
    _write_config(writer, config)
    _write_tokenizer(writer, tokenizer)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, count in heads.items():
            if part in name:
                weight = _interleaved(weight, count)
        _write_tensor(writer, _name_of(name), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_config(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase) -> None:
    told: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())  # pyright: ignore
    special = {entry["id"] for entry in told["added_tokens"] if entry["special"]}
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [control if index in special else normal for index in range(len(tokens))]
    )
    merges = told["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    if isinstance(tokenizer.bos_token_id, int):
        writer.add_bos_token_id(tokenizer.bos_token_id)
    if isinstance(tokenizer.eos_token_id, int):
        writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)  # pyright: ignore[reportArgumentType]


def _name_of(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[part]}.{kind}"


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows in GGUF's order: rotary pairs are neighbours, not half a head apart."""
    halves = weight.view(heads, 2, weight.shape[0] // heads // 2, -1)
    return halves.transpose(1, 2).reshape(weight.shape)


def _write_tensor(writer: gguf.GGUFWriter, name: str, weight: Tensor) -> None:
    weight = weight.detach().float() if weight.ndim == 1 else weight.detach()
    kind, raw = _TYPES[weight.dtype], weight.contiguous()
    if weight.dtype == torch.float32:
        writer.add_tensor(name, raw.numpy())
        return
    data = raw.view(torch.uint8).numpy()
    writer.add_tensor(name, data, raw_dtype=kind)
