"""The ragged KV cache: slot = position, one length per row, rejection for free.

Every layer owns buffers `[rows, kv_heads, capacity, head_dim]`. A token's keys and values lie in
the slot of its position, whatever padding the caller used, so rows may have different lengths and
sliding windows stay exact. Slots behind a row's length are stale: masks, which come from lengths,
never show them, and later tokens overwrite them. Rejecting drafts is then not advancing a length.

This package alone knows transformers' cache API.
"""

from selfspec.decoder.cache.cache import RowStates, SlotCache, StepCache, Strip, join_rows, take_row
from selfspec.decoder.cache.int8 import RoundedCache
from selfspec.decoder.cache.layer import Pieces, SlotLayer, Window
from selfspec.decoder.cache.masks import WIDEST

__all__ = [
    "WIDEST",
    "Pieces",
    "RoundedCache",
    "RowStates",
    "SlotCache",
    "SlotLayer",
    "StepCache",
    "Strip",
    "Window",
    "join_rows",
    "take_row",
]
