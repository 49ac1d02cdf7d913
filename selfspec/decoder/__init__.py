"""Runs any span of decoder layers of any Hugging Face causal language model.

While a decoder is entered, the model's body iterates over gates instead of its layers. A gate
records what the body calls its layer with; after the last one, one loop runs the layers of the span
(`run.py`), from the embeddings or from stored hidden states, and what it leaves (the residual
stream before the final norm) is kept. The model's own `forward` still makes embeddings, positions
and rotary tables, so nothing of a family's modelling code is copied, and a layer with all that
hangs on it (adapters, quantized weights, hooks, device placement) is called as it is. Outside `with
decoder:` the model is exactly what it was.

This package alone knows transformers' layer API.
"""

from selfspec.decoder.decoder import Decoder, entered, locked
from selfspec.decoder.devices import Ranks, at_hand, bare_copy, device_of, weight_of, weights
from selfspec.decoder.families import find_layers
from selfspec.decoder.foreign_code import has_foreign_code, without_gradients
from selfspec.decoder.mixers import is_mixer
from selfspec.decoder.packing import Packing
from selfspec.decoder.passes import (
    CACHE,
    Approximation,
    OwnLayer,
    Pass,
    Skips,
    Span,
    StandaloneLayer,
    cache_name,
)
from selfspec.decoder.quantized import is_quantized

__all__ = [
    "CACHE",
    "Approximation",
    "Decoder",
    "OwnLayer",
    "Packing",
    "Pass",
    "Ranks",
    "Skips",
    "Span",
    "StandaloneLayer",
    "at_hand",
    "bare_copy",
    "cache_name",
    "device_of",
    "entered",
    "find_layers",
    "has_foreign_code",
    "is_mixer",
    "is_quantized",
    "locked",
    "weight_of",
    "weights",
    "without_gradients",
]
