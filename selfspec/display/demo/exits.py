"""How well every exit guesses, on text that nobody has decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from selfspec.heads import ExitHead, head_class
from selfspec.heads.teacher_forcing import draft_states, target_states
from selfspec.model import SelfSpecModel


class ExitAgreement(NamedTuple):
    """How often an exit head's first choice is the target's own.

    Unlike the acceptance rate of a text that was decoded greedily, it does not profit where the
    text goes in circles.

    Attributes:
        head: its kind.
        exit_layer: number of layers below the exit.
        share: of the tokens of the texts.
    """

    head: str
    exit_layer: int
    share: float


def exit_agreements(
    spec: SelfSpecModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> list[ExitAgreement]:
    """Compare every head of `spec`, and the head that needs no fitting at the same exits."""
    decoder, heads = spec.engine.decoder, list(spec.engine.heads)
    shared, fitted = head_class("shared"), {(h.kind, h.exit_layer) for h in heads}
    exits = sorted({head.exit_layer for head in heads} - {0}) or [max(1, decoder.depth // 4)]
    heads += [shared.build(decoder, e) for e in exits if (shared.kind, e) not in fitted]
    blocks = [tokenizer(text, return_tensors="pt").input_ids.to(decoder.device) for text in texts]
    shares = [torch.cat([_agrees(spec, head, block) for block in blocks]) for head in heads]
    found = [
        ExitAgreement(head.kind, head.exit_layer, float(share.float().mean()))
        for head, share in zip(heads, shares, strict=True)
    ]
    return sorted(found, key=lambda each: -each.share)


def _agrees(spec: SelfSpecModel, head: ExitHead, tokens: torch.Tensor) -> torch.Tensor:
    """`[n]` where the head's first choice is the target's own."""
    decoder = spec.engine.decoder
    with torch.inference_mode():
        reading = target_states(decoder, tokens, None, head.input_layers)
        state = next(draft_states(decoder, head, reading, steps=1))
        exit_logits = head.expand_logits(head.logits(decoder, state), decoder)
        logits = decoder.unembed(reading.normed)
    return (exit_logits.argmax(-1) == logits.argmax(-1)).flatten()
