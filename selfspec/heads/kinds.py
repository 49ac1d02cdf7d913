"""The kinds of exit heads, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from selfspec.config import unknown_name
from selfspec.decoder import Decoder
from selfspec.heads.base import ExitHead, check_exit_layer
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


def build_head(
    decoder: Decoder, kind: str, exit_layer: int, options: Mapping[str, Any]
) -> ExitHead:
    """A head for `decoder`, as it is before any training.

    Args:
        decoder: the target.
        kind: the head's kind.
        exit_layer: number of layers below the exit.
        options: what the kind takes, such as a rank.

    Raises:
        ValueError: the kind is unknown, the exit out of range, or the kind does not take an option,
            or not its value.
    """
    head_type = head_class(kind)
    check_exit_layer(decoder, exit_layer, head_type.lowest_exit)
    try:
        head = head_type.build(decoder, exit_layer, **options)
    except TypeError as error:
        raise ValueError(f"{kind} head: options {dict(options)} do not fit: {error}") from None
    for name in options:
        if name not in head.options:
            raise ValueError(unknown_name(f"option of a {kind} head", name, list(head.options)))
    return head
