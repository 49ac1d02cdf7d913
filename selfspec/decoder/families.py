"""What is specific to model families: layers, masks, windows, refusals."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import torch
import transformers
from peft import PeftConfig, PeftMixedModel
from peft.tuners.tuners_utils import BaseTuner
from torch import Tensor, nn
from torch.jit import ScriptModule
from transformers import (
    Cache,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from selfspec.config import Kernels, KVCacheDtype
from selfspec.decoder.devices import weight_of
from selfspec.decoder.mixers import is_mixer, unknown_mixers
from selfspec.decoder.passes import cache_name
from selfspec.decoder.quantized import is_quantized

# Methods of a model that transformers' loop over tokens consists of.
LOOP = (
    *("prepare_inputs_for_generation", "_update_model_kwargs_for_generation"),
    *("_prefill", "_sample"),
)
PLAIN_ATTENTIONS = ("sdpa", "eager")  # transformers' own that take a mask per row


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside, PEFT wrapping removed."""
    inner = model
    if hasattr(model, "peft_config"):
        configs: dict[str, PeftConfig] = model.peft_config  # pyright: ignore[reportAssignmentType]
        config = next(iter(configs.values()))
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"a PEFT model of type {config.peft_type} adds virtual tokens, which a span of "
                "layers cannot see; use an adapter inside the layers (LoRA), or merge it"
            )
        _refuse_tuner(model)
        if hasattr(model, "get_base_model"):
            inner = model.get_base_model()  # pyright: ignore[reportCallIssue]
        elif isinstance(model, PeftMixedModel):
            inner = model.base_model.model
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(
            f"model must be a transformers PreTrainedModel, got {type(model).__name__}"
            f"{_what_to_pass(model)}"
        )
    return inner


def _what_to_pass(given: object) -> str:
    """What to pass instead of a path, or of what holds a model."""
    if isinstance(given, (str, Path)):
        return "; SelfSpecModel.from_pretrained loads one"
    is_module = isinstance(given, nn.Module)
    parts = given.named_modules() if is_module else getattr(given, "__dict__", {}).items()
    path = next((path for path, part in parts if isinstance(part, PreTrainedModel)), None)
    return "" if path is None else f"; pass the one inside it, its attribute {path}"


# Their own `forward` or `generate` does nothing more outside training.
_PASS_ON = {"AdaLoraModel", "MixedModel"}
_MIX_TOKENS = {"LilyModel"}  # what a token gets depends on all tokens of the pass


def _refuse_tuner(model: nn.Module) -> None:
    """Raise ValueError for an adapter that acts outside the layers, in every call of the model."""
    kind = type(getattr(model, "base_model", None))
    acts = issubclass(kind, BaseTuner) and (
        kind.forward is not BaseTuner.forward or hasattr(kind, "generate")
    )
    if (acts and kind.__name__ not in _PASS_ON) or kind.__name__ in _MIX_TOKENS:
        raise ValueError(
            f"a {kind.__name__} of PEFT computes something for every call outside the layers, or "
            "from all tokens of a pass, which passes over other layers or tokens would miss; use "
            "an adapter inside the layers (LoRA), or merge it"
        )


def refuse_options(kernels: str, kv_cache_dtype: str) -> None:
    """Raise ValueError for unknown options, and for options that exclude each other."""
    if kernels not in get_args(Kernels):
        raise ValueError(f"kernels must be one of {get_args(Kernels)}, got {kernels!r}")
    if kv_cache_dtype not in get_args(KVCacheDtype):
        raise ValueError(
            f"kv_cache_dtype must be one of {get_args(KVCacheDtype)}, got {kv_cache_dtype!r}"
        )
    if kernels in ("compiled", "graphs") and kv_cache_dtype != "auto":
        raise ValueError(
            f"with kernels {kernels!r} layers write keys and values as they are, not as "
            f"{kv_cache_dtype}; "
            "choose other kernels, or leave kv_cache_dtype out"
        )


def _own_loop(kind: Any) -> str | None:
    """The method in which a class has a loop over tokens of its own, if there is one."""
    if kind.generate.__module__.startswith("transformers.models."):
        return "generate"
    loops = ("_prefill", "_sample")
    return next((n for n in loops if getattr(kind, n) is not getattr(GenerationMixin, n)), None)


_DYNAMIC = re.compile(r"torch\.ao\.nn\.(intrinsic\.)?quantized\.dynamic")


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise ValueError, with the reason, for a model that is not supported."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder; selfspec runs decoder-only causal LMs")
    if model.get_output_embeddings() is None or not model.can_generate():
        raise ValueError(f"{name} has no LM head; load the model with AutoModelForCausalLM")
    if own := _own_loop(type(model)):
        raise ValueError(
            f"{name} has a {own} of its own, which is not transformers' loop over tokens; "
            "wrap the language model inside, if that is a causal LM"
        )
    parts = [part for root in text_parts(model) for part in root.modules()]
    scripted = [type(part).__name__ for part in parts if isinstance(part, ScriptModule)]
    if scripted:
        raise ValueError(
            f"{name} has a {scripted[0]} that is scripted or traced, so its code cannot be read; "
            "put the module itself there, or use the model's own generate"
        )
    if any(_DYNAMIC.match(type(part).__module__) for part in parts):
        raise ValueError(
            f"{name} is quantized dynamically, with one scale for all tokens of a pass, so a token "
            "depends on those beside it; quantize weights alone (torchao's Int8WeightOnlyConfig), "
            "or use the model's own generate"
        )
    stages = getattr(getattr(model.config, "distributed_config", None), "pp_size", None) or 1
    if stages > 1:
        raise ValueError(
            f"{name} is split into {stages} pipeline stages, none of which has all layers; load it "
            "with tensor parallelism (DistributedConfig(tp_size=...)) or with device_map"
        )
    refuse_attention(model)
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise ValueError(
            f"{name} lets tokens of a prompt attend to later ones; selfspec runs causal LMs"
        )
    _refuse_caches(model, config)


def attention_of(model: PreTrainedModel) -> str:
    """Name of the attention that is chosen now; it may change at any time."""
    return getattr(model.config.get_text_config(decoder=True), "_attn_implementation", "eager")


def refuse_attention(model: PreTrainedModel) -> None:
    """Raise ValueError for an attention that takes no mask per row.

    One that others have registered takes what the mask function of the same name makes.
    """
    attention, makers = attention_of(model), ALL_MASK_ATTENTION_FUNCTIONS
    if makers.get(attention) in [makers[name] for name in PLAIN_ATTENTIONS]:
        return
    register = f", or AttentionMaskInterface.register({attention!r}, sdpa_mask) if it takes one"
    raise ValueError(
        f"{type(model).__name__} uses attention {attention!r}, which takes no mask per row; "
        "load it with attn_implementation='sdpa' (or 'eager'), or choose it by "
        f"set_attn_implementation{'' if attention in makers else register}"
    )


# transformers' cache classes of layers that selfspec runs; layers without a cache have a dummy.
_BOTH = {"LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"}
_ATTENDING = {"DynamicLayer", "DynamicSlidingWindowLayer"} | _BOTH
_RECURRENT = {"LinearAttentionLayer"} | _BOTH
_OTHERS = {"LinearAttentionLayer", "DummyLayer"}


def _refuse_caches(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Raise ValueError unless each layer has KV of its own, a known recurrent state, or nothing."""
    name, sized = type(model).__name__, hasattr(config, "num_hidden_layers")
    kinds = (
        {type(layer).__name__ for layer in DynamicCache(config=config).layers} if sized else set()
    )
    decoder = model.get_decoder()  # encoders of images or audio may have recurrent layers, too
    mixers = {type(module).__name__ for module in decoder.modules() if is_mixer(module)}
    hybrid = kinds & _ATTENDING and kinds & _RECURRENT
    # Before transformers 5.21 the cache has no method by which mixers read their states.
    if hybrid and not mixers and not hasattr(Cache, "get_conv_state"):
        raise ValueError(
            f"{name} has recurrent layers, which selfspec runs with transformers 5.21 or newer, "
            f"not with {transformers.__version__}; upgrade transformers"
        )
    if model._is_stateful and not (kinds & _ATTENDING and mixers):
        raise ValueError(
            f"{name} keeps nothing but recurrent states, or keeps them outside transformers' "
            "cache; selfspec runs models that attend to a KV cache in some of their layers"
        )
    unknown = sorted(unknown_mixers(decoder))
    if unknown:
        raise ValueError(
            f"{name} has recurrent layers with a {unknown[0]}, whose kernel selfspec does not "
            "know, so rejected tokens could not be rolled back"
        )
    strange = kinds - _ATTENDING - (_OTHERS if mixers else set())
    chunked = getattr(config, "attention_chunk_size", None) is not None
    if strange or chunked or not sized:
        what = "attends in chunks" if chunked else f"caches {', '.join(sorted(strange))}"
        raise ValueError(
            f"{name} {what}; selfspec runs models whose every layer has full or "
            "sliding-window attention over a KV cache of its own"
        )


def is_multimodal(model: PreTrainedModel) -> bool:
    """Whether the text model is a part of the model."""
    return model.config.get_text_config(decoder=True) is not model.config


def text_parts(model: PreTrainedModel) -> list[nn.Module]:
    """What writes text: the model, or the text model of a multimodal one and its LM head."""
    if not is_multimodal(model):
        return [model]
    decoder, lm_head = model.get_decoder(), model.get_output_embeddings()
    if lm_head is None or any(part is lm_head for part in decoder.modules()):
        return [decoder]
    return [decoder, lm_head]


def find_layers(model: nn.Module, count: int) -> tuple[nn.Module, str, nn.ModuleList]:
    """The module that owns the decoder layers (the body), their name in it, and the layers.

    They are looked for in `model.get_decoder()`: encoders of images or audio have layers, too.
    """
    inside = model.get_decoder() if isinstance(model, PreTrainedModel) else model
    name, found = type(model).__name__, list(_lists(inside, count))
    if len(found) > 1:
        paths = ", ".join(f"{type(owner).__name__}.{child}" for owner, child, _ in found)
        raise ValueError(
            f"{name} has {len(found)} ModuleLists of num_hidden_layers = {count} layers ({paths}); "
            "selfspec cannot tell which modules are its decoder layers"
        )
    if not found:
        raise ValueError(
            f"{name} has no ModuleList of num_hidden_layers = {count} layers; "
            "selfspec cannot tell which modules are its decoder layers"
        )
    return found[0]


def _lists(module: nn.Module, count: int) -> Iterator[tuple[nn.Module, str, nn.ModuleList]]:
    """Lists of `count` modules, without those inside others: a layer may have as many experts."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            yield module, name, child
        else:
            yield from _lists(child, count)


# By which embeddings of positions take the length of the cache, since transformers 5.24 and before.
_LENGTHS = {"cache_length", "past_key_values_length"}


def refuse_body(model: PreTrainedModel, base: nn.Module) -> None:
    """Raise ValueError if the module that owns the layers cannot be run as a decoder's body."""
    name, body = type(model).__name__, type(base)
    takes = inspect.signature(body.forward).parameters
    missing = [part for part in ("input_ids", cache_name(body.forward)) if part not in takes]
    if missing:
        raise ValueError(
            f"{name} has its layers in a {body.__name__}, whose forward takes no "
            f"{' and no '.join(missing)}; selfspec runs models whose body takes token ids and a "
            "KV cache"
        )
    counters = [
        type(part).__name__
        for part in base.children()
        if not _LENGTHS.isdisjoint(inspect.signature(type(part).forward).parameters)
    ]
    if counters and "position_ids" not in takes:
        raise ValueError(
            f"{name} counts positions by the length of its cache, one for all rows "
            f"({counters[0]}), but rows that accept different numbers of drafts need positions of "
            "their own; selfspec runs models whose body takes position_ids"
        )


def layer_windows(config: Any, depth: int) -> list[int | None]:
    """Per layer, the sliding window in tokens, or None."""
    if config.model_type == "gpt_neo":
        local = [kind == "local" for kind in config.attention_layers]
        return [config.window_size if is_local else None for is_local in local]
    layers = DynamicCache(config=config).layers
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    return windows or [None] * depth


def attention_layers(config: PreTrainedConfig, depth: int) -> list[int]:
    """Indices of the layers that attend and have no recurrent state."""
    kinds = [type(layer).__name__ for layer in DynamicCache(config=config).layers]
    plain = {"DynamicLayer", "DynamicSlidingWindowLayer"}
    return [index for index in range(depth) if not kinds or kinds[index] in plain]


def causal_tables(layers: nn.Module) -> list[nn.Module]:
    """Attention modules that mask by a table of their own (GPT-Neo)."""
    tables = [(module, module._buffers.get("bias")) for module in layers.modules()]
    return [m for m, t in tables if t is not None and t.dtype == torch.bool and t.ndim == 4]


def plain_weight(lm_head: nn.Module, vocab_size: int) -> Tensor:
    """`[vocab, hidden]` an LM head's whole matrix, or ValueError where it has no plain one."""
    weight = lm_head.weight if isinstance(lm_head, nn.Linear) else None
    if weight is None or is_quantized(weight) or weight.shape[0] != vocab_size:
        raise ValueError(
            f"the LM head is a {type(lm_head).__name__} without a plain weight matrix of "
            f"{vocab_size} rows, so its rows cannot be taken; leave the LM head "
            "unquantized and merge its adapter, or draft over the whole vocabulary"
        )
    return weight_of(lm_head, "weight")


def prefills_again(model: PreTrainedModel) -> bool:
    """Whether the model's own `generate` computes its cache anew beyond the original length.

    Phi-3, Phi-3.5-MoE and Phi-4 drop the cache in `prepare_inputs_for_generation`.
    """
    prepare: Any = inspect.unwrap(model.prepare_inputs_for_generation)  # pyright: ignore
    return "original_max_position_embeddings" in prepare.__code__.co_names
