"""The acceptance probability of a drafted token, from the distribution it was drafted from."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

Confidence = Callable[[Tensor, Tensor | None, int], list[float]]
"""The chance that the target accepts the last draft, for each row.

Its arguments are the draft's processed scores `[rows, 1, n]`, their probabilities if it was
sampled, and its depth.
"""

# In nats. With top-k 1 the true margin would be infinite.
_WIDEST_MARGIN = 20.0
_LEAST = 1e-30  # instead of probability 0, whose log is infinite
# Bound of the logit: keeps probabilities in float32 above 0 and below 1.
_LARGEST_LOGIT = 15.0


class Calibrator(nn.Module):
    """P(accepted) by logistic regression (Platt 1999) on four features of a drafted token.

    Everything is a buffer: it is saved with the head's tensors, and the head's optimizer does not
    train it. Before it is fitted it gives the probability of the top token among the top two.

    Attributes:
        mean: `[4]` mean of the features that it was fitted on.
        std: `[4]` their standard deviation.
        lowest: `[4]` their minimum; lower values are raised to it.
        highest: `[4]` their maximum; higher values, of the depth too, are lowered to it.
        weight: `[4]` weights of the standardised features.
        bias: `[]` bias.
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
        """The four features `[rows, 4]` in float32, always finite.

        Log of the top probability; its margin over the log of the second, at most 20 nats; entropy
        in nats; depth.

        Args:
            scores: `[rows, n]` scores that the token was drafted from.
            depth: number of tokens drafted before it in the round.
        """
        *likeliest, entropy = _summary(scores.float().softmax(-1)).unbind(-1)
        first, second = (probability.clamp(min=_LEAST).log() for probability in likeliest)
        margin = (first - second).clamp(max=_WIDEST_MARGIN)
        return torch.stack([first, margin, entropy, torch.full_like(first, depth)], dim=-1)

    def probability(self, features: Tensor) -> Tensor:
        """P(accepted) `[rows]`, above 0 and below 1, for `features` `[rows, 4]`."""
        # The buffers may have been cast to half precision with the model.
        clamped = torch.clamp(features, self.lowest.float(), self.highest.float())
        standard = (clamped - self.mean.float()) / self.std.float()
        logit = (standard * self.weight.float()).sum(-1) + self.bias.float()
        # Scores that are NaN count as rejected.
        logit = logit.nan_to_num(nan=-_LARGEST_LOGIT)
        return logit.clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT).sigmoid()

    def confidence(self) -> Confidence:
        """A function that tells how likely a draft is accepted, for schedules.

        For a greedy draft it gives what `forward` gives, but faster for few rows, because it
        computes without tensors. For a sampled one it gives the probability that two draws from
        its distribution agree, Σ q² (Simpson 1949).
        """
        constants = cache(self._constants)

        def probability(summary: list[float], depth: int) -> float:
            likeliest, second, entropy = summary
            first = math.log(max(likeliest, _LEAST))
            margin = min(first - math.log(max(second, _LEAST)), _WIDEST_MARGIN)
            fit, logit = constants()
            for value, (low, high, slope) in zip((first, margin, entropy, depth), fit, strict=True):
                logit += slope * min(max(value, low), high)
            # In this order of arguments NaN gives the lower bound: it counts as rejected.
            return 1 / (1 + math.exp(-max(-_LARGEST_LOGIT, min(logit, _LARGEST_LOGIT))))

        def confidence(scores: Tensor, probs: Tensor | None, depth: int) -> list[float]:
            if probs is not None:
                # In this order NaN, of scores that are NaN, gives 0.
                return [max(0.0, p) for p in torch.linalg.vecdot(probs, probs)[:, 0].tolist()]
            rows = _summary(scores[:, 0].softmax(-1)).tolist()
            return [probability(row, depth) for row in rows]

        return confidence

    def _constants(self) -> tuple[list[tuple[float, float, float]], float]:
        """Lower bound, upper bound and slope of each feature, and the intercept."""
        low, high = self.lowest.tolist(), self.highest.tolist()
        slope = (self.weight.float() / self.std.float()).tolist()
        shifts = zip(self.mean.tolist(), slope, strict=True)
        intercept = float(self.bias) - sum(mean * by for mean, by in shifts)
        return list(zip(low, high, slope, strict=True)), intercept

    def forward(self, scores: Tensor, depth: int) -> Tensor:
        """P(accepted) `[rows]` of a token drafted from `scores` `[rows, n]` at `depth`."""
        return self.probability(self.features(scores, depth))


def _summary(probs: Tensor) -> Tensor:
    """`[..., 3]` the two highest of `[..., n]` probabilities, and the entropy in nats."""
    if probs.shape[-1] == 1:  # a vocabulary of one token
        probs = torch.nn.functional.pad(probs, (0, 1))
    # Few operations, because each costs more than its arithmetic. `torch.special.entr` is not
    # vectorized on CPUs.
    logs = probs.clamp_min(_LEAST).log_()
    entropy = -torch.linalg.vecdot(probs, logs)[..., None]
    return torch.cat([probs.topk(2).values, entropy], dim=-1)
