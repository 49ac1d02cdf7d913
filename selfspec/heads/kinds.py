"""The kinds of exit heads, by name."""

from __future__ import annotations

from selfspec.config import unknown_name
from selfspec.heads.base import ExitHead
from selfspec.heads.block import BlockHead
from selfspec.heads.fused import FusedHead
from selfspec.heads.lens import LensHead
from selfspec.heads.lora import LoraHead
from selfspec.heads.shared import SharedHead

HEAD_KINDS: dict[str, type[ExitHead]] = {
    head.kind: head for head in (SharedHead, LensHead, LoraHead, BlockHead, FusedHead)
}


def head_class(kind: str) -> type[ExitHead]:
    """The class of a kind; ValueError lists the known ones."""
    if kind not in HEAD_KINDS:
        raise ValueError(unknown_name("head kind", kind, list(HEAD_KINDS)))
    return HEAD_KINDS[kind]
