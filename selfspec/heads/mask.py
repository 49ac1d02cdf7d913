"""The mask token of parallel heads, which make all drafts of a round in one pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from selfspec.decoder import Decoder


class MaskHidden(nn.Module):
    """The mask of a P-EAGLE head: a token of the vocabulary, beside learned hidden states.

    Args:
        token: id of the token, mostly one that no text has.
        width: width of all the residual streams that the head reads, together.

    Attributes:
        token: the same id.
        hidden: `[width]` what the head reads in place of the target's residual streams.
    """

    def __init__(self, token: int, width: int):
        super().__init__()
        self.token = token
        self.hidden = nn.Parameter(torch.randn(width))

    @property
    def options(self) -> dict[str, int | bool]:
        """The head's options that build this mask."""
        return {"parallel": True, "mask_token": self.token}


class MaskToken(nn.Module):
    """Stands for tokens that are not drafted yet (ParallelSpec, P-EAGLE, PARD).

    The layers run over [newest token, mask, mask, ...] at consecutive positions, and each state
    drafts the token after its own. To make a draft depend on the token before it, its logits get
    a low-rank bias W3 SiLU(W1 e + W2 s), with e the embedding of that token and s the draft's own
    state: a gated form of the Markov bias of DSpark.

    Args:
        decoder: the target.
        rank: rank of the bias; 0 for none.

    Attributes:
        embedding: `[hidden]` the embedding of the mask.
        features: `[hidden]` the features of the mask, for heads that read features.
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
        self._codes: tuple[tuple[object, ...], Tensor] | None = None

    @property
    def options(self) -> dict[str, int | bool]:
        """The head's options that build this mask."""
        return {"parallel": True, "markov": self.rank}

    def code(self, embedded: Tensor) -> Tensor:
        """`[rows, width, rank]` W1 e of tokens, from their embeddings `[rows, width, hidden]`."""
        embedded = embedded.to(self.of_token.weight)
        return self.of_token(rms_norm(embedded, embedded.shape[-1:], eps=1e-6))

    def bias(self, gate: Tensor, code: Tensor) -> Tensor:
        """The bias `[rows, width, n]` of the logits.

        Args:
            gate: `[rows, width, rank]` output of `of_state` for the inputs of the LM head.
            code: `[rows, width, rank]` output of `code` for the token before each draft.
        """
        return self.readout(silu(code + gate))

    @torch.inference_mode(False)
    @torch.no_grad()
    def codes(self, decoder: Decoder) -> Tensor:
        """`[vocab, rank]` the codes of all tokens, cached until the weights change."""
        weight = self.of_token.weight
        version = None if weight.is_inference() else weight._version
        state = (weight.dtype, weight.device, weight.data_ptr(), version)
        if self._codes is None or self._codes[0] != state:
            every = torch.arange(decoder.vocab_size, device=decoder.device)
            # Some embeddings at a time, to save memory.
            parts = [self.code(decoder.embed(ids)) for ids in every.split(8192)]
            self._codes = state, torch.cat(parts)
        return self._codes[1]

    @torch.no_grad()
    def trim(self, vocab_ids: Tensor) -> None:
        """Keep only the bias of these tokens."""
        if self.rank:
            ids = vocab_ids.to(self.readout.weight.device)
            self.readout.weight = nn.Parameter(self.readout.weight[ids])
