"""Options of `generate` that speculation does not support, each with the alternative."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch import nn
from transformers import GenerationConfig
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

_KNOWN_INPUTS = {
    "attention_mask",
    "cache_position",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "return_dict",
    "use_cache",
}
_OF_TENSORS = ("input_ids", "inputs_embeds", "attention_mask", "past_key_values", "streamer")
_APART = (
    "processes that share weights but not their texts (FSDP, ZeRO-3) would wait for one another, "
    "for their rounds differ; use the model's own generate for it, or tensor parallelism"
)


def refuse_other_loops(options: Mapping[str, Any], *configs: GenerationConfig | None) -> None:
    """Raise ValueError for options that select another decoding method or cache.

    Args:
        options: the call's options.
        configs: generation configs that apply to the call.
    """
    if options.get("custom_generate") is not None:
        raise ValueError(
            "custom_generate is another decoding method; choose one of selfspec's drafters with "
            "draft=..., or call the model's own generate"
        )
    if options.get("assistant_tokenizer") is not None:
        raise ValueError(
            "assistant_tokenizer: the assistant model must have the target's own vocabulary; "
            "choose another, or call the model's own generate"
        )
    if options.get("position_ids") is not None:
        raise ValueError(
            "position_ids: positions come from attention_mask, one after another; leave them unset"
        )
    if options.get("synced_gpus"):  # generate keeps it from custom loops
        raise ValueError(f"synced_gpus: {_APART}")
    # Checked before `generate` makes such a cache or imports a package for it.
    named = [options.get("cache_implementation")]
    named += [getattr(config, "cache_implementation", None) for config in configs]
    for name in named:
        if name not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={name!r}: selfspec brings its own cache, from which "
                "rejected drafts are taken back; leave it unset (for 8-bit keys and values pass "
                "kv_cache_dtype='int8' to SelfSpecModel), or call the model's own generate"
            )


def samples(
    options: Mapping[str, Any], config: GenerationConfig | None, own: GenerationConfig
) -> bool:
    """Whether a call samples, by its options, its generation config, or the model's own."""
    return bool(_chosen("do_sample", options, config, own))


def _chosen(
    name: str, options: Mapping[str, Any], config: GenerationConfig | None, own: GenerationConfig
) -> Any:
    """An option, as transformers finds it: what is unset in one place is looked up in the next."""
    given = (options.get(name), getattr(config, name, None), getattr(own, name, None))
    return next((value for value in given if value is not None), None)


def refuse_in_batches(
    options: Mapping[str, Any],
    config: GenerationConfig | None,
    own: GenerationConfig,
    batch_size: int,
) -> None:
    """Raise ValueError for options that `generate_batch` does not have.

    Args:
        options: the call's options.
        config: the call's generation config.
        own: the model's generation config.
        batch_size: the most requests that run at a time.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    given = [name for name in _OF_TENSORS if options.get(name) is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)}: generate_batch takes lists of token ids and returns whole "
            "requests; use generate instead"
        )

    def chosen(name: str) -> Any:
        return _chosen(name, options, config, own)

    if (chosen("num_return_sequences") or 1) > 1:
        raise ValueError(
            "num_return_sequences: generate_batch continues each prompt once; give a prompt as "
            "often as it is to be continued"
        )
    kept = [name for name in ("output_scores", "output_logits") if chosen(name)]
    if kept:
        raise ValueError(
            f"{', '.join(kept)}: generate_batch keeps only tokens; use generate instead"
        )


def check_counts(prompts: int, **given: Any) -> None:
    """Raise ValueError unless each option that is a sequence has one entry per prompt."""
    for name, values in given.items():
        if isinstance(values, Sequence) and len(values) != prompts:
            raise ValueError(f"{name} has {len(values)} numbers for {prompts} prompts")


def refuse_unsupported_options(
    model: nn.Module,
    config: GenerationConfig,
    inputs: Mapping[str, Any],
) -> None:
    """Raise ValueError for unsupported options, and for sharded weights (FSDP, ZeRO-3)."""
    if _processes() > 1 and (is_deepspeed_zero3_enabled() or _is_fully_sharded(model)):
        raise ValueError(f"{type(model).__name__} is in shards: {_APART}")
    for problem in _problems(config, inputs):
        raise ValueError(problem)


def _processes() -> int:
    started = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if started else 1


def _is_fully_sharded(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    kinds = (FSDPModule, FullyShardedDataParallel)
    return any(isinstance(part, kinds) for part in model.modules())


def _problems(config: GenerationConfig, inputs: Mapping[str, Any]) -> Iterator[str]:
    instead = "use the model's own generate for it"
    if (config.num_beams or 1) > 1:
        yield f"num_beams={config.num_beams}: beam search is not covered by speculation; {instead}"
    if config.penalty_alpha:
        yield f"penalty_alpha: contrastive search is not covered by speculation; {instead}"
    if config.dola_layers is not None:
        yield f"dola_layers: DoLa decoding is not covered by speculation; {instead}"
    if config.prompt_lookup_num_tokens is not None or config.assistant_early_exit is not None:
        yield (
            "prompt_lookup_num_tokens and assistant_early_exit are drafters of transformers; "
            "choose selfspec's with draft=..."
        )
    if config.output_attentions or config.output_hidden_states:
        yield (
            "output_attentions and output_hidden_states are not kept by speculation; "
            "run the finished text through the model once"
        )
    given = [key for key, value in inputs.items() if value is not None]
    unknown = [key for key in given if key not in _KNOWN_INPUTS]
    if unknown:
        yield f"inputs not covered by speculation: {', '.join(unknown)}; {instead}"
