"""Writes a Llama model and its byte-level BPE tokenizer to a GGUF file, for llama.cpp."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TYPES = {
    torch.float32: gguf.GGMLQuantizationType.F32,
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
}


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
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, count in heads.items():
            if part in name:
                weight = _interleaved(weight, count)
        weight = (weight.float() if weight.ndim == 1 else weight).detach().contiguous()
        kind, is_wide = _TYPES[weight.dtype], weight.dtype == torch.float32
        data = (weight if is_wide else weight.view(torch.uint8)).numpy()
        published = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(str(published), data, raw_dtype=None if is_wide else kind)
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
    added: Any = tokenizer.added_tokens_decoder
    special = {index for index, token in added.items() if token.special}
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([control if at in special else normal for at in range(len(tokens))])
    writer.add_add_bos_token(False)
    with TemporaryDirectory() as folder:  # merges, the ids of special tokens, the chat template
        tokenizer.save_pretrained(folder)
        gguf.SpecialVocab(folder, load_merges=True).add_to_gguf(writer, quiet=True)


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows in GGUF's order: rotary pairs are neighbours, not half a head apart."""
    halves = weight.view(heads, 2, weight.shape[0] // heads // 2, -1)
    return halves.transpose(1, 2).reshape(weight.shape)
