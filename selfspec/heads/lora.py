"""A LoRA on the target's LM head, for one exit."""

from __future__ import annotations

import copy
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from selfspec.decoder import Decoder, at_hand, bare_copy, device_of
from selfspec.heads.base import ExitHead, check_width, own_norm, placed


class LoraHead(ExitHead):
    """A norm of its own and the LM head W + B A (LoRA, Hu et al. 2021, by peft).

    Unlike a lens of the same rank it can move logits that no input of the LM head could.

    Args:
        exit_layer: number of layers below the exit.
        norm: the norm in front of the LM head.
        width: width of the residual stream.
        rank: rank of the adapter.
    """

    kind = "lora"

    def __init__(self, exit_layer: int, norm: nn.Module, width: int, rank: int):
        super().__init__(exit_layer)
        self.norm, self.width, self.rank = norm, width, rank

    @classmethod
    def build(cls, decoder: Decoder, exit_layer: int, **options: Any) -> LoraHead:
        """A head that equals the shared one; `rank` defaults to 16."""
        width = decoder.config.hidden_size
        head = cls(exit_layer, own_norm(decoder), width, options.get("rank", 16))
        head = placed(head, decoder, exit_layer)
        head._adapt(decoder.lm_head)
        return head

    @property
    def options(self) -> dict[str, Any]:
        """The rank."""
        return {"rank": self.rank}

    def trim(self, decoder: Decoder, vocab_ids: Tensor) -> None:
        """As for every head; the adapter starts anew on the rows that stay."""
        super().trim(decoder, vocab_ids)
        trimmed = self.readout
        assert trimmed is not None
        self._adapt(trimmed)

    def check(self, decoder: Decoder) -> None:
        """Raise ValueError unless exit layer and width fit `decoder`."""
        super().check(decoder)
        check_width(decoder, self.width, self.kind)

    def forward(self, hidden: Tensor) -> Tensor:
        """The exit after the head's norm."""
        return self.norm(hidden)

    def _adapt(self, lm_head: nn.Module) -> None:
        if isinstance(lm_head, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            raise ValueError(
                f"the LM head is a {type(lm_head).__name__} of peft already, on which no second "
                "adapter is put; merge its adapter, or use head='lens'"
            )
        # A second handle on the same weights: passes put their own `forward` in front of the LM
        # head's, and peft marks what it wraps as frozen. It can wrap no shard, and nothing that is
        # elsewhere.
        holder = nn.Module()
        holder.lm_head = copy.copy(lm_head) if at_hand(lm_head) else bare_copy(lm_head)
        trained = [p for p in lm_head.parameters() if p.requires_grad]
        config = peft.LoraConfig(r=self.rank, lora_alpha=self.rank, target_modules=["lm_head"])
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # peft draws A: the same in every build
            peft.inject_adapter_in_model(config, holder, adapter_name="exit")
        for parameter in trained:
            parameter.requires_grad_(True)
        adapted: Any = holder.lm_head
        # The adapter is the head's own; the weights under it stay the target's.
        self.adapter = nn.ModuleList([adapted.lora_A, adapted.lora_B])
        like = next(self.norm.parameters(), None)
        self.adapter.to(device_of(lm_head), None if like is None else like.dtype)
        self._readout = (adapted,)
