"""The KV cache: slot index = position, one length per row, so rejecting drafts costs nothing."""

from selfspec.decoder.cache.cache import (
    LayerKV,
    RowStates,
    SlotCache,
    StepCache,
    join_rows,
    take_row,
)
from selfspec.decoder.cache.int8 import RoundedCache
from selfspec.decoder.cache.layer import SlicedViews, SlotLayer, Switch, Window
from selfspec.decoder.cache.masks import WIDEST
from selfspec.decoder.cache.recurrent import Inputs, KernelCall, RecurrentLayer

__all__ = [
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
    "take_row",
]
