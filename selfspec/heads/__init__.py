"""Exit heads: kinds, save and load."""

from selfspec.heads.base import ExitHead, check_exit_layer
from selfspec.heads.block import BlockHead
from selfspec.heads.calibrator import Calibrator
from selfspec.heads.fused import FusedHead
from selfspec.heads.kinds import HEAD_KINDS, head_class
from selfspec.heads.lens import LensHead
from selfspec.heads.lora import LoraHead
from selfspec.heads.shared import SharedHead
from selfspec.heads.store import CONFIG_NAME, load_heads, save_heads

__all__ = [
    "CONFIG_NAME",
    "HEAD_KINDS",
    "BlockHead",
    "Calibrator",
    "ExitHead",
    "FusedHead",
    "LensHead",
    "LoraHead",
    "SharedHead",
    "check_exit_layer",
    "head_class",
    "load_heads",
    "save_heads",
]
