"""A decoder layer of Llama's or Qwen3's architecture, whatever the target's architecture is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from selfspec.config import unknown_name
from selfspec.decoder import Decoder, StandaloneLayer

_CONFIGS: dict[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
_ATTENTION: dict[str, type[nn.Module]] = {"llama": LlamaAttention, "qwen3": Qwen3Attention}
_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
)


def layer_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a model's config that a layer needs, with transformers' defaults filled in.

    Raises:
        ValueError: the architecture is neither Llama's nor Qwen3's, or a value does not fit.
    """
    kind = raw.get("model_type", "llama")
    if kind not in _CONFIGS:
        raise ValueError(unknown_name("architecture of a head's layer", str(kind), list(_CONFIGS)))
    try:
        config = _CONFIGS[kind](**{k: v for k, v in raw.items() if k != "model_type"})
    except (TypeError, ValueError) as error:
        raise ValueError(f"the config of the head's layer is not valid: {error}") from None
    values = config.to_dict()
    if values["hidden_act"] not in ACT2FN:
        raise ValueError(f"the head's layer has an unknown activation: {values['hidden_act']!r}")
    return {key: values[key] for key in _KEYS if key in values}


def layer_config_like(decoder: Decoder) -> dict[str, Any]:
    """The config of a layer with the sizes of the target's own layers."""
    config = decoder.config
    width, heads = config.hidden_size, config.num_attention_heads
    own = {key: value for key in _KEYS if (value := getattr(config, key, None)) is not None}
    rope = own.pop("rope_parameters", None) or {}
    plain = {"rope_type", "rope_theta"} <= rope.keys() and "partial_rotary_factor" not in rope
    theta = rope.get("rope_theta", 10_000.0)
    own |= {
        "model_type": config.model_type if config.model_type in _CONFIGS else "llama",
        "head_dim": own.get("head_dim", width // heads),
        "intermediate_size": own.get("intermediate_size", 4 * width),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": rope if plain else {"rope_type": "default", "rope_theta": theta},
    }
    return layer_config(own)


class _Rotary(LlamaRotaryEmbedding):
    """A rotary embedding whose frequencies keep their precision when the head is cast."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        exact = self.inv_freq
        super()._apply(fn, recurse)
        self.inv_freq = exact.to(self.inv_freq.device)
        return self


class LlamaLayer(StandaloneLayer):
    """Attention and an MLP; subclasses say what attention reads, and where the residual starts.

    Args:
        config: what `layer_config` returns.
        place: index of the cache's layer that it writes.
        inputs: width of what attention reads, in hidden sizes.
    """

    def __init__(self, config: Mapping[str, Any], place: int, inputs: int = 1):
        super().__init__()
        kind = config["model_type"]
        made: Any = _CONFIGS[kind](**{k: v for k, v in config.items() if k != "model_type"})
        made._attn_implementation = "sdpa"
        self.width, eps = made.hidden_size, made.rms_norm_eps
        self.self_attn: Any = _ATTENTION[kind](made, place)
        if inputs > 1:
            for name in ("q_proj", "k_proj", "v_proj"):
                old = getattr(self.self_attn, name)
                new = nn.Linear(inputs * self.width, old.out_features, bias=old.bias is not None)
                setattr(self.self_attn, name, new)
        if kind == "qwen3":
            made.mlp_bias = False
        self.mlp = LlamaMLP(made)
        self.post_attention_layernorm = LlamaRMSNorm(self.width, eps)
        self.rotary = _Rotary(made)

    def attend(
        self,
        normed: Tensor,
        residual: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        past_key_values: Cache | None,
    ) -> Tensor:
        """Output `[rows, width, hidden]` of attention over `normed` and of the MLP."""
        attended, _ = self.self_attn(
            hidden_states=normed,
            position_embeddings=self.rotary(normed, position_ids),
            attention_mask=attention_mask,
            past_key_values=past_key_values,
        )
        residual = residual + attended
        return residual + self.mlp(self.post_attention_layernorm(residual))
