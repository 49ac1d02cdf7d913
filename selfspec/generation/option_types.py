"""The types of options of `generate`, checked before transformers computes with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache

from selfspec.config import Options
from selfspec.decoder import CACHE


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)


def _is_number_or_none(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_flag(value: Any) -> bool:
    return _is_number(value) or isinstance(value, np.bool_)


def _is_id(value: Any) -> bool:
    return isinstance(value, Integral) or (_is_number(value) and _are_integers(value))


def _are_integers(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point()


def _are_ids(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_are_ids, value))
    return _is_id(value) or _are_integers(value)


def _lists_ids(value: Any) -> bool:
    several = isinstance(value, Collection) and not isinstance(value, str)
    return several and all(map(_is_id, value))


def _lists_functions(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(callable, value))


def _is_pair(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_is_number, value))


def _are_strings(value: Any) -> bool:
    parts = value if isinstance(value, (list, tuple)) else [value]
    return all(isinstance(part, str) for part in parts)


def _is_watermark(value: Any) -> bool:
    return isinstance(value, Mapping) or hasattr(value, "validate")


def _is_streamer(value: Any) -> bool:
    return hasattr(value, "put") and hasattr(value, "end")


def _are_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2


# What is expected, how it is told, and of which options.
_TYPES: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    (
        "a number",
        _is_number,
        (
            *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time"),
            *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"),
            *("epsilon_cutoff", "eta_cutoff", "guidance_scale", "penalty_alpha"),
            *("repetition_penalty", "encoder_repetition_penalty"),
            *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
            *("num_return_sequences", "num_beams"),
        ),
    ),
    (
        "true or false",
        _is_flag,
        (
            *("do_sample", "use_cache", "token_healing", "renormalize_logits"),
            *("remove_invalid_values", "return_dict_in_generate", "output_scores"),
            *("output_logits", "output_attentions", "output_hidden_states"),
        ),
    ),
    ("a token id", _is_id, ("pad_token_id",)),
    (
        "a token id or a list of them",
        _are_ids,
        ("bos_token_id", "eos_token_id", "forced_bos_token_id", "forced_eos_token_id"),
    ),
    ("a list of token ids", _lists_ids, ("suppress_tokens", "begin_suppress_tokens")),
    ("two numbers, a start and a factor", _is_pair, ("exponential_decay_length_penalty",)),
    ("a string or a list of strings", _are_strings, ("stop_strings",)),
    ("a WatermarkingConfig", _is_watermark, ("watermarking_config",)),
    (
        "a list of functions, also for one alone",
        _lists_functions,
        ("logits_processor", "stopping_criteria"),
    ),
    ("a function", callable, ("prefix_allowed_tokens_fn",)),
    ("a tokenizer", callable, ("tokenizer",)),
    ("a streamer, with `put` and `end`", _is_streamer, ("streamer",)),
    (
        "a tensor [batch, length]",
        _are_rows,
        ("negative_prompt_ids", "negative_prompt_attention_mask"),
    ),
    ("a cache that an earlier call returned", lambda value: isinstance(value, Cache), (CACHE,)),
)

_NEVER_NONE = ("num_return_sequences", "num_beams")


def check_types(config: object, own: GenerationConfig, options: Options) -> None:
    """Raise TypeError for an option that is of no type that it can have.

    Args:
        config: the call's generation config.
        own: the model's.
        options: the call's other arguments, which come first.
    """
    if config is not None and not isinstance(config, GenerationConfig):
        raise TypeError(
            f"generation_config must be a GenerationConfig, got {config!r:.60}; for a dict of "
            "options pass GenerationConfig(**options)"
        )
    for expected, fits, names in _TYPES:
        for name in names:
            value = _given(name, options, config, own)
            if value is not None and not fits(value):
                shown = "past_key_values" if name == CACHE else name
                raise TypeError(f"{shown} must be {expected}, got {value!r:.60}")
    limited = _given("max_new_tokens", options, config, own) is not None
    for name in _NEVER_NONE if limited else (*_NEVER_NONE, "max_length"):
        if options.get(name, 1) is None:
            raise TypeError(f"{name} must be a number, got None; leave it out")


def check_each(**given: Any) -> None:
    """Raise TypeError unless options of `generate_batch` are numbers, or sequences of them."""
    for name, values in given.items():
        fits = _is_id if name == "seed" else _is_number_or_none
        several = isinstance(values, Sequence) and not isinstance(values, str)
        wrong = [value for value in (values if several else [values]) if not fits(value)]
        if values is not None and wrong:
            raise TypeError(f"{name} must be a number, or one per prompt, got {wrong[0]!r:.60}")


def _given(name: str, options: Options, *configs: GenerationConfig | None) -> Any:
    """An option's value, by the first that has one."""
    if name in options:
        return options[name]
    values = (getattr(config, name, None) for config in configs)
    return next((value for value in values if value is not None), None)
