"""Which models can be run in spans, and where their layers are."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from selfspec.config import Kernels, KVCacheDtype
from selfspec.decoder.devices import weight_of
from selfspec.decoder.quantized import is_quantized


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside, PEFT wrapping removed."""
    inner = model
    if hasattr(model, "peft_config"):
        configs: dict[str, Any] = model.peft_config  # pyright: ignore[reportAssignmentType]
        config = next(iter(configs.values()))
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"a PEFT model of type {config.peft_type} adds virtual tokens, which a span of "
                "layers cannot see; use an adapter inside the layers (LoRA), or merge it"
            )
        if hasattr(model, "get_base_model"):
            inner = model.get_base_model()  # pyright: ignore[reportCallIssue]
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    return inner


def refuse_options(kernels: str, kv_cache_dtype: str) -> None:
    """Raise ValueError, with the reason, for options that are none, or exclude each other."""
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


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise ValueError, with the reason, for a model that cannot draft for itself."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    attention = getattr(config, "_attn_implementation", "eager")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder; selfspec runs decoder-only causal LMs")
    if model.get_output_embeddings() is None or not model.can_generate():
        raise ValueError(f"{name} has no LM head; load the model with AutoModelForCausalLM")
    stages = getattr(getattr(model.config, "distributed_config", None), "pp_size", None) or 1
    if stages > 1:
        raise ValueError(
            f"{name} is split into {stages} pipeline stages, none of which has all layers; load it "
            "with tensor parallelism (DistributedConfig(tp_size=...)) or with device_map"
        )
    if model._is_stateful or not hasattr(config, "num_hidden_layers"):
        raise ValueError(
            f"{name} keeps a recurrent state, which cannot take rejected tokens back; "
            "selfspec runs models whose layers attend to a KV cache"
        )
    if attention not in ("sdpa", "eager"):
        raise ValueError(
            f"{name} uses attention {attention!r}, which takes no mask per row; "
            "load it with attn_implementation='sdpa' (or 'eager')"
        )
    kinds = {type(layer).__name__ for layer in DynamicCache(config=config).layers}
    strange = kinds - {"DynamicLayer", "DynamicSlidingWindowLayer"}
    chunked = getattr(config, "attention_chunk_size", None) is not None
    if strange or chunked:
        what = "attends in chunks" if chunked else f"caches {', '.join(sorted(strange))}"
        raise ValueError(
            f"{name} {what}; selfspec runs models whose every layer has full or "
            "sliding-window attention over a KV cache of its own"
        )


def find_layers(model: nn.Module, count: int) -> tuple[nn.Module, str, nn.ModuleList]:
    """The module that owns the decoder layers (the model's body), their name in it, and they."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, name, child
    raise ValueError(
        f"{type(model).__name__} has no ModuleList of num_hidden_layers = {count} layers; "
        "selfspec cannot tell its decoder layers"
    )


def path_to(module: nn.Module, model: nn.Module) -> list[nn.Module]:
    """The model, the modules between it and one of its modules, and that."""
    name = next(name for name, found in model.named_modules() if found is module)
    path = [model]
    for part in name.split(".") if name else ():
        path.append(path[-1].get_submodule(part))
    return path


def layer_windows(config: Any, depth: int) -> list[int | None]:
    """Per layer, the sliding window in tokens, or None."""
    if config.model_type == "gpt_neo":
        local = [kind == "local" for kind in config.attention_layers]
        return [config.window_size if is_local else None for is_local in local]
    layers = DynamicCache(config=config).layers
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    return windows or [None] * depth


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
