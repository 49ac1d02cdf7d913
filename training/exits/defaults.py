"""Defaults of a fit, which depend on the target, the text and the available memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from selfspec import DEMO_MODEL
from selfspec.config import parse
from selfspec.decoder import Decoder
from selfspec.decoder.checkpoints import auto_class, load_config, load_tokenizer
from selfspec.heads import head_class
from selfspec.heads.hub import DEMO

from ..data import tokenize
from .fitting import FitConfig
from .task import new_head

OUTPUT = "outputs/fit"
TEXT = Path(__file__).parents[1] / "text"
_DEMO_TEXT = {
    "data": [{"files": [str(TEXT / "garden.txt")], "clean": "prose"}],
    "held_out": {"novels": {"files": [str(TEXT / "hound.txt")], "clean": "prose"}},
}
_PASSES = 2  # over the text
_FEWEST, _MOST = 100, 10_000  # steps
_VOCABULARY = 32_000  # the most tokens that a head drafts
_KEPT = 2**25  # bytes: the allocator of a CPU returns larger tensors to the system after every use
_LONG = 2_000_000  # with as many trained tokens, a head at the embeddings drafts well
_RATE, _WIDTH = 0.006, 256  # learning rate of heads up to this width


def complete(given: Mapping[str, Any], source: str) -> FitConfig:
    """The config of a fit: `given`, and defaults for all other keys.

    Args:
        given: keys of `FitConfig`, nested. `data` may be left out only for the demo target.
        source: where the keys are from, for error messages.

    Raises:
        FileNotFoundError: the text has no files.
        ValueError: a key is unknown or has a bad value, or there is no text.
    """
    text = default_text(given)
    target = given.get("target", DEMO)
    decoder = _without_weights(DEMO_MODEL if target == DEMO else target)
    chosen = {"output": OUTPUT, **text, **_of_target(decoder)}
    config = parse(FitConfig, _filled(given, chosen), source)
    chosen["loop"] = loop = _of_size(config, decoder, given.get("loop", {}))
    if loop["steps"] * loop["batch_size"] * config.block_size >= _LONG:
        chosen["heads"][0]["exit_layer"] = head_class(chosen["heads"][0]["kind"]).lowest_exit
    return parse(FitConfig, _filled(given, chosen), source)


def default_text(given: Mapping[str, Any]) -> dict[str, Any]:
    """Default `data` and `held_out` of the demo target; empty if `given` has `data`.

    Raises:
        ValueError: there is no `data`, and the target is not the demo target.
    """
    target = given.get("target", DEMO)
    if "data" in given:
        return {}
    if target != DEMO:
        raise ValueError(
            f"there is no text for {target}; give --text FILES: best are the model's own outputs "
            "(selfspec regenerate makes them from prompts), or text similar to what it will write"
        )
    return _DEMO_TEXT


def _filled(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, completed by `defaults` section by section."""
    both = {
        key: _filled(given[key], defaults[key])
        for key in given.keys() & defaults.keys()
        if isinstance(given[key], Mapping) and isinstance(defaults[key], Mapping)
    }
    return {**defaults, **given, **both}


def _without_weights(source: str | Path) -> Decoder:
    """The target on the meta device."""
    config = load_config(source)
    with torch.device("meta"):
        return Decoder(auto_class(config).from_config(config, dtype=torch.float32))


def _of_target(decoder: Decoder) -> dict[str, Any]:
    """The head, its loss and rate, and what is measured."""
    # With attention biases by key index, a head's layer cannot be unrolled over its own drafts.
    kind, depths = ("block", 1) if decoder.counts_keys else ("fused", 3)
    head: dict[str, Any] = {"kind": kind, "exit_layer": max(1, decoder.depth // 4)}
    if decoder.vocab_size > 2 * _VOCABULARY:  # the LM head would cost more than the head's layer
        head["vocab_size"] = _VOCABULARY
    # Adam's rate for matrices falls with their width (Yang et al. 2022).
    rate = _RATE * min(1.0, _WIDTH / decoder.config.hidden_size)
    return {
        "heads": [head],
        "loss": {"depths": depths},
        "optimizer": {"lr": rate, "warmup": 0.05, "decay": 0.8},
        "measure": {"depths": depths, "blocks": 48, "prompts": 4, "new_tokens": 64},
    }


def _of_size(config: FitConfig, decoder: Decoder, given: Mapping[str, Any]) -> dict[str, Any]:
    """Steps for the size of the text, and batches for the device and its memory."""
    batch = given.get("batch_size", 32 if torch.accelerator.is_available() else 8)
    steps = given.get("steps") or _steps(config, batch * config.block_size)
    fitting = _rows_that_fit(config, decoder)
    parts = [part for part in range(1, batch + 1) if batch % part == 0 and part <= fitting]
    fifth = max(1, steps // 5)
    return {
        "steps": steps,
        "batch_size": batch,
        "micro_batch_size": parts[-1] if parts else 1,
        "eval_every": fifth,
        "save_every": fifth,
    }


def _steps(config: FitConfig, tokens_a_step: int) -> int:
    """Steps for `_PASSES` passes over the text; counting stops at the maximum."""
    tokenizer = load_tokenizer(config.source)
    tokens = 0
    for source in config.data:
        for document in tokenize(source, tokenizer, silent=True):  # read again by the fit
            tokens += len(document.tokens)
            if tokens * _PASSES >= _MOST * tokens_a_step:
                return _MOST
    return max(_FEWEST, math.ceil(tokens * _PASSES / tokens_a_step))


def _rows_that_fit(config: FitConfig, decoder: Decoder) -> int:
    """Number of blocks whose pass takes half of the memory that the weights leave free."""
    heads = [new_head(decoder, head) for head in config.heads]
    fitted = sum(p.numel() for head in heads for p in head.parameters())
    weights = sum(p.numel() for p in decoder.causal_lm.parameters())
    depths, vocab, width = config.loss.depths, decoder.vocab_size, decoder.config.hidden_size
    # In float32. Per position: logits, log-probabilities and gradients of target and drafts, and
    # activations for a layer's backward pass. Per weight of a head: its gradient and Adam's means.
    position = 4 * ((2 + 3 * depths) * vocab + 40 * depths * width)
    left = _free_bytes() - 4 * weights - 16 * fitted
    rows = int(left / 2 / (position * config.block_size))
    if torch.accelerator.is_available():
        return rows
    return min(rows, _KEPT // (4 * vocab * config.block_size))


def _free_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    return psutil.virtual_memory().available
