"""The heads of a fit: built, started from saved ones, trimmed, and with their fitted weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import Field, field_validator
from torch import Tensor

from selfspec.config import JsonObject, StrictConfig
from selfspec.decoder import Decoder
from selfspec.heads import ExitHead, build_head, check_distinct, head_class, load_heads

from ..data import Blocks


class HeadConfig(StrictConfig):
    """An exit head to fit.

    Attributes:
        kind: `lens`, `lora`, `block`, `fused`, `eagle3`, `dflash`, `eagle`, `medusa` or `mtp`;
            `shared` has nothing to fit and is only measured.
        exit_layer: number of layers below the exit; 0 for the last five kinds.
        options: options of the kind: `rank`, `place`, `feature_layers`, `heads` and so on.
        vocab_size: size of the draft vocabulary, the most frequent tokens of the training text; 0
            for all tokens.
    """

    kind: str
    exit_layer: int = Field(ge=0)
    options: dict[str, Any] = Field(default_factory=dict)
    vocab_size: int = Field(default=0, ge=0)

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        return head_class(kind).kind

    @field_validator("vocab_size")
    @classmethod
    def _leaves_a_choice(cls, size: int) -> int:
        if size == 1:
            raise ValueError("must leave a choice of at least 2 tokens, got 1; 0 keeps all")
        return size


def build_heads(decoder: Decoder, configs: Sequence[HeadConfig]) -> list[ExitHead]:
    """The untrained heads, in float32 and over all tokens.

    Raises:
        ValueError: a head does not fit the target, or is there twice.
    """
    heads = [new_head(decoder, config) for config in configs]
    check_distinct(heads)
    return heads


def new_head(decoder: Decoder, config: HeadConfig) -> ExitHead:
    """An untrained head, in float32 and over all tokens.

    Raises:
        ValueError: it does not fit the target.
    """
    return build_head(decoder, config.kind, config.exit_layer, config.options).float()


def trim_heads(
    decoder: Decoder,
    heads: Sequence[ExitHead],
    configs: Sequence[HeadConfig],
    text: Sequence[Blocks],
) -> None:
    """Restrict heads to the most frequent tokens of a text, as `configs` ask for.

    A head that goes on from a trimmed one has its vocabulary already.

    Raises:
        ValueError: a vocabulary is not smaller than the target's, or has another size than that
            of the head to continue from, or than a head's own LM head.
    """
    for head, config in zip(heads, configs, strict=True):
        known = None if head.vocab_ids is None else len(head.vocab_ids)
        if known not in (None, config.vocab_size):
            raise ValueError(
                f"start: {head.kind}@{head.exit_layer} drafts {known} tokens, and heads ask for "
                f"vocab_size={config.vocab_size}; give vocab_size={known}, or begin anew"
            )
        if config.vocab_size and known is None:
            head.trim(decoder, frequent_tokens(text, decoder.vocab_size, config.vocab_size))
        head.check(decoder)


def is_trained(head: ExitHead) -> bool:
    """Whether there is anything to fit."""
    return any(parameter.requires_grad for parameter in head.parameters())


def frequent_tokens(text: Sequence[Blocks], vocab_size: int, count: int) -> Tensor:
    """The ids of the `count` most frequent target tokens of a text, rising.

    Raises:
        ValueError: the vocabulary is no larger than that.
    """
    if count >= vocab_size:
        raise ValueError(
            f"a trimmed vocabulary must be smaller than the target's {vocab_size}, got {count}; "
            "0 keeps all of it"
        )
    learned = torch.cat([blocks.tokens[blocks.trained] for blocks in text]).long()
    # Ties go to the lower id, which a byte-level vocabulary learned earlier.
    seen = learned.bincount(minlength=vocab_size)
    return seen.argsort(descending=True, stable=True)[:count].sort().values


def saved_configs(decoder: Decoder, folder: str) -> list[JsonObject]:
    """`HeadConfig`s, as plain values, of the heads in `folder`; raises as `load_heads` does."""
    return [
        {
            "kind": head.kind,
            "exit_layer": head.exit_layer,
            "vocab_size": 0 if head.vocab_ids is None else len(head.vocab_ids),
        }
        for head in load_heads(decoder, folder)
    ]


def with_saved_options(
    configs: Sequence[HeadConfig], decoder: Decoder, folder: str
) -> list[HeadConfig]:
    """Heads to fit, with the options of those in `folder` from which they go on, if not given."""
    saved = {(head.kind, head.exit_layer): head.options for head in load_heads(decoder, folder)}
    return [
        config.model_copy(
            update={"options": saved.get((config.kind, config.exit_layer), {}) | config.options}
        )
        for config in configs
    ]


def go_on_from(heads: Sequence[ExitHead], decoder: Decoder, folder: str) -> None:
    """Start heads from the weights of heads of the same kind and exit layer in `folder`.

    A trimmed head keeps its vocabulary.

    Raises:
        FileNotFoundError: there are no heads.
        ValueError: they were fitted to another target, none of them is among `heads`, or one has
            other options; a mask and a confidence output may be new.
    """
    saved = {(head.kind, head.exit_layer): head for head in load_heads(decoder, folder)}
    known = [head for head in heads if (head.kind, head.exit_layer) in saved]
    if not known:
        raise ValueError(f"start: none of the heads to fit is among {sorted(saved)} in {folder}")
    for head in known:
        before = saved[head.kind, head.exit_layer]
        changed = [name for name, v in before.options.items() if head.options.get(name, v) != v]
        if changed:
            name = changed[0]
            raise ValueError(
                f"start: {head.kind}@{head.exit_layer} in {folder} has {name}="
                f"{before.options[name]!r}, got {head.options[name]!r}; a fit goes on with the "
                "same options: leave it out"
            )
        if before.vocab_ids is not None:  # the head learned to choose among these tokens
            head.trim(decoder, before.vocab_ids)
        known_weights = before.state_dict()
        weights = {name: known_weights.get(name, own) for name, own in head.state_dict().items()}
        head.load_state_dict(weights)


def heads_with(
    weights: Sequence[Mapping[str, Tensor]], decoder: Decoder, configs: Sequence[HeadConfig]
) -> list[ExitHead]:
    """Heads with fitted weights, gathered from shards."""
    heads: list[ExitHead] = []
    for config, state in zip(configs, weights, strict=True):
        head = new_head(decoder, config)
        if "vocab_ids" in state:
            head.trim(decoder, state["vocab_ids"])
        head.load_state_dict(state)
        heads.append(head.eval().requires_grad_(False))
    return heads
