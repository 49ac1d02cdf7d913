"""`Draft` and `Verdict`: all that travels between drafting, verifying and accepting.

Legend: batch = rows, draft = drafted tokens (k), vocab = the target's vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Draft:
    """What a drafter proposes for one round.

    Attributes:
        tokens: `[batch, k]` proposed token ids, the continuation of each row's pending token.
        probs: `[batch, k, vocab]` the distribution each token was drawn from (q), after the
            caller's processors; `None` when decoding is greedy, where only the tokens matter.
        depth: layers that the drafter has already run over its prefix (E for early exit); 0 when
            nothing can be reused.
        hidden: `[batch, <= k + 1, width]` residual stream after layer `depth - 1` for the pending
            token and the first drafts; `None` when `depth` is 0.
    """

    tokens: Tensor
    probs: Tensor | None = None
    depth: int = 0
    hidden: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of drafted tokens, k."""
        return self.tokens.shape[1]

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> Draft:
        """No proposal: the round is a plain decoding step."""
        return cls(torch.empty(rows, 0, dtype=torch.long, device=device))


@dataclass
class Verdict:
    """What verification decided.

    Attributes:
        accepted: `[batch]` number of drafted tokens kept, in [0, k].
        tokens: `[batch, k + 1]` the kept drafts, then at index `accepted` the token that the
            target adds (the correction, or the bonus when every draft was kept). What follows it
            is undefined.
    """

    accepted: Tensor
    tokens: Tensor
