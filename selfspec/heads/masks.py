"""Mask tokens, with which a head drafts all positions of a round in one pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu


class MaskTokens(nn.Module):
    """What a head reads in place of drafts that are not made yet (ParallelSpec, P-EAGLE, PARD).

    The layers run over [newest token, mask 1, mask 2, ...] at consecutive positions, and each state
    drafts the token after its own. So that a draft may depend on the token that was drawn before
    it, its logits get a low-rank bias from that token and its own state, W3 SiLU(W1[token] + W2 s):
    a gated form of the Markov bias of DSpark.

    Args:
        width: width of the residual stream.
        count: masks with vectors of their own; those beyond share the last one's.
        rank: rank of the bias; 0 for none.
        vocabulary: number of tokens.
        std: standard deviation of the target's embeddings.
    """

    def __init__(self, width: int, count: int, rank: int, vocabulary: int, std: float):
        super().__init__()
        self.count, self.rank = count, rank
        self.of_tokens = nn.Parameter(torch.randn(count, width) * std)
        self.of_features = nn.Parameter(torch.randn(count, width))
        if rank:
            self.of_token = nn.Embedding(vocabulary, rank)
            self.of_state = nn.Linear(width, rank, bias=False)
            self.readout = nn.Linear(rank, vocabulary, bias=False)
            nn.init.zeros_(self.readout.weight)

    @property
    def options(self) -> dict[str, int]:
        """The head's options that make such masks."""
        return {"parallel": self.count, "markov": self.rank}

    def embeds(self, count: int) -> Tensor:
        """`[1, count, width]` what the first masks have in place of embeddings."""
        return self._first(self.of_tokens, count)

    def features(self, count: int) -> Tensor:
        """`[1, count, width]` what they have in place of the features of the token before."""
        return self._first(self.of_features, count)

    def _first(self, learned: Tensor, count: int) -> Tensor:
        numbers = torch.arange(count, device=learned.device)
        return learned[numbers.clamp(max=self.count - 1)][None]

    def bias(self, gate: Tensor, tokens: Tensor) -> Tensor:
        """`[rows, width, n]` to add to the logits.

        Args:
            gate: `[rows, width, rank]` what `of_state` made of the inputs of the LM head.
            tokens: `[rows, width]` the token before each draft.
        """
        return self.readout(silu(self.of_token(tokens) + gate))

    @torch.no_grad()
    def trim(self, vocab_ids: Tensor) -> None:
        """Keep the bias of these tokens only."""
        if self.rank:
            ids = vocab_ids.to(self.readout.weight.device)
            self.readout.weight = nn.Parameter(self.readout.weight[ids])
