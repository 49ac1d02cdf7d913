"""Exit heads: kinds, save and load."""

from selfspec.heads.base import ExitHead, check_distinct, check_exit_layer
from selfspec.heads.block import BlockHead
from selfspec.heads.calibrator import Calibrator, Judge
from selfspec.heads.fused import FusedHead
from selfspec.heads.hub import CARD_NAME, find_heads, heads_card, push_heads
from selfspec.heads.lens import LensHead
from selfspec.heads.lora import LoraHead
from selfspec.heads.shared import SharedHead
from selfspec.heads.store import (
    CONFIG_NAME,
    HEAD_KINDS,
    build_head,
    head_class,
    load_heads,
    save_heads,
)

__all__ = [
    "CARD_NAME",
    "CONFIG_NAME",
    "HEAD_KINDS",
    "BlockHead",
    "Calibrator",
    "ExitHead",
    "FusedHead",
    "Judge",
    "LensHead",
    "LoraHead",
    "SharedHead",
    "build_head",
    "check_distinct",
    "check_exit_layer",
    "find_heads",
    "head_class",
    "heads_card",
    "load_heads",
    "push_heads",
    "save_heads",
]
