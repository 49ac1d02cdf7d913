"""Calibrators: from a draft distribution to the probability that the draft is accepted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor, nn

# Of drafts of a chain, by the probabilities `[rows, vocab]` that its head gave and the depth of the
# first: for each, how likely it is kept in each row.
Judge = Callable[[Sequence[Tensor], int], list[list[float]]]

# Beyond this many nats the second token is as good as impossible (top-k 1 leaves infinitely many).
_WIDEST_MARGIN = 20.0
_LEAST = 1e-30  # a probability that has a log, further from any other than that margin
# Keeps probabilities in float32 apart from 0 and 1.
_SUREST = 15.0


class Calibrator(nn.Module):
    """P(accepted) by logistic regression (Platt 1999) on four features of a draft.

    Everything is a buffer: saved with the head's tensors, out of reach of the head's optimizer.
    Without a fit it says how likely the top token is among the top two.

    Attributes:
        mean: `[4]` of the features that the fit saw.
        std: `[4]` their standard deviation.
        lowest: `[4]` the least it saw; what lies below is taken for it.
        highest: `[4]` the most it saw, the draft's depth among it; what lies above is taken for it.
        weight: `[4]` for standardised features.
        bias: `[]`
    """

    mean: Tensor
    std: Tensor
    lowest: Tensor
    highest: Tensor
    weight: Tensor
    bias: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("std", torch.ones(4))
        self.register_buffer("lowest", torch.full((4,), -torch.inf))
        self.register_buffer("highest", torch.full((4,), torch.inf))
        self.register_buffer("weight", torch.tensor([0.0, 1.0, 0.0, 0.0]))
        self.register_buffer("bias", torch.zeros(()))

    @staticmethod
    def features(scores: Tensor, depth: int) -> Tensor:
        """What the probability is computed from, `[rows, 4]` in float32, always finite.

        Log of the top probability; its distance to the log of the second, in nats and at most 20;
        entropy in nats; depth.

        Args:
            scores: `[rows, vocab]` what the token was drafted from, at least two columns; -inf
                where it could not be.
            depth: tokens drafted before it in the round.
        """
        *likeliest, entropy = _summary(scores.float().softmax(-1)).unbind(-1)
        first, second = (chance.clamp(min=_LEAST).log() for chance in likeliest)
        margin = (first - second).clamp(max=_WIDEST_MARGIN)
        return torch.stack([first, margin, entropy, torch.full_like(first, depth)], dim=-1)

    def probability(self, features: Tensor) -> Tensor:
        """P(accepted) `[rows]`, above 0 and below 1, for `features` `[rows, 4]`."""
        # Buffers may have been cast along with the model.
        seen = torch.clamp(features, self.lowest.float(), self.highest.float())
        standard = (seen - self.mean.float()) / self.std.float()
        logit = (standard * self.weight.float()).sum(-1) + self.bias.float()
        # NaN, of scores that are NaN, is sure to fall.
        return logit.nan_to_num(nan=-_SUREST).clamp(-_SUREST, _SUREST).sigmoid()

    def judge(self) -> Judge:
        """`forward` for few rows, sooner: reads the buffers once, and counts without tensors."""
        constants = cache(self._constants)

        def chance(summary: list[float], depth: int) -> float:
            likeliest, second, entropy = summary
            first = math.log(max(likeliest, _LEAST))
            margin = min(first - math.log(max(second, _LEAST)), _WIDEST_MARGIN)
            fit, logit = constants()
            for value, (low, high, slope) in zip((first, margin, entropy, depth), fit, strict=True):
                logit += slope * min(max(value, low), high)
            # In this order NaN, of scores that are NaN, is sure to fall.
            return 1 / (1 + math.exp(-max(-_SUREST, min(logit, _SUREST))))

        def judge(drafts: Sequence[Tensor], first: int) -> list[list[float]]:
            probs = torch.stack(list(drafts)) if len(drafts) > 1 else drafts[0][None]
            summaries = _summary(probs).tolist()
            return [
                [chance(row, depth) for row in rows] for depth, rows in enumerate(summaries, first)
            ]

        return judge

    def _constants(self) -> tuple[list[tuple[float, float, float]], float]:
        """Of each feature what bounds it and what a unit of it adds, and what is added anyway."""
        low, high = self.lowest.tolist(), self.highest.tolist()
        slope = (self.weight.float() / self.std.float()).tolist()
        shifts = zip(self.mean.tolist(), slope, strict=True)
        anyway = float(self.bias) - sum(mean * by for mean, by in shifts)
        return list(zip(low, high, slope, strict=True)), anyway

    def forward(self, scores: Tensor, depth: int) -> Tensor:
        """P(accepted) `[rows]` of a token drafted from `scores` `[rows, vocab]`, `depth` deep."""
        return self.probability(self.features(scores, depth))


def _summary(probs: Tensor) -> Tensor:
    """`[..., 3]` the first and second of `[..., vocab]` probabilities, and the entropy in nats.

    In few steps: between a model's matrix products each of them takes longer than its arithmetic.
    """
    # `torch.special.entr` is not vectorized on CPUs. Below `_LEAST` nothing counts.
    logs = probs.clamp_min(_LEAST).log_()
    entropy = -torch.linalg.vecdot(probs, logs)[..., None]
    return torch.cat([probs.topk(2).values, entropy], dim=-1)
