"""The KV cache: slot index = position, one length per row, so rejecting drafts costs nothing."""

from selfspec.decoder.cache.cache import LayerKV, SlotCache, StepCache
from selfspec.decoder.cache.copies import RowStates, join_rows, load_cache, store_cache, take_row
from selfspec.decoder.cache.int8 import RoundedCache
from selfspec.decoder.cache.layer import SlotLayer
from selfspec.decoder.cache.masks import WIDEST
from selfspec.decoder.cache.recurrent import Inputs, KernelCall, RecurrentLayer
from selfspec.decoder.cache.window import GROWTH, SlicedViews, Switch, Window

__all__ = [
    "GROWTH",
    "WIDEST",
    "Inputs",
    "KernelCall",
    "LayerKV",
    "RecurrentLayer",
    "RoundedCache",
    "RowStates",
    "SlicedViews",
    "SlotCache",
    "SlotLayer",
    "StepCache",
    "Switch",
    "Window",
    "join_rows",
    "load_cache",
    "store_cache",
    "take_row",
]
