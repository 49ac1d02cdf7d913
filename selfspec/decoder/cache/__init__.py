"""The KV cache: slot index = position, one length per row, so rejecting drafts costs nothing."""

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
