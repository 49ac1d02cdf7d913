"""Exits inside serving engines: parts that the plugins of all engines share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from selfspec.config import DraftConfig
from selfspec.decoder import Decoder
from selfspec.decoder.checkpoints import auto_class
from selfspec.drafters.engine import Engine
from selfspec.heads import HEADS_CONFIG, CheckpointFiles, ExitHead, LoraHead, find_heads, load_heads
from selfspec.serving import SCHEME

KINDS = ("shared", "lens", "lora", "block", "fused")
"""Kinds of heads that draft in place. For others, engines have their own methods."""
_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "final_norm")


class Exit(NamedTuple):
    """An exit of a target."""

    heads: str  # folder or hub id of the heads; if empty, those in the target's folder, if any
    kind: str | None  # of the head; `None`: that of the head fitted at the exit, else `shared`
    exit_layer: int | None  # layers below the exit; `None`: the exit of the first head

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
    """Load the head at an exit, and its target without weights.

    `norm` is the engine's final norm of the target, which some heads copy; it is not needed to read
    the head's kind and exit.

    Raises:
        FileNotFoundError: the folder or repository of heads does not exist.
        ValueError: the heads belong to another target, or do not draft in place.
    """
    config = AutoConfig.from_pretrained(
        model, revision=revision, trust_remote_code=trust_remote_code
    )
    with torch.device("meta"):
        bare = auto_class(config).from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    decoder = Decoder(bare)
    if norm is not None and decoder.final_norm is not None:
        decoder.final_norm.load_state_dict(norm.state_dict(), assign=True)
    heads: Sequence[ExitHead] = ()
    if wanted.heads or (Path(model) / HEADS_CONFIG).is_file():
        folder = find_heads(wanted.heads or model)
        if not (folder / HEADS_CONFIG).is_file():
            raise ValueError(
                f"no {HEADS_CONFIG} in {folder}; for published heads use the engine's own methods "
                "(eagle, eagle3, medusa)"
            )
        heads = load_heads(decoder, folder, CheckpointFiles(model, revision=revision))
    head = Engine(decoder, heads).head(DraftConfig(exit_layer=wanted.exit_layer, head=wanted.kind))
    if head.kind not in KINDS:
        raise ValueError(
            f"heads of the kind {head.kind} do not draft in place, these do: {', '.join(KINDS)}; "
            "docs/serving.md has the engines' methods for others"
        )
    if head.drafts_at_once:
        raise ValueError(
            f"this {head.kind} head makes all drafts of a round in one pass, which selfspec's "
            "plugins do not do; fit it without `parallel`"
        )
    return decoder, head


def draft_logits(head: ExitHead, hidden: Tensor, logits: Tensor) -> Tensor:
    """Draft logits `[tokens, vocabulary]`; -inf for tokens that the head cannot draft.

    `hidden` `[tokens, hidden]` is the output of the head, `logits` what the LM head makes of it.
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
    """Replaces a final norm; adds the residual to the hidden states without normalizing them."""

    def forward(
        self, hidden: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The residual stream; with the residual, if it is passed separately."""
        return hidden if residual is None else (hidden + residual, residual)


class Body(NamedTuple):
    """The part of an engine's causal LM with the decoder layers and the final norm."""

    module: nn.Module
    layers: str  # name of the list of layers
    norm: str  # name of the final norm


def body_of(model: nn.Module) -> Body:
    """The body of an engine's causal LM; ValueError if the model has none."""
    for body in (getattr(model, name, None) for name in ("model", "transformer")):
        parts = dict(body.named_children()) if isinstance(body, nn.Module) else {}
        lists = [name for name in ("layers", "h") if isinstance(parts.get(name), nn.ModuleList)]
        norms = [name for name in _FINAL_NORMS if name in parts]
        if body is not None and lists and norms:
            return Body(body, lists[0], norms[0])
    raise ValueError(
        f"the engine's {type(model).__name__} has no list of decoder layers followed by a "
        "final norm, so its first layers cannot draft; serve an exported draft model instead"
    )
