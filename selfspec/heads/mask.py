"""The mask token, with which a head drafts all positions of a round in one pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from selfspec.decoder import Decoder

_EPS = 1e-6


class MaskToken(nn.Module):
    """What a head reads in place of drafts that are not made yet (ParallelSpec, P-EAGLE, PARD).

    The layers run over [newest token, mask, mask, ...] at consecutive positions, and each state
    drafts the token after its own. So that a draft may depend on the token that was drawn before
    it, its logits get a low-rank bias from that token and its own state, W3 SiLU(W1 e + W2 s): a
    gated form of the Markov bias of DSpark.

    Args:
        decoder: the target.
        rank: rank of the bias; 0 for none.

    Attributes:
        embedding: `[hidden]` in place of the token's embedding.
        features: `[hidden]` in place of the features of the token before.
    """

    def __init__(self, decoder: Decoder, rank: int):
        super().__init__()
        self.rank, width = rank, decoder.config.hidden_size
        std = getattr(decoder.config, "initializer_range", 0.02)
        self.embedding = nn.Parameter(torch.randn(width) * std)
        self.features = nn.Parameter(torch.randn(width))
        if rank:
            self.of_token = nn.Linear(width, rank, bias=False)
            self.of_state = nn.Linear(width, rank, bias=False)
            self.readout = nn.Linear(rank, decoder.vocab_size, bias=False)
            nn.init.zeros_(self.readout.weight)

    @property
    def options(self) -> dict[str, int | bool]:
        """The options of a head that has such a mask."""
        return {"parallel": True, "markov": self.rank}

    def bias(self, gate: Tensor, embedded: Tensor) -> Tensor:
        """`[rows, width, n]` to add to the logits.

        Args:
            gate: `[rows, width, rank]` what `of_state` made of the inputs of the LM head.
            embedded: `[rows, width, hidden]` embeddings of the token before each draft.
        """
        embedded = rms_norm(embedded.to(gate), embedded.shape[-1:], eps=_EPS)
        return self.readout(silu(self.of_token(embedded) + gate))

    @torch.no_grad()
    def trim(self, vocab_ids: Tensor) -> None:
        """Keep the bias of these tokens only."""
        if self.rank:
            ids = vocab_ids.to(self.readout.weight.device)
            self.readout.weight = nn.Parameter(self.readout.weight[ids])
