"""What a serving engine is asked to draft with, whichever engine it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from selfspec.config import DraftConfig
from selfspec.decoder import Decoder
from selfspec.drafters.engine import Engine
from selfspec.heads import (
    CONFIG_NAME,
    CheckpointFiles,
    ExitHead,
    LoraHead,
    find_heads,
    load_heads,
)
from selfspec.serving import SCHEME

KINDS = ("shared", "lens", "lora", "block", "fused")
"""Kinds of heads that draft in place. Engines have methods of their own for the others."""
_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "final_norm")


class Exit(NamedTuple):
    """An exit of a target.

    Attributes:
        heads: folder or hub id of the heads; empty: those beside the target, if there are any.
        kind: the head's kind; `None`: the one fitted at the exit, else `shared`.
        exit_layer: layers below the exit; `None`: that of the first head.
    """

    heads: str
    kind: str | None
    exit_layer: int | None

    @classmethod
    def parse(cls, name: str) -> Exit:
        """Read `selfspec:[HEADS][@[KIND:]EXIT]`."""
        name = name.removeprefix(SCHEME)
        place = re.search(r"@(?:(\w+):)?(\d+)$", name)
        if place is None:
            return cls(name, None, None)
        return cls(name[: place.start()], place[1], int(place[2]))


def load_head(
    model: str,
    wanted: Exit,
    *,
    dtype: torch.dtype,
    norm: nn.Module | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Decoder, ExitHead]:
    """The head at an exit, and the target without weights that it was made for.

    Args:
        model: folder or hub id of the target.
        wanted: the exit.
        dtype: the engine's dtype of the target.
        norm: the engine's final norm of the target, if the head is going to be used.
        revision: of the target on the hub.
        trust_remote_code: whether the target's own code may run.

    Raises:
        FileNotFoundError: there are no such heads.
        ValueError: the heads belong to another target, or do not draft in place.
    """
    config = AutoConfig.from_pretrained(
        model, revision=revision, trust_remote_code=trust_remote_code
    )
    with torch.device("meta"):
        bare = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    decoder = Decoder(bare)
    if norm is not None and decoder.final_norm is not None:
        decoder.final_norm.load_state_dict(norm.state_dict(), assign=True)
    heads: Sequence[ExitHead] = ()
    if wanted.heads or (Path(model) / CONFIG_NAME).is_file():
        folder = find_heads(wanted.heads or model)
        if not (folder / CONFIG_NAME).is_file():
            raise ValueError(
                f"no {CONFIG_NAME} in {folder}; heads that others published are drafted with by "
                "the engine's own methods (eagle, eagle3, medusa)"
            )
        heads = load_heads(decoder, folder, CheckpointFiles(model, revision=revision))
    head = Engine(decoder, heads).head(DraftConfig(exit_layer=wanted.exit_layer, head=wanted.kind))
    if head.kind not in KINDS:
        raise ValueError(
            f"heads of the kind {head.kind} do not draft in place, these do: {', '.join(KINDS)}; "
            "for the others engines have methods of their own, see docs/serving.md"
        )
    if head.drafts_at_once:
        raise ValueError(
            f"this {head.kind} head makes all drafts of a round in one pass, which selfspec's "
            "plugins do not do; fit it without `parallel`"
        )
    return decoder, head


def draft_logits(head: ExitHead, hidden: Tensor, logits: Tensor) -> Tensor:
    """Draft logits `[tokens, vocabulary]`; -inf for tokens that the head cannot draft.

    Args:
        head: the head.
        hidden: `[tokens, hidden]` its output.
        logits: `[tokens, vocabulary]` what the target's LM head makes of it.
    """
    ids = head.vocab_ids
    drafted = logits if ids is None else logits[:, ids]
    if isinstance(head, LoraHead):
        drafted = drafted + head.adapt(hidden)
    if ids is None:
        return drafted
    return torch.full_like(logits, float("-inf")).index_copy_(1, ids, drafted)


# An engine's model of the target


class Join(nn.Module):
    """In the place of a final norm: hands on the residual stream as it is."""

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> Any:
        """The stream, beside its residual part if that comes apart."""
        return hidden if residual is None else (hidden + residual, residual)


def body_of(model: nn.Module) -> nn.Module:
    """The part of an engine's causal LM that owns the layers.

    Raises:
        ValueError: the model is built in another way.
    """
    for body in (getattr(model, name, None) for name in ("model", "transformer")):
        if isinstance(body, nn.Module) and layers_name(body) and norm_name(body):
            return body
    raise ValueError(
        f"the engine's {type(model).__name__} has no list of decoder layers with a final norm "
        "behind it, so its first layers cannot draft; serve an exported draft model instead"
    )


def layers_name(body: nn.Module) -> str | None:
    """What the list of decoder layers is called."""
    lists = [name for name, part in body.named_children() if isinstance(part, nn.ModuleList)]
    return next((name for name in ("layers", "h") if name in lists), None)


def norm_name(body: nn.Module) -> str | None:
    """What the final norm is called."""
    parts = dict(body.named_children())
    return next((name for name in _FINAL_NORMS if name in parts), None)
