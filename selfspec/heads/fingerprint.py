"""What target a head was fitted to: shapes, and samples of the target's weights."""

from __future__ import annotations

import math
from typing import Any

import torch

from selfspec.decoder import Decoder, is_quantized, weights

_EMBEDDING_SAMPLES = 16
# Rounding to bfloat16 or float16 moves a value by less than this share of it, or this much.
_RELATIVE, _ABSOLUTE = 2**-7, 1e-6


def fingerprint(decoder: Decoder) -> dict[str, Any]:
    """Facts that must agree between the target a head was fitted to and the one it drafts for.

    `weights` holds a few values of the embedding and one of every other floating-point parameter
    below the LM head, so checkpoints are told apart in any dtype, with adapters on top, and, as
    far as it goes, with quantized layers.
    """
    return {
        "model_type": decoder.config.model_type,
        "num_hidden_layers": decoder.depth,
        "hidden_size": decoder.config.hidden_size,
        "vocab_size": decoder.vocab_size,
        "weights": _samples(decoder),
    }


def check_fingerprint(decoder: Decoder, fitted: dict[str, Any], source: str) -> None:
    """Raise ValueError, naming what differs, unless `fitted` describes `decoder`."""
    found = differences(fingerprint(decoder), fitted)
    if found:
        raise ValueError(
            f"the heads in {source} were fitted to another target: {'; '.join(found)}; "
            "load the target they were fitted to, or fit heads to this one"
        )


def differences(own: dict[str, Any], recorded: dict[str, Any]) -> list[str]:
    """What differs between a target's fingerprint and a recorded one; nothing if they agree."""
    found = [
        f"{key} is {own[key]!r} here and {recorded.get(key)!r} there"
        for key in own
        if key != "weights" and own[key] != recorded.get(key)
    ]
    return found or _different_weights(own["weights"], recorded.get("weights", {}))


def _different_weights(own: dict[str, list[float]], fitted: dict[str, list[float]]) -> list[str]:
    if "embedding" not in fitted:
        return ["there is no record of its weights"]
    different = [
        name
        for name in sorted(own.keys() & fitted.keys())
        if not all(
            math.isclose(a, b, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
            for a, b in zip(own[name], fitted[name], strict=True)
        )
    ]
    return [f"the weights differ (first in {different[0]})"] if different else []


@torch.no_grad()
def _samples(decoder: Decoder) -> dict[str, list[float]]:
    _, embedding = next(weights(decoder.causal_lm.get_input_embeddings()))
    samples = {"embedding": _values(embedding, _EMBEDDING_SAMPLES)}
    for name, tensor in weights(decoder.layers):
        if "lora_" not in name and not is_quantized(tensor):
            samples[name.replace(".base_layer", "")] = _values(tensor, 1)
    return samples


def _values(tensor: torch.Tensor, count: int) -> list[float]:
    flat = tensor.detach().reshape(-1)
    places = torch.arange(1, count + 1) * (flat.numel() - 1) // (count + 1)
    return [float(f"{value:.6g}") for value in flat[places.to(flat.device)].float().tolist()]
