"""A folded exit on disk: checkpoint, tokenizer, side-car and a page on how to launch it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import selfspec
from selfspec.decoder import Decoder
from selfspec.export.files import new_folder
from selfspec.export.folding import fold
from selfspec.export.guide import draft_guide
from selfspec.heads import CARD_NAME, ExitHead
from selfspec.heads.fingerprint import fingerprint

SIDE_CAR = "selfspec_export.json"
_FORMAT = 1


@dataclass(frozen=True)
class Exported:
    """What was folded into a draft checkpoint.

    Attributes:
        target: the checkpoint it drafts for: a hub id or a folder.
        architecture: class of the model.
        exit_layer: number of the target's layers below the exit.
        head: kind of the exit head.
        layers: layers of the draft.
        parameters: its parameters.
        num_draft_tokens: drafts a round that the launch lines ask for.
        drafted: how many tokens it can draft, if its vocabulary was trimmed.
        own: its parts that are not the target's.
    """

    target: str
    architecture: str
    exit_layer: int
    head: str
    layers: int
    parameters: int
    num_draft_tokens: int
    drafted: int | None
    own: tuple[str, ...]


def export_draft(
    decoder: Decoder,
    head: ExitHead,
    folder: str | Path,
    *,
    target: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    num_draft_tokens: int = 4,
) -> Exported:
    """Write an exit as a stock checkpoint, for whoever takes a draft model.

    Args:
        decoder: the target.
        head: the exit head (`fold` says which can be folded).
        folder: made whole or not at all.
        target: hub id or folder of the target, for the launch lines.
        tokenizer: the target's, to be written beside.
        num_draft_tokens: drafts a round that the launch lines ask for.

    Raises:
        FileExistsError: `folder` is there already, with something in it.
        ValueError: the head cannot be folded.
    """
    with new_folder(folder) as scratch:
        draft = fold(decoder, head)
        exported = _exported(head, draft, target, num_draft_tokens)
        config = draft.generation_config
        assert config is not None
        config.num_assistant_tokens = num_draft_tokens
        config.num_assistant_tokens_schedule = "constant"
        draft.save_pretrained(scratch)
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        side_car = json.dumps(_side_car(decoder, head, exported), indent=2)
        (scratch / SIDE_CAR).write_text(side_car + "\n", encoding="utf-8")
        (scratch / CARD_NAME).write_text(draft_guide(exported, str(folder)), encoding="utf-8")
    return exported


def _exported(
    head: ExitHead, draft: PreTrainedModel, target: str, num_draft_tokens: int
) -> Exported:
    parts = {"layer": head.layer, "norm": getattr(head, "norm", None)}
    corrected = head.kind in ("lens", "lora") or head.vocab_ids is not None
    return Exported(
        target=target,
        architecture=type(draft).__name__,
        exit_layer=head.exit_layer,
        head=head.kind,
        layers=head.exit_layer + (head.layer is not None),
        parameters=draft.num_parameters(),
        num_draft_tokens=num_draft_tokens,
        drafted=None if head.vocab_ids is None else len(head.vocab_ids),
        own=tuple(
            [name for name, part in parts.items() if part is not None] + ["lm_head"] * corrected
        ),
    )


def _side_car(decoder: Decoder, head: ExitHead, exported: Exported) -> dict[str, Any]:
    return {
        "format_version": _FORMAT,
        "selfspec_version": selfspec.__version__,
        "transformers_version": transformers.__version__,
        **asdict(exported),
        "facts": head.facts,
        "fingerprint": fingerprint(decoder),
    }
