"""A decoder layer of Llama's or Qwen3's architecture, whatever the target's architecture is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm4_moe.modeling_glm4_moe import (
    Glm4MoeAttention,
    Glm4MoeRotaryEmbedding,
)
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from typing_extensions import Self

from selfspec.config import JsonObject, Options, unknown_name
from selfspec.decoder import Decoder, StandaloneLayer, cache_name

_KINDS = ("llama", "qwen3")
_READERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_CACHE = cache_name(Glm4MoeAttention.forward)
ATTENTION_MAPS = (*_READERS, "self_attn.o_proj")
MLP_MAPS = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_KEYS = ("model_type", *_SIZES, "hidden_act", "rms_norm_eps", "rope_parameters", "biases")
# Names under which others know a type of rotary embedding. With mrope (Qwen2-VL), a token of a text
# has the same position on each axis, which is the ordinary embedding.
_ROPE_NAMES = {"su": "longrope", "mrope": "default"}
# What transformers raises for parameters that are missing or of another type.
_REFUSALS = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
_SCALED_ROPES = ("longrope", "yarn", "llama3")


def layer_config(raw: JsonObject) -> JsonObject:
    """The keys of a model's config that a layer needs, with transformers' defaults filled in.

    `biases` names the linear maps that have one, such as `self_attn.q_proj`. Where it is absent,
    `attention_bias` and `mlp_bias` mean all maps of the attention and of the MLP.

    Raises:
        ValueError: the architecture is neither Llama's nor Qwen3's, a size is absent, or a value
            does not fit.
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f"the option `layer` holds the keys of a config, got {raw!r}")
    kind = raw.get("model_type", "llama")
    if kind not in _KINDS:
        raise ValueError(unknown_name("architecture of a head's layer", str(kind), list(_KINDS)))
    given = {key: raw[key] for key in _KEYS if raw.get(key) is not None}
    values: JsonObject = {
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": given.get("num_attention_heads"),
        **given,
        "model_type": kind,
        "biases": _biases(raw),
        "rope_parameters": _rope(raw),
    }
    _check_values(values)
    values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    values["rope_parameters"] = dict(_checked_rope(values))
    return {key: values[key] for key in _KEYS}


def _biases(raw: JsonObject) -> list[str]:
    given = raw.get("biases")
    if given is None:
        attention = ATTENTION_MAPS if raw.get("attention_bias") else ()
        given = [*attention, *(MLP_MAPS if raw.get("mlp_bias") else ())]
    for name in given:
        if name not in (*ATTENTION_MAPS, *MLP_MAPS):
            known = [*ATTENTION_MAPS, *MLP_MAPS]
            raise ValueError(unknown_name("linear map of a head's layer", str(name), known))
    return list(given)


def _check_values(values: JsonObject) -> None:
    """Raise ValueError, naming the key, for a size that is absent or a value that does not fit."""
    for key in _SIZES:
        if key == "head_dim" and key not in values:
            continue
        value = values.get(key)
        if value is None:
            raise ValueError(f"the config of the head's layer lacks {key}")
        if type(value) is not int or value < 1:
            raise ValueError(
                f"{key} of the head's layer must be a whole number >= 1, got {value!r}"
            )
    heads, shared = values["num_attention_heads"], values["num_key_value_heads"]
    if heads % shared:
        raise ValueError(
            f"the head's layer has {heads} attention heads and {shared} of keys and values, which "
            "must divide them"
        )
    eps, activation = values["rms_norm_eps"], values["hidden_act"]
    if type(eps) not in (float, int) or eps < 0:
        raise ValueError(f"rms_norm_eps of the head's layer must be a number >= 0, got {eps!r}")
    if activation not in list(ACT2FN):
        raise ValueError(f"the head's layer has an unknown activation: {activation!r}")


def _rope(raw: JsonObject) -> JsonObject:
    """The parameters of the rotary embedding, where and as configs of every age have them.

    Raises:
        ValueError: they are not an object, or of an unknown type.
    """
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"the rope parameters of the head's layer must be an object, got {rope!r}")
    rope = dict(rope.get("full_attention") or rope)  # some configs have them by kind of attention
    old_name = rope.pop("type", None)
    name = rope.get("rope_type") or old_name or "default"
    kind = _ROPE_NAMES.get(str(name), name)
    if kind not in ("default", *ROPE_INIT_FUNCTIONS):
        known = ["default", *ROPE_INIT_FUNCTIONS, *_ROPE_NAMES]
        raise ValueError(unknown_name("rope type of a head's layer", str(name), known))
    outside = ["rope_theta", "partial_rotary_factor"]
    outside += ["original_max_position_embeddings"] * (kind in _SCALED_ROPES)
    found = {key: raw[key] for key in outside if raw.get(key) is not None}
    found |= {key: value for key, value in rope.items() if value is not None}
    for axes in ("mrope_section", "mrope_interleaved"):
        found.pop(axes, None)
    return {"rope_theta": 10_000.0, **found, "rope_type": kind}


def _checked_rope(values: JsonObject) -> JsonObject:
    """The rope parameters as transformers completes them; ValueError if it cannot use them."""
    rope = values["rope_parameters"]
    what = f"the rope parameters of the head's layer ({rope})"
    try:
        made = transformers_config(values)
        frequencies = Rotary(made).inv_freq
        factors = [made.rope_parameters.get(key) for key in ("long_factor", "short_factor")]
        lengths = {len(factor) for factor in factors if factor is not None}
    except (*_REFUSALS, StrictDataclassError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{what} do not fit ({type(error).__name__}: {reason})") from None
    pairs = len(frequencies)
    fits = 2 * pairs <= values["head_dim"] and all(map(math.isfinite, frequencies.tolist()))
    if not fits or lengths - {pairs}:
        raise ValueError(f"{what} do not fit attention heads of head_dim {values['head_dim']}")
    return made.rope_parameters


def transformers_config(config: Options) -> Any:
    """The config from which transformers' modules are made.

    It is Qwen3's for both architectures, because Llama's refuses a width that is not a multiple of
    the heads also where `head_dim` is given (GLM-4.5: 5120 and 96).
    """
    keys = {k: v for k, v in config.items() if k not in ("model_type", "biases")}
    keys["rope_parameters"] = dict(keys["rope_parameters"])  # which transformers completes
    made: PreTrainedConfig = Qwen3Config(num_hidden_layers=1, **keys)
    made._attn_implementation = "sdpa"
    made.use_qk_norm = config["model_type"] == "qwen3"
    made.mlp_bias = False
    return made


def layer_config_like(decoder: Decoder) -> JsonObject:
    """The config of a layer with the sizes of the target's own layers."""
    config = decoder.config
    width, heads = config.hidden_size, config.num_attention_heads
    own = {key: value for key in _KEYS if (value := getattr(config, key, None)) is not None}
    rope = own.pop("rope_parameters", None) or {}
    plain = {"rope_type", "rope_theta"} <= rope.keys() and "partial_rotary_factor" not in rope
    theta = rope.get("rope_theta", 10_000.0)
    own |= {
        "model_type": config.model_type if config.model_type in _KINDS else "llama",
        "head_dim": own.get("head_dim", width // heads),
        "intermediate_size": own.get("intermediate_size", 4 * width),
        "hidden_act": "silu",
        "biases": [],
        "rope_parameters": rope if plain else {"rope_type": "default", "rope_theta": theta},
    }
    return layer_config(own)


class Rotary(Glm4MoeRotaryEmbedding):
    """A rotary embedding whose frequencies keep their precision when the head is cast.

    GLM's turns a part of each attention head if there is a `partial_rotary_factor`, which Llama's
    ignores.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
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

    def __init__(self, config: Options, place: int, inputs: int = 1):
        super().__init__()
        made, biases = transformers_config(config), config["biases"]
        self.width, eps = made.hidden_size, made.rms_norm_eps
        # GLM's attention is Llama's, or with `use_qk_norm` Qwen3's, and turns a part of each head.
        self.self_attn = Glm4MoeAttention(made, place)
        self._remake(_READERS, inputs * self.width, biases)
        self._remake(("self_attn.o_proj",), None, biases)
        self.mlp = LlamaMLP(made)
        self._remake(MLP_MAPS, None, biases)
        self.post_attention_layernorm = LlamaRMSNorm(self.width, eps)
        self.rotary = Rotary(made)

    def _remake(self, names: Sequence[str], inputs: int | None, biases: Sequence[str]) -> None:
        """Give linear maps another width of inputs, and those in `biases` a bias."""
        for name in names:
            old: Any = self.get_submodule(name)
            width = inputs or old.in_features
            if width != old.in_features or name in biases:
                new = nn.Linear(width, old.out_features, bias=name in biases)
                self.set_submodule(name, new)

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
            **{_CACHE: past_key_values},
        )
        residual = residual + attended
        return residual + self.mlp(self.post_attention_layernorm(residual))
