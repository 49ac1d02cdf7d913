"""Exit heads: their kinds, calibrators, files, and teacher forcing."""

from selfspec.heads.base import (
    HEAD_KINDS,
    ExitHead,
    build_head,
    check_distinct,
    copy_final_norm,
    head_class,
    move_to_exit,
    register_head,
)
from selfspec.heads.block import BlockHead
from selfspec.heads.calibrator import Calibrator, Confidence
from selfspec.heads.dflash import DFlashHead
from selfspec.heads.eagle import EagleHead
from selfspec.heads.eagle3 import Eagle3Head
from selfspec.heads.files import CheckpointFiles, replacing
from selfspec.heads.formats import load_shipped, ships_head
from selfspec.heads.fused import FusedHead
from selfspec.heads.hub import CARD_NAME, find_heads, heads_card, push_heads
from selfspec.heads.lens import LensHead
from selfspec.heads.lora import LoraHead
from selfspec.heads.medusa import MedusaHead
from selfspec.heads.mtp import MtpHead
from selfspec.heads.shared import SharedHead
from selfspec.heads.store import (
    HEADS_CONFIG,
    differences,
    fingerprint,
    load_heads,
    save_heads,
)
from selfspec.heads.teacher_forcing import TargetStates, draft_states, target_states

__all__ = [
    "CARD_NAME",
    "HEADS_CONFIG",
    "HEAD_KINDS",
    "BlockHead",
    "Calibrator",
    "CheckpointFiles",
    "Confidence",
    "DFlashHead",
    "Eagle3Head",
    "EagleHead",
    "ExitHead",
    "FusedHead",
    "LensHead",
    "LoraHead",
    "MedusaHead",
    "MtpHead",
    "SharedHead",
    "TargetStates",
    "build_head",
    "check_distinct",
    "copy_final_norm",
    "differences",
    "draft_states",
    "find_heads",
    "fingerprint",
    "head_class",
    "heads_card",
    "load_heads",
    "load_shipped",
    "move_to_exit",
    "push_heads",
    "register_head",
    "replacing",
    "save_heads",
    "ships_head",
    "target_states",
]
