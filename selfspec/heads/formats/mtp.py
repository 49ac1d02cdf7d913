"""Multi-token prediction layers in a checkpoint's own files, which transformers does not load."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from selfspec.decoder import Decoder
from selfspec.heads.files import CheckpointFiles
from selfspec.heads.formats.files import check_stored
from selfspec.heads.mtp import MtpHead, MtpLayer, one_layer


@dataclass(frozen=True)
class Layout:
    """Names of the tensors of a multi-token prediction layer.

    Attributes:
        root: prefix of all of them; `{depth}` is the target's number of layers.
        embedding_norm: norm of the embedding.
        hidden_norm: norm of the hidden state.
        projection: maps both to the layer's input.
        norm: norm after the layer, or `None`.
        block: prefix of the layer's own tensors, after the root.
        hidden_first: whether the projection reads the hidden state first.
        copies: names of copies of the target's embeddings and LM head.
    """

    root: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str | None
    block: str = ""
    hidden_first: bool = False
    copies: tuple[str, ...] = ()


LAYOUTS = (
    Layout(  # DeepSeek-V3 and R1, GLM-4.5 to 4.7
        root="model.layers.{depth}.",
        embedding_norm="enorm",
        hidden_norm="hnorm",
        projection="eh_proj",
        norm="shared_head.norm",
        copies=("embed_tokens", "shared_head.head"),
    ),
    Layout(  # MiMo
        root="model.mtp_layers.0.",
        embedding_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        projection="input_proj",
        norm="final_layernorm",
        hidden_first=True,
    ),
    Layout(  # Qwen3-Next, Qwen3.5, EXAONE, Mellum
        root="mtp.",
        embedding_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        projection="fc",
        norm="norm",
        block="layers.0.",
        copies=("embed_tokens", "lm_head"),
    ),
    Layout(  # ERNIE-4.5
        root="model.",
        embedding_norm="mtp_emb_norm.0",
        hidden_norm="mtp_hidden_norm.0",
        projection="mtp_linear_proj.0",
        norm=None,
        block="mtp_block.0.",
    ),
)
# Families whose layer is fed its own output before the norm, as in vLLM.
_FEEDS_RAW = ("glm4_moe", "glm4_moe_lite")


@dataclass(frozen=True)
class FoundMtp:
    """A multi-token prediction layer in a checkpoint.

    Attributes:
        layout: how its tensors are named.
        root: their prefix.
        names: all of them.
    """

    layout: Layout
    root: str
    names: tuple[str, ...]


def find_mtp(checkpoint: CheckpointFiles, depth: int) -> FoundMtp | None:
    """The multi-token prediction layer of a checkpoint, whole or not, by its tensors' names.

    Args:
        checkpoint: the target's files.
        depth: number of layers of the target.
    """
    for layout in LAYOUTS:
        root = layout.root.format(depth=depth)
        parts = (layout.projection, layout.embedding_norm, layout.hidden_norm)
        entry = tuple(f"{root}{part}." for part in parts)
        outside = tuple(f"{root}{part}." for part in (layout.norm, *layout.copies) if part)
        # An ordinary layer at this depth is one of a deeper model.
        if any(name.startswith(entry) for name in checkpoint.files):
            all_of_it = (*entry, *outside, f"{root}{layout.block}")
            own = tuple(name for name in checkpoint.files if name.startswith(all_of_it))
            return FoundMtp(layout, root, own)
    return None


def read_mtp(decoder: Decoder, found: FoundMtp, checkpoint: CheckpointFiles) -> MtpHead:
    """Make the head.

    Raises:
        FileNotFoundError: there is no such file as the index names.
        ValueError: a tensor is missing or packed, a file is damaged, or the layer is of another
            class than the target's.
    """
    layout, root = found.layout, found.root
    copies = tuple(f"{root}{name}." for name in layout.copies)
    tensors = checkpoint.read(name for name in found.names if not name.startswith(copies))
    for name, tensor in tensors.items():
        check_stored(name, tensor)
    named = {name.removeprefix(root): tensor for name, tensor in tensors.items()}
    outside = {
        "embedding_norm": layout.embedding_norm,
        "hidden_norm": layout.hidden_norm,
        "projection": layout.projection,
        "norm": layout.norm,
    }
    weights: dict[str, Tensor] = {}
    for own, theirs in outside.items():
        for part in ("weight", "bias"):
            if theirs is not None and f"{theirs}.{part}" in named:
                weights[f"{own}.{part}"] = named.pop(f"{theirs}.{part}")
    block = {name.removeprefix(layout.block): tensor for name, tensor in named.items()}
    kind = decoder.config.model_type
    options = {
        "sparse": any(re.search(r"\bexperts\.", name) for name in block),
        "hidden_first": layout.hidden_first,
        "bias": "projection.bias" in weights,
        "norm": layout.norm is not None,
        "feeds_normed": layout.norm is not None and kind not in _FEEDS_RAW,
    }
    head = MtpHead.build(decoder, 0, **options)
    _fill(head, weights, one_layer(decoder, options["sparse"], block))
    return head.eval().requires_grad_(False)


def _fill(head: MtpHead, weights: Mapping[str, Tensor], block: nn.Module) -> None:
    """Load the tensors around the layer, and the layer's from another one."""
    layer = head.layer
    inside = "layer.block." if isinstance(layer, MtpLayer) else "layer."
    state = {inside + name: tensor for name, tensor in block.state_dict().items()}
    state |= weights
    if isinstance(layer, MtpLayer):
        state = {n.replace("norm.", "layer.norm.") if n.startswith("norm.") else n: t
                 for n, t in state.items()}  # fmt: skip
    missing = sorted(head.state_dict().keys() - state.keys())
    if missing:
        raise ValueError(f"the checkpoint's multi-token prediction layer lacks {missing}")
    head.load_state_dict(state)
