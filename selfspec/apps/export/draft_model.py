"""An exit as a draft model: a stock checkpoint for vLLM and other engines, and how to launch it."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import selfspec
from selfspec.apps.export.guides import guide, new_folder
from selfspec.config import JsonObject
from selfspec.decoder import Decoder
from selfspec.decoder.families import layer_windows
from selfspec.heads import CARD_NAME, ExitHead, LensHead, LoraHead, fingerprint

FOLDABLE = ("block", "lora", "lens", "shared")
"""Kinds of heads that can be folded, the best drafters first."""
SIDE_CAR = "selfspec_export.json"


@dataclass(frozen=True)
class Exported:
    """What a draft checkpoint was made from.

    Attributes:
        target: the checkpoint it drafts for: a hub id or a folder.
        architecture: class of the model.
        exit_layer: number of the target's layers below the exit.
        head: kind of the exit head.
        layers: layers of the draft model.
        parameters: parameters of the draft model.
        num_draft_tokens: drafts a round in the launch lines.
        drafted: number of tokens it can draft if its vocabulary was trimmed, else `None`.
    """

    target: str
    architecture: str
    exit_layer: int
    head: str
    layers: int
    parameters: int
    num_draft_tokens: int
    drafted: int | None


def export_draft(
    decoder: Decoder,
    head: ExitHead,
    folder: str | Path,
    *,
    target: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    num_draft_tokens: int = 4,
) -> Exported:
    """Write an exit as a stock checkpoint, for any engine that takes a draft model.

    Args:
        decoder: the target.
        head: the exit head; `fold` says which kinds it can be.
        folder: created as a whole, or not at all if there is an error.
        target: hub id or folder of the target, for the launch lines.
        tokenizer: the target's tokenizer, to save with the checkpoint.
        num_draft_tokens: drafts a round in the launch lines.

    Raises:
        FileExistsError: `folder` exists and is not empty.
        ValueError: the head cannot be folded.
    """
    with new_folder(folder) as scratch:
        draft = fold(decoder, head)
        exported = Exported(
            target=target,
            architecture=type(draft).__name__,
            exit_layer=head.exit_layer,
            head=head.kind,
            layers=head.exit_layer + (head.layer is not None),
            parameters=draft.num_parameters(),
            num_draft_tokens=num_draft_tokens,
            drafted=None if head.vocab_ids is None else len(head.vocab_ids),
        )
        assert draft.generation_config is not None
        draft.generation_config.num_assistant_tokens = num_draft_tokens
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.save_pretrained(scratch)
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        side_car = {
            "format_version": 1,
            "selfspec_version": selfspec.__version__,
            "transformers_version": transformers.__version__,
            **asdict(exported),
            "facts": head.facts,
            "fingerprint": fingerprint(decoder),
        }
        (scratch / SIDE_CAR).write_text(json.dumps(side_car, indent=2) + "\n", encoding="utf-8")
        (scratch / CARD_NAME).write_text(draft_guide(exported, str(folder)), encoding="utf-8")
    return exported


# Folding


def check_foldable(head: ExitHead, fitted: Sequence[ExitHead] = ()) -> None:
    """Raise ValueError unless `head` can be folded; it names the nearest `fitted` head that can."""
    if head.kind in FOLDABLE:
        return
    others = [other for other in fitted if other.kind in FOLDABLE]
    others.sort(key=lambda h: (abs(h.exit_layer - head.exit_layer), FOLDABLE.index(h.kind)))
    kind, exit_layer = "shared", max(1, head.exit_layer)
    if others:
        kind, exit_layer = others[0].kind, others[0].exit_layer
    raise ValueError(
        f"a {head.kind} head does not fold into a stock checkpoint, which cannot compute what the "
        f"head reads; the nearest head that folds is {kind!r} at exit_layer {exit_layer} "
        f"(--head {kind} --exit-layer {exit_layer})"
    )


@torch.no_grad()
def fold(decoder: Decoder, head: ExitHead) -> PreTrainedModel:
    """A model of the target's own class that predicts what an exit predicts.

    It has the layers below the exit, then the head's own layer if there is one, the head's norm as
    its final norm, and an LM head that contains the correction of a lens or an adapter. If the
    head's vocabulary is trimmed, its most likely token is still the head's.

    It is to be saved, not to be run: it shares unchanged weights with the target, and buffers that
    checkpoints do not hold are missing.

    Raises:
        ValueError: the head's kind cannot be folded; the target is quantized or has adapters; its
            class cannot have these layers.
    """
    check_foldable(head)
    _check_plain(decoder)
    layers = [*range(head.exit_layer), *([] if head.layer is None else [head.place])]
    if decoder.attention_layers and not set(layers) & set(decoder.attention_layers):
        raise ValueError(
            f"a {type(decoder.causal_lm).__name__} needs a layer with attention, and the layers "
            f"below exit_layer {head.exit_layer} have none; choose an exit_layer above "
            f"{decoder.attention_layers[0]}"
        )
    lm_head = _folded_lm_head(decoder, head)
    config = with_layers(decoder.causal_lm.config, layers)
    text = config.get_text_config(decoder=True)
    if lm_head:
        config.tie_word_embeddings = text.tie_word_embeddings = False
    config.dtype = decoder.dtype
    windows, wanted = layer_windows(text, len(layers)), [decoder.windows[each] for each in layers]
    if windows != wanted:
        raise ValueError(
            f"a {type(decoder.causal_lm).__name__} of {len(layers)} layers would have attention "
            f"windows {windows}, and the {head.kind} head needs {wanted}; choose another exit_layer"
        )
    with torch.device("meta"):
        draft = type(decoder.causal_lm)(config)
    _load(draft, _weights(decoder, head, lm_head), head)
    # A draft model needs no settings for sampling, and transformers loads some that it cannot save.
    given = decoder.causal_lm.generation_config
    assert given is not None
    ids = {"bos_token_id": given.bos_token_id, "eos_token_id": given.eos_token_id}
    draft.generation_config = GenerationConfig(**ids)
    return draft.eval()


def _check_plain(decoder: Decoder) -> None:
    """Raise ValueError if the target is quantized or has adapters."""
    model = decoder.causal_lm
    name = type(model).__name__
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(f"the {name} is quantized; fold the checkpoint it was made from")
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError(f"the {name} carries adapters; merge them first (merge_and_unload)")


def _weights(decoder: Decoder, head: ExitHead, lm_head: dict[str, Tensor]) -> dict[str, Tensor]:
    """The draft model's weights by their names in a checkpoint."""
    model = decoder.causal_lm
    names = {module: f"{name}." for name, module in model.named_modules()}
    layers = names[decoder.layers]
    weights = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith(layers)
        or int(name.removeprefix(layers).split(".", 1)[0]) < head.exit_layer
    }
    if head.layer is not None:
        prefix = f"{layers}{head.exit_layer}."
        weights |= _in_dtypes_of(decoder.layers[head.place], head.layer, prefix)
    norm: nn.Module | None = getattr(head, "norm", None)
    if norm is not None and decoder.final_norm is not None:
        weights |= _in_dtypes_of(decoder.final_norm, norm, names[decoder.final_norm])
    return weights | {names[decoder.lm_head] + name: tensor for name, tensor in lm_head.items()}


def _in_dtypes_of(original: nn.Module, module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """The weights of a head's module in the dtypes of the target's module it is a copy of."""
    dtypes = {name: tensor.dtype for name, tensor in original.state_dict().items()}
    return {prefix + name: t.to(dtypes[name]) for name, t in module.state_dict().items()}


def _load(draft: PreTrainedModel, weights: dict[str, Tensor], head: ExitHead) -> None:
    try:
        draft.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        if head.layer is None:
            raise ValueError(
                f"a {type(draft).__name__} of {head.exit_layer} layers has other weights than the "
                "first layers of the target, so that no exit of it can be folded"
            ) from error
        raise ValueError(
            f"layer {head.exit_layer} of a {type(draft).__name__} is built unlike layer "
            f"{head.place}, of which the {head.kind} head has a copy; fit the head with "
            f"place={head.exit_layer}"
        ) from error
    draft.tie_weights()


# The config of a model with only some of the layers

# Config fields that list layers by index, and lists that may be as long as there are layers.
_LAYER_INDICES = ("mlp_only_layers", "moe_layers", "attn_layer_indices", "hybrid_layer_ids")
_OTHER_LISTS = ("architectures", "ssm_multipliers", "mlp_multipliers")


def with_layers(config: PreTrainedConfig, layers: Sequence[int]) -> PreTrainedConfig:
    """The config of a model that has only these layers of the one that `config` describes."""
    short = copy.deepcopy(config)
    text = short.get_text_config(decoder=True)
    fields = _per_layer(text.to_dict(), text.num_hidden_layers, layers)
    for name, value in {"num_hidden_layers": len(layers), **fields}.items():
        setattr(text, name, value)
    # As if read from a file, so that derived fields are computed again.
    return type(short).from_dict(short.to_dict())


def _per_layer(fields: JsonObject, depth: int, layers: Sequence[int]) -> JsonObject:
    """The config fields with one value for each layer, cut to these layers."""
    cut: JsonObject = {}
    for name, value in fields.items():
        if not isinstance(value, (list, tuple)):
            continue
        if name in _LAYER_INDICES:
            cut[name] = [new for new, old in enumerate(layers) if old in value]
        elif len(value) == depth and "token" not in name and name not in _OTHER_LISTS:
            cut[name] = [value[layer] for layer in layers]
    if "attention_types" in fields:  # GPT-Neo run-length encodes its list
        cut["attention_types"] = [[[kind], 1] for kind in cut["attention_layers"]]
    return cut


# The LM head


def _folded_lm_head(decoder: Decoder, head: ExitHead) -> dict[str, Tensor]:
    """Parameters of the draft model's LM head; empty if it is the target's own."""
    weight = _corrected(decoder, head)
    if head.vocab_ids is None:
        return {} if weight is None else {"weight": weight}
    return _expanded(decoder, decoder.lm_head_weight if weight is None else weight, head.vocab_ids)


def _corrected(decoder: Decoder, head: ExitHead) -> Tensor | None:
    """`[vocab, hidden]` W (I + B A) of a lens, W + B A of a LoRA head."""
    if not isinstance(head, (LensHead, LoraHead)):
        return None
    weight = decoder.lm_head_weight
    if isinstance(head, LensHead):
        exact = torch.promote_types(weight.dtype, torch.float32)
        wide, up, down = (
            matrix.to(weight.device, exact) for matrix in (weight, head.up.weight, head.down.weight)
        )
        return (wide + wide @ up @ down).to(weight.dtype)
    adapted: Any = head.lm_head
    rows = slice(None) if head.vocab_ids is None else head.vocab_ids.to(weight.device)
    corrected = weight.detach().clone()
    corrected[rows] += adapted.get_delta_weight("exit").to(weight.device, weight.dtype)
    return corrected


def _expanded(decoder: Decoder, weight: Tensor, vocab_ids: Tensor) -> dict[str, Tensor]:
    """An LM head over all tokens whose most likely token is always among `vocab_ids`.

    The row of any other token is the mean of their rows. So its logit is the mean of theirs, which
    is never the highest. If there is a bias, that of the other tokens is very low.
    """
    ids = vocab_ids.to(weight.device)
    outside = torch.ones(weight.shape[0], dtype=torch.bool, device=weight.device)
    outside[ids] = False
    expanded = weight.detach().clone()
    exact = torch.promote_types(weight.dtype, torch.float32)
    expanded[outside] = weight[ids].to(exact).mean(0).to(weight.dtype)
    bias: Tensor | None = getattr(decoder.lm_head, "bias", None)
    if bias is None:
        return {"weight": expanded}
    low = -1e4  # fits into float16, with the logit added
    return {"weight": expanded, "bias": bias.detach().masked_fill(outside.to(bias.device), low)}


# The guide beside a draft model

_PARTS = {
    "shared": "the target's own final norm and LM head",
    "lens": "the norm and the corrected LM head of a `lens` head",
    "lora": "the norm and the adapted LM head of a `lora` head",
    "block": "the layer and the norm of a `block` head",
}
_TRIMMED = (
    " It was fitted to draft {drafted:,} tokens. Every other token has the mean of their rows in "
    "the LM head, so it is never the most likely one."
)


def draft_guide(exported: Exported, folder: str) -> str:
    """The README of a draft model, with the front matter that the hub reads and launch lines."""
    k = exported.num_draft_tokens
    return guide(
        "draft_model",
        folder=folder,
        vllm={"method": "draft_model", "model": folder, "num_speculative_tokens": k},
        parts=_PARTS[exported.head],
        trimmed="" if exported.drafted is None else _TRIMMED.format(drafted=exported.drafted),
        **asdict(exported),
    )
