"""Scores to tokens, greedily or by sampling."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.sampling.context import Context
from selfspec.sampling.coupled_noise import Noise
from selfspec.sampling.draft import Tree
from selfspec.sampling.scorer import Scorer


@dataclass
class Sampler(Scorer):
    """Turns scores into tokens.

    Attributes:
        do_sample: whether tokens are sampled.
        generator: source of random numbers; `None` uses torch's global one.
        noise: noise of every position, for the rule "coupled".
        rule: how sampled chains are verified, by its name in `CHAIN_RULES`, or "coupled".
    """

    do_sample: bool = False
    generator: torch.Generator | None = None
    noise: Noise | None = None
    rule: str = "block"

    @property
    def chooses(self) -> bool:
        """Whether each position has one right token, with which drafts are compared."""
        return not self.do_sample or self.noise is not None

    def drawable(self, scores: Tensor) -> Tensor:
        """Processed scores `[..., vocab]` of a draft with something to draw in every row.

        The caller's processors may leave nothing of a trimmed vocabulary; then any draft will do.
        """
        if not self.processors:
            return scores
        nothing = scores.amax(-1, keepdim=True) == -torch.inf
        return scores.masked_fill(nothing, 0.0)

    def choosable(self, scores: Tensor, context: Context, tree: Tree | None = None) -> Tensor:
        """Scores `[batch, n, vocab]` after a block's positions, the largest of which is chosen.

        Without noise of positions they are the processed scores themselves.

        Args:
            scores: processed scores.
            context: the text so far.
            tree: which drafts of the block continue which; `None` for a chain.
        """
        if self.noise is None:
            return scores
        levels = scores.shape[1] if tree is None else tree.levels + 1
        noise = self.noise.ahead(context.rows, context.lengths, levels, scores.shape[-1])
        if tree is not None:
            noise = noise.gather(1, tree.depths[..., None].expand_as(scores))
        return scores + noise

    def order(self, scores: Tensor, context: Context, depth: int) -> Tensor:
        """In which order tokens are drawn, the largest first, `depth` positions after the text.

        Run to its k-th position, an exponential race draws k tokens without replacement.

        Args:
            scores: `[batch, n, vocab]` processed scores at n branches of that position.
            context: the text so far.
            depth: distance from the text's next token.
        """
        if self.noise is not None:
            vocab = scores.shape[-1]
            noise = self.noise.ahead(context.rows, context.lengths, depth + 1, vocab)
            return scores + noise[:, depth:]
        if not self.do_sample:
            return scores
        race = torch.empty_like(scores).exponential_(1, generator=self.generator)
        return scores - race.log()

    def draw(
        self, scores: Tensor, context: Context, depth: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens `[batch, 1]` for `scores` `[batch, 1, vocab]`, and what they were drawn from.

        The distribution is `None` when decoding is greedy: it is one-hot at the token.

        Args:
            scores: processed scores.
            context: the text so far.
            depth: distance of the token from the text's next.
        """
        if not self.do_sample:
            return scores.argmax(-1), None
        probs = scores.softmax(-1)
        if self.noise is not None:
            return self.order(scores, context, depth).argmax(-1), probs
        return draw(probs, self.generator), probs


def draw(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One token per row of `probs` `[..., vocab]`; rows need not be normalised."""
    # One uniform number a row, found in the running sum. torch.multinomial waits for the device,
    # and its race needs a random number for every token of the vocabulary. In float64 the rarest
    # token keeps its chance; some devices have none.
    wide = torch.float32 if probs.device.type == "mps" else torch.float64
    edges = probs.cumsum(-1, dtype=wide)
    total = edges[..., -1:]
    coin = torch.rand(total.shape, dtype=wide, device=probs.device, generator=generator)
    # Below the total, which rounding might reach otherwise.
    at = coin.mul_(total).mul_(1 - torch.finfo(wide).eps)
    found = torch.searchsorted(edges, at, right=True).squeeze(-1)
    # For NaN or all-zero rows this is an arbitrary token, which verification rejects.
    return found.clamp_(max=probs.shape[-1] - 1)
