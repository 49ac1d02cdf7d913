"""Random models of any shape, for what depends on shape alone."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from selfspec.heads import ExitHead, head_class
from selfspec.model import SelfSpecModel

_HEADS = 4


def tiny_target(width: int, depth: int, positions: int, head: str | None = None) -> SelfSpecModel:
    """A random Llama that ends no text, with an exit head behind a quarter of its layers.

    Args:
        width: of its residual stream, a multiple of 4.
        depth: its layers.
        positions: that it is made for.
        head: kind of the head, as it is before any training; `None` for none.
    """
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=depth,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS // 2,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        spec = SelfSpecModel(LlamaForCausalLM(config).eval())
        heads: list[ExitHead] = []
        if head is not None:
            heads.append(head_class(head).build(spec.engine.decoder, max(1, depth // 4)).eval())
    return SelfSpecModel(spec.model, heads)
