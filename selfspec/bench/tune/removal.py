"""Which sublayers a target misses least, teacher-forced over texts that it has written itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.bench.tune.acceptance import Written
from selfspec.decoder import Decoder, Skips, Span

Sublayer = tuple[str, int]  # kind ("attention", "mlp", or "layer" for both) and layer

_HALVES = ("attention", "mlp")
_STEPS = 8


def skips_of(sublayers: Sequence[Sublayer]) -> Skips:
    """The skips that leave these out."""
    layers = {kind: [i for k, i in sublayers if k in (kind, "layer")] for kind in _HALVES}
    return Skips.of(*layers.values())


@torch.no_grad()
def removal_order(
    decoder: Decoder, texts: Sequence[Written], sublayers: Sequence[Sublayer]
) -> list[list[Sublayer]]:
    """Take sublayers out step by step, always those without which the texts stay likeliest.

    Args:
        decoder: the target.
        texts: prompts and what the target wrote behind them.
        sublayers: all that may be taken out.

    Returns:
        What was taken out in each step; an eighth of all in each but the last.
    """
    left, gone = list(sublayers), list[Sublayer]()
    width = -(-len(left) // _STEPS)
    steps: list[list[Sublayer]] = []
    while left:
        chances = {one: _likeness(decoder, texts, skips_of([*gone, one])) for one in left}
        step = sorted(left, key=lambda one: -chances[one])[:width]
        gone += step
        left = [one for one in left if one not in step]
        steps.append(step)
    return steps


def _likeness(decoder: Decoder, texts: Sequence[Written], skips: Skips) -> float:
    """Mean probability of the tokens that the target wrote, under the target without `skips`."""
    width = max(len(text.tokens) for text in texts)
    rows = [text.tokens + [0] * (width - len(text.tokens)) for text in texts]
    tokens = torch.tensor(rows, device=decoder.device)
    slots = decoder.new_slots(len(texts))
    left = decoder.run(tokens, Span(0, decoder.depth), slots, skips=skips).output
    written = torch.zeros_like(tokens, dtype=torch.bool)
    for row, text in enumerate(texts):
        written[row, text.start : len(text.tokens)] = True
    before = left[:, :-1][written[:, 1:]]
    probs = decoder.unembed(before[None])[0].float().softmax(-1)
    return _mean_at(probs, tokens[:, 1:][written[:, 1:]])


def _mean_at(probs: Tensor, tokens: Tensor) -> float:
    return float(probs.gather(1, tokens[:, None]).mean())
