"""What target a head was fitted to: shapes, and a digest of the target's weights."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from selfspec.decoder import Decoder

_SAMPLES = 64  # values read per tensor: enough to tell checkpoints apart, cheap on any size


def fingerprint(decoder: Decoder) -> dict[str, Any]:
    """Facts that must agree between the target a head was fitted to and the one it drafts for.

    The digest covers the embedding and every norm and bias, sampled and cast to bfloat16, so a
    checkpoint keeps its fingerprint in another dtype and with quantized linear layers.
    """
    return {
        "model_type": decoder.config.model_type,
        "num_hidden_layers": decoder.depth,
        "hidden_size": decoder.config.hidden_size,
        "vocab_size": decoder.vocab_size,
        "weights": _digest(decoder),
    }


def check_fingerprint(decoder: Decoder, fitted: dict[str, Any], source: str) -> None:
    """Raise ValueError, naming what differs, unless `fitted` describes `decoder`."""
    own = fingerprint(decoder)
    differences = [
        f"{key} is {own[key]!r} here and {fitted.get(key)!r} there"
        for key in own
        if own[key] != fitted.get(key)
    ]
    if differences:
        raise ValueError(
            f"the heads in {source} were fitted to another target: {'; '.join(differences)}; "
            "load the target they were fitted to, or fit heads to this one"
        )


@torch.no_grad()
def _digest(decoder: Decoder) -> str:
    digest = hashlib.sha256()
    tensors = dict(decoder.causal_lm.get_input_embeddings().named_parameters(prefix="embedding"))
    tensors |= {name: p for name, p in decoder.base.named_parameters() if p.ndim == 1}
    for name, tensor in sorted(tensors.items()):
        if "lora_" in name or not tensor.is_floating_point():
            continue
        flat = tensor.detach().reshape(-1)
        step = max(1, flat.numel() // _SAMPLES)
        values = flat[::step][:_SAMPLES].to("cpu", torch.bfloat16).view(torch.int16)
        digest.update(name.removeprefix("base_model.model.").encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:16]
