"""What a head that drafts in one pass adds once the token before a draft is known.

All drafts of a round are computed together, so none of them has read those before it. These modules
are small enough to run draft by draft, and let each depend on the one before it.

Legend: rows = sequences of a batch; width = tokens of each; n = tokens that a head can draft.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

MarkovType = Literal["vanilla", "gated", "rnn"]
MARKOV_TYPES: tuple[str, ...] = ("vanilla", "gated", "rnn")


class MarkovHead(nn.Module):
    """A low-rank bias of a draft's logits by the token before it (DSpark, DeepSeek 2026).

    With e = W1[token] and h the draft's own state, the bias is W2 m. `vanilla`: m = e. `gated`:
    m = sigmoid(G [h, e]) * e. `rnn`: m comes from a recurrent state over the drafts of the block.

    Args:
        markov_type: which of the three.
        rank: size of e.
        width: size of h.
        tokens: tokens of the target.
        drafts: tokens that the head drafts.
    """

    def __init__(self, markov_type: str, rank: int, width: int, tokens: int, drafts: int):
        super().__init__()
        self.markov_type, self.rank = markov_type, rank
        self.markov_w1 = nn.Embedding(tokens, rank)
        self.markov_w2 = nn.Linear(rank, drafts, bias=False)
        self.gate_proj = self.joint_proj = None
        if markov_type == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        if markov_type == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, hidden: Tensor, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """The bias `[rows, width, n]` of a draft, and the memory for the next one.

        Args:
            hidden: `[rows, 1 or width, hidden]` the draft's state, as the LM head reads it.
            tokens: `[rows, width]` the token before the draft.
            memory: `[rows, width, rank]` zeros before the block; only `rnn` reads it.
        """
        code = self.markov_w1(tokens)
        hidden = hidden.to(code).expand(*code.shape[:-1], -1)
        if self.gate_proj is not None:
            code = self.gate_proj(torch.cat([hidden, code], dim=-1)).sigmoid() * code
        if self.joint_proj is not None:
            joint = self.joint_proj(torch.cat([memory, code, hidden], dim=-1))
            gate, candidate, code = joint.chunk(3, dim=-1)
            memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * candidate.tanh()
            code = code.tanh()
        return self.markov_w2(code), memory

    @torch.no_grad()
    def trim(self, vocab_ids: Tensor) -> None:
        """Keep only the bias of these tokens."""
        ids = vocab_ids.to(self.markov_w2.weight.device)
        self.markov_w2.weight = nn.Parameter(self.markov_w2.weight[ids])
        self.markov_w2.out_features = len(ids)


class CandidateSelector(nn.Module):
    """Scores the most likely tokens of a draft by the token before it (DFlash2, z-lab 2026).

    Candidate c after token t in state h has the score logit_c + Σ_r P[t]_r (W h)_r S[c]_r. Tokens
    that are not candidates cannot be drafted.

    Args:
        rank: width of the codebooks P and S.
        width: size of h.
        tokens: tokens of the target.
        top_k: number of candidates.
    """

    def __init__(self, rank: int, width: int, tokens: int, top_k: int):
        super().__init__()
        self.rank, self.top_k = rank, top_k
        self.predecessor_codebook = nn.Parameter(0.02 * torch.randn(tokens, rank))
        self.successor_codebook = nn.Parameter(0.02 * torch.randn(tokens, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def forward(
        self, logits: Tensor, hidden: Tensor, tokens: Tensor, vocab_ids: Tensor | None
    ) -> Tensor:
        """Logits `[rows, width, n]` of a draft, -inf for tokens that are not candidates.

        Args:
            logits: `[rows, 1 or width, n]` without the selector.
            hidden: `[rows, 1 or width, hidden]` the draft's state, as the LM head reads it.
            tokens: `[rows, width]` the token before the draft.
            vocab_ids: `[n]` the tokens that the head can draft; `None` for all.
        """
        best = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1)
        ids = best.indices if vocab_ids is None else vocab_ids[best.indices]
        before = self.predecessor_codebook[tokens] * self.hidden_projection(hidden)
        bonus = (self.successor_codebook[ids] * before[..., None, :]).sum(-1)
        scores = best.values + bonus.to(best.values)
        whole = logits.new_full((*tokens.shape, logits.shape[-1]), float("-inf"))
        return whole.scatter(-1, best.indices.expand_as(scores), scores)
