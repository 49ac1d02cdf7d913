"""Real decoding on held-out prompts: tokens a round, and what a round costs on this device."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfspec import SelfSpecModel
from selfspec.config import DraftConfig
from selfspec.heads import ExitHead
from training.data import Blocks


class DecodeConfig(NamedTuple):
    """How held-out prompts are written on.

    Attributes:
        prompt_tokens: tokens of a prompt.
        new_tokens: tokens written behind it.
        num_draft_tokens: drafts of a round, where lengths are compared.
    """

    prompt_tokens: int
    new_tokens: int
    num_draft_tokens: int


def take_prompts(blocks: Blocks, count: int, tokens: int) -> list[Tensor]:
    """Beginnings `[1, tokens]` of held-out blocks, at even distances."""
    numbers = range(0, len(blocks), max(1, len(blocks) // max(1, count)))[:count]
    return [blocks[number].tokens[:, :tokens] for number in numbers]


def accepted_lengths(
    spec: SelfSpecModel, head: ExitHead, prompts: Sequence[Tensor], config: DecodeConfig
) -> dict[str, float]:
    """Mean tokens a round, decoding greedily and at temperature 1; nothing without prompts."""
    if not prompts:
        return {}
    draft = draft_of(head, config.num_draft_tokens)
    lengths: dict[str, float] = {}
    for mode, sample in (("greedy", False), ("sampled", True)):
        rounds = emitted = 0
        for number, prompt in enumerate(prompts):
            source = torch.Generator(spec.engine.decoder.device).manual_seed(number)
            write(spec, prompt, config.new_tokens, draft, sample, source)
            assert spec.last_stats is not None
            rounds += spec.last_stats.rounds
            emitted += spec.last_stats.emitted - spec.last_stats.prefilled
        lengths[mode] = emitted / max(1, rounds)
    return lengths


def round_seconds(
    spec: SelfSpecModel, draft: DraftConfig, prompt: Tensor, tokens: int, repeats: int = 3
) -> float:
    """Median seconds of a round."""
    seconds: list[float] = []
    for _ in range(repeats):
        write(spec, prompt, tokens, draft)
        assert spec.last_stats is not None
        seconds.append(spec.last_stats.decode_seconds / max(1, spec.last_stats.rounds))
    return statistics.median(seconds)


def write(
    spec: SelfSpecModel,
    prompt: Tensor,
    tokens: int,
    draft: DraftConfig,
    sample: bool = False,
    generator: torch.Generator | None = None,
) -> None:
    """Write a prompt on by exactly `tokens` tokens, from the whole distribution when sampling."""
    # Whatever the checkpoint's own generation config says.
    whole = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    options: dict[str, Any] = whole if sample else {"do_sample": False}
    spec.generate(
        prompt.to(spec.engine.decoder.device),
        draft=draft,
        generator=generator,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        pad_token_id=0,
        **options,
    )


def draft_of(head: ExitHead, num_draft_tokens: int) -> DraftConfig:
    """Drafts from this head."""
    return DraftConfig(
        exit_layer=head.exit_layer, head=head.kind, num_draft_tokens=num_draft_tokens
    )
