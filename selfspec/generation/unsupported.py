"""Options of `generate` that speculation does not support, each with the alternative."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from numbers import Integral
from typing import Any

import torch
import torch.distributed
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from selfspec.config import Options
from selfspec.decoder import CACHE
from selfspec.decoder.families import LOOP, is_multimodal

# Model types whose prompts may have images.
IMAGE_FAMILIES = {
    *("aya_vision", "cohere2_vision", "cosmos3_omni", "deepseek_vl", "exaone4_5", "gemma3"),
    *("glm46v", "glm4v", "glm4v_moe", "glm_ocr", "got_ocr2", "hyperclovax_vision_v2", "idefics2"),
    *("idefics3", "internvl", "lighton_ocr", "llava", "llava_next", "llava_onevision", "mistral3"),
    *("qianfan_ocr", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl"),
    *("qwen3_vl_moe", "smolvlm", "vipllava"),
}
# What is given for images; transformers encodes them before the loop begins.
_IMAGES = {
    *("image_grid_thw", "image_sizes", "mm_encoder_outputs"),
    *("pixel_attention_mask", "pixel_values"),
}
_TOKEN_TYPES = {"mm_token_type_ids", "token_type_ids"}  # 0 for text
_MEDIA = {*MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL, *_IMAGES}
_KNOWN_INPUTS = {
    "attention_mask",
    "cache",
    "cache_position",
    "labels",  # which the model's own generate ignores, too
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "return_dict",
    "use_cache",
}
_MANAGING = {  # with the values that are accepted
    "continuous_batching_config": (None, "selfspec has no paged cache; choose batch_size"),
    "progress_bar": (False, "count the outputs of generate_batch_iter"),
    "persistent_manager": (False, "nothing is kept from call to call; leave it out"),
    "warmup": (True, "nothing is warmed up; leave it out"),
}
_OF_TENSORS = (
    *("input_ids", "inputs_embeds", "attention_mask", "past_key_values", "cache", "streamer"),
)
_INSTEAD = "use the model's own generate for it"
_APART = (
    "processes that share weights but not their texts (FSDP, ZeRO-3) would wait for one another, "
    "for their rounds differ; use the model's own generate for it, or tensor parallelism"
)


def merged(model: Any, config: GenerationConfig | None, options: Options) -> GenerationConfig:
    """The generation config of a call, merged as transformers merges it.

    The call's options come before its config, and this before the model's own. Options are judged
    by what is left, so a call can override every value of a checkpoint.
    """
    return model._prepare_generation_config(config, **options)[0]


def refuse_other_loops(config: GenerationConfig, options: Options) -> None:
    """Raise ValueError for options that select another decoding method, cache or output.

    Args:
        config: the merged generation config.
        options: the call's options.
    """
    for name, reason in _REASONS.items():
        if options.get(name) not in (None, False):
            raise ValueError(f"{name}{reason}")
    if options.get("position_ids") is not None:
        raise ValueError(
            "position_ids: positions come from attention_mask, one after another; leave them unset"
        )
    if config.get_generation_mode() not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(_other_mode(config))
    if config.output_attentions or config.output_hidden_states:
        raise ValueError(
            "output_attentions and output_hidden_states are not kept by speculation; "
            "run the finished text through the model once"
        )
    if config.is_assistant:
        raise ValueError(
            "is_assistant is set by transformers for models that draft; pass such a model as "
            "assistant_model"
        )
    _refuse_caches(config)


_REASONS = {
    "custom_generate": (
        " is another decoding method; choose one of selfspec's drafters with draft=..., or call "
        "the model's own generate"
    ),
    "synced_gpus": f": {_APART}",  # generate keeps it from custom loops
}
# What selects a mode in `GenerationConfig.get_generation_mode`.
_DRAFTERS = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
_SELECTS_MODE = (
    *("force_words_ids", "constraints", "num_beams", "num_beam_groups", "penalty_alpha"),
    *("dola_layers", *_DRAFTERS),
)


def _other_mode(config: GenerationConfig) -> str:
    """Why a mode other than greedy search and sampling is refused, by the options that chose it."""
    mode, usual = config.get_generation_mode(), config._get_default_generation_params()
    values = {name: getattr(config, name, None) for name in _SELECTS_MODE}
    given = [
        f"{name}={value!r:.40}"
        for name, value in values.items()
        if value not in (None, usual.get(name)) and value is not False
    ]
    what = mode.value.replace("_", " ").replace("dola", "DoLa")
    if mode is GenerationMode.ASSISTED_GENERATION:
        instead = "drafts with transformers' drafters; choose selfspec's with draft=..."
    else:
        instead = f"is not covered by speculation; {_INSTEAD}"
    return f"{', '.join(given)}: {what} {instead}"


def _refuse_caches(config: GenerationConfig) -> None:
    """Refuse another cache before `generate` makes one or imports a package for it."""
    name = config.cache_implementation
    # Without a cache its kind means nothing, but for "paged", which is another loop.
    if name in (None, "dynamic") or (config.use_cache is False and name != "paged"):
        return
    raise ValueError(
        f"cache_implementation={name!r}: selfspec brings its own cache, from which rejected drafts "
        "are taken back; leave it unset, or pass cache_implementation='dynamic' where the "
        "checkpoint sets it (for 8-bit keys and values pass kv_cache_dtype='int8' to "
        "SelfSpecModel), or call the model's own generate"
    )


def refuse_media(model: PreTrainedModel, config: GenerationConfig, options: Options) -> None:
    """Raise ValueError, before encoders run, for images, video or audio that are not covered.

    Args:
        model: the model.
        config: the merged generation config.
        options: the call's options.
    """
    given = [name for name, value in options.items() if name in _MEDIA and not _is_empty(value)]
    if not given:
        return
    covered = _IMAGES if model.config.model_type in IMAGE_FAMILIES else set()
    unknown = [name for name in given if name not in covered]
    unknown += _other_media(options.get("mm_encoder_outputs"))
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: not covered by speculation, with which {type(model).__name__} "
            f"takes {'text and images' if covered else 'text'}; use the model's own generate for it"
        )
    if config.token_healing:
        raise ValueError(
            f"token_healing: it reads a prompt as text, which has no place for {', '.join(given)}; "
            "leave it unset"
        )
    cache = options.get(CACHE)
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            f"{', '.join(given)}: images come with the first prompt; pass the whole prompt without "
            "past_key_values"
        )


def _other_media(outputs: Options | None) -> list[str]:
    """What encoders returned for anything but images."""
    kinds = [kind for kind, value in (outputs or {}).items() if not _is_empty(value)]
    return [f"mm_encoder_outputs[{kind!r}]" for kind in kinds if kind != "image"]


def split_media(
    model: PreTrainedModel, inputs: Options, config: GenerationConfig
) -> tuple[Options, Options]:
    """What describes the images of a prompt, and the other inputs; types of mere text are dropped.

    Raises:
        ValueError: the prompt has images and is to be prefilled in chunks.
    """
    names = _TOKEN_TYPES if is_multimodal(model) else set()
    if model.config.model_type in IMAGE_FAMILIES:
        names = names | _IMAGES
    media = {name: inputs[name] for name in names if not _is_empty(inputs.get(name))}
    if not media:
        return {}, dict(inputs)
    cache = inputs.get(CACHE)
    cached = cache is not None and cache.get_seq_length() > 0
    if _IMAGES.isdisjoint(media) and (cached or not any(bool(v.any()) for v in media.values())):
        return {}, {name: value for name, value in inputs.items() if name not in media}
    if config.prefill_chunk_size is not None:
        raise ValueError(
            "prefill_chunk_size: a prompt with images is prefilled in one pass; leave it unset"
        )
    if not _IMAGES & names:
        return {}, dict(inputs)
    return media, {name: value for name, value in inputs.items() if name not in media}


def refuse_in_batches(
    config: GenerationConfig, options: MutableMapping[str, object], batch_size: int
) -> None:
    """Raise ValueError for options that `generate_batch` does not have.

    Args:
        config: the merged generation config.
        options: the call's options; those of transformers' manager are removed.
        batch_size: the most requests that run at a time.
    """
    if not (isinstance(batch_size, Integral) and batch_size >= 1):
        raise ValueError(f"batch_size must be a number of requests from 1 on, got {batch_size!r}")
    options.setdefault("continuous_batching_config", config.continuous_batching_config)
    for name, (accepted, instead) in _MANAGING.items():
        value = options.pop(name, None)
        if value not in (None, accepted):
            raise ValueError(f"{name}={value!r:.40}: {instead}")
    tensors = (*_OF_TENSORS, *_TOKEN_TYPES, *_MEDIA)
    given = [name for name in tensors if options.get(name) is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)}: generate_batch takes lists of token ids and returns whole "
            "requests; use generate instead"
        )
    negative: Any = options.get("negative_prompt_ids")
    if negative is not None and len(negative) != 1:
        raise ValueError(
            f"negative_prompt_ids has {len(negative)} rows: in generate_batch all requests have "
            "one negative prompt; pass one row, or use generate"
        )
    if options.get("generator") is not None:
        raise ValueError(
            "generator: in generate_batch each request has a generator of its own; pass seed"
        )
    if config.token_healing:
        raise ValueError("token_healing: generate_batch takes prompts as they are; use generate")
    if (config.num_return_sequences or 1) > 1:
        raise ValueError(
            "num_return_sequences: generate_batch continues each prompt once; repeat "
            "a prompt once per continuation"
        )
    kept = [name for name in ("output_scores", "output_logits") if getattr(config, name)]
    if kept:
        raise ValueError(
            f"{', '.join(kept)}: generate_batch keeps only tokens; use generate instead"
        )


def check_counts(prompts: int, **given: object) -> None:
    """Raise ValueError unless each option that is a sequence has one entry per prompt."""
    for name, values in given.items():
        if isinstance(values, Sequence) and len(values) != prompts:
            raise ValueError(f"{name} has {len(values)} numbers for {prompts} prompts")


def number_of(name: str, values: Any, request: int) -> Any:
    """A request's own number, of an option that may be a sequence with one entry per prompt.

    Raises:
        ValueError: the sequence ends before; of prompts that come one by one nobody knows how many.
    """
    if not isinstance(values, Sequence):
        return values
    if request >= len(values):
        raise ValueError(f"{name} has {len(values)} numbers, and there are more prompts")
    return values[request]


def refuse_unsupported_inputs(model: nn.Module, inputs: Options) -> None:
    """Raise ValueError for inputs that selfspec does not know, and for sharded weights."""
    if _processes() > 1 and (is_deepspeed_zero3_enabled() or _is_fully_sharded(model)):
        raise ValueError(f"{type(model).__name__} is in shards: {_APART}")
    for name in (name for name in LOOP if _is_replaced(model, name)):
        raise ValueError(
            f"{name} of this {type(model).__name__} was replaced, and selfspec has a loop of its "
            f"own; delete it from the model, or {_INSTEAD}"
        )
    given = [key for key, value in inputs.items() if not _is_empty(value)]
    unknown = [key for key in given if key not in _KNOWN_INPUTS]
    if unknown:
        raise ValueError(f"inputs not covered by speculation: {', '.join(unknown)}; {_INSTEAD}")


def _is_replaced(model: nn.Module, name: str) -> bool:
    """Whether a method was replaced on the object; PEFT puts the class's own there."""
    own = vars(model).get(name)
    return own is not None and getattr(own, "__func__", None) is not getattr(type(model), name)


def _processes() -> int:
    started = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if started else 1


def _is_fully_sharded(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    kinds = (FSDPModule, FullyShardedDataParallel)
    return any(isinstance(part, kinds) for part in model.modules())


def _is_empty(value: object) -> bool:
    """Whether an input is not given: transformers puts outputs of encoders into a dictionary."""
    return value is None or (isinstance(value, Mapping) and all(map(_is_empty, value.values())))
