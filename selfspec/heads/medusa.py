"""Medusa (Cai et al. 2024): one small network for each of the next tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from selfspec.config import JsonObject
from selfspec.decoder import Decoder
from selfspec.heads.base import (
    ExitHead,
    check_lm_head_input,
    check_vocab_ids,
    move_to_exit,
    register_head,
)


class MedusaBlock(nn.Module):
    """Residual blocks x + SiLU(W x + b).

    Args:
        width: width of the hidden states.
        layers: number of blocks.
        bias: whether W has a bias.
    """

    def __init__(self, width: int, layers: int, bias: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(layers))

    def forward(self, hidden: Tensor) -> Tensor:
        """`[rows, width, hidden]` for an input of the same shape."""
        for layer in self.layers:
            hidden = hidden + silu(layer(hidden))
        return hidden


@register_head
class MedusaHead(ExitHead):
    """Drafts a token for each of the next positions from one hidden state of the target.

    The state is that of the token before the pending one, after the final norm. Draft i reads
    neither the pending token nor the drafts before it, so all of them are made in one pass.

    Args:
        exit_layer: 0; no layer of the target runs for a draft.
        decoder: the target.
        heads: positions that it drafts.
        layers: residual blocks of each.
        bias: whether the blocks have biases.
        vocabulary: rows of LM heads of its own, one for each position; 0 for the target's.
    """

    kind = "medusa"
    lowest_exit = highest_exit = 0
    skips_first = True
    drafts_at_once = True

    def __init__(
        self,
        exit_layer: int,
        decoder: Decoder,
        heads: int,
        layers: int,
        bias: bool,
        vocabulary: int,
    ):
        super().__init__(exit_layer)
        width: int = decoder.config.hidden_size
        self.width, self.longest = width, heads
        self.feature_layers = (decoder.depth,)
        self._options = {"heads": heads, "layers": layers, "bias": bias, "vocabulary": vocabulary}
        self.blocks = nn.ModuleList(MedusaBlock(width, layers, bias) for _ in range(heads))
        readouts = (nn.Linear(width, vocabulary, bias=False) for _ in range(heads))
        self.readouts = nn.ModuleList(readouts) if vocabulary else None
        # In a tuple, because it stays a part of the target.
        self._final_norm = (decoder.final_norm or nn.Identity(),)

    @classmethod
    def build(cls, decoder: Decoder, exit_layer: int = 0, **options: Any) -> MedusaHead:
        """An untrained head, whose drafts all equal the target's next token.

        The options are `heads` (default 4), `layers` (1), `bias` (True), and the rows of LM heads
        of its own (`vocabulary`; 0, the default, for the target's LM head).

        Raises:
            ValueError: `exit_layer` is not 0, or there are no heads or layers.
        """
        cls.check_exit(decoder, exit_layer)
        heads, layers = options.get("heads", 4), options.get("layers", 1)
        if heads < 1 or layers < 1:
            raise ValueError(f"a {cls.kind} head needs heads and layers, got {heads=}, {layers=}")
        check_lm_head_input(decoder)
        bias, vocabulary = options.get("bias", True), options.get("vocabulary", 0)
        head = cls(exit_layer, decoder, heads, layers, bias, vocabulary)
        with torch.no_grad():
            for parameter in head.blocks.parameters():
                parameter.zero_()
        return move_to_exit(head, decoder, exit_layer)

    @property
    def options(self) -> JsonObject:
        """The options of `build`."""
        return dict(self._options)

    def trim(self, decoder: Decoder, vocab_ids: Tensor) -> None:
        """Draft only these tokens, in rising order; LM heads of its own have their rows."""
        if self.readouts is None:
            return super().trim(decoder, vocab_ids)
        check_vocab_ids(decoder, vocab_ids)
        if len(vocab_ids) != self._options["vocabulary"]:
            raise ValueError(
                f"the head's LM heads have {self._options['vocabulary']} rows, got "
                f"{len(vocab_ids)} tokens"
            )
        self.vocab_ids = vocab_ids.to(next(self.parameters()).device, torch.long)

    def check(self, decoder: Decoder) -> None:
        """Raise ValueError unless the head fits `decoder`."""
        super().check(decoder)
        rows = self._options["vocabulary"]
        if rows and self.vocab_ids is None and rows != decoder.vocab_size:
            raise ValueError(
                f"the head's LM heads have {rows} rows and no list of their tokens; the target has "
                f"{decoder.vocab_size} tokens"
            )

    def fuse_features(self, features: list[Tensor]) -> Tensor:
        """The target's last hidden state after its final norm."""
        (last,) = features
        return self._final_norm[0](last).to(next(self.parameters()))

    def forward(self, hidden: Tensor) -> Tensor:
        """`[rows, heads, hidden]` a state for each position, from `[rows, 1, hidden]`."""
        return torch.cat([block(hidden) for block in self.blocks], dim=1)

    def logits(self, decoder: Decoder, hidden: Tensor, depth: int = 0) -> Tensor:
        """Logits of draft `depth` `[rows, width, n]` from what `fuse_features` returns."""
        state = self.blocks[depth](hidden)
        if self.readouts is None:
            return decoder.unembed(state, self.lm_head)
        return self.readouts[depth](state)

    def all_logits(self, decoder: Decoder, hidden: Tensor) -> Tensor:
        """Logits of all drafts `[rows, heads, n]` from `[rows, 1, hidden]`."""
        if self.readouts is None:
            return decoder.unembed(self(hidden), self.lm_head)
        drafts = (self.logits(decoder, hidden, depth) for depth in range(len(self.blocks)))
        return torch.cat(list(drafts), dim=1)
