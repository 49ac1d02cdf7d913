"""A LoRA adapter on the target's LM head, used at one exit only."""

from __future__ import annotations

import copy
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from selfspec.config import JsonObject
from selfspec.decoder import Decoder, at_hand, bare_copy, device_of
from selfspec.heads.base import ExitHead, copy_final_norm, move_to_exit, register_head


@register_head
class LoraHead(ExitHead):
    """A norm of its own and the LM head W + B A (LoRA, Hu et al. 2021, with peft).

    Unlike a lens, it can make logits that the target's LM head cannot make from any input.

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
        head = cls(exit_layer, copy_final_norm(decoder), width, options.get("rank", 16))
        head = move_to_exit(head, decoder, exit_layer)
        head._adapt(decoder.lm_head)
        return head

    @property
    def options(self) -> JsonObject:
        """The rank."""
        return {"rank": self.rank}

    def trim(self, decoder: Decoder, vocab_ids: Tensor) -> None:
        """Trim as every head does; the adapter is then a new one on the remaining rows."""
        super().trim(decoder, vocab_ids)
        assert self.lm_head is not None
        self._adapt(self.lm_head)

    def forward(self, hidden: Tensor) -> Tensor:
        """The residual stream after the head's norm."""
        return self.norm(hidden)

    def adapt(self, hidden: Tensor) -> Tensor:
        """What the adapter adds to the logits of an LM head that reads `hidden`."""
        down, up = (next(part.children()) for part in self.adapter)
        return up(down(hidden))

    def _adapt(self, lm_head: nn.Module) -> None:
        if isinstance(lm_head, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            raise ValueError(
                f"the LM head is already wrapped by peft ({type(lm_head).__name__}) and cannot "
                "take a second adapter; merge its adapter, or use head='lens'"
            )
        # peft wraps a second module with the same weights, so that the target's own LM head keeps
        # its `forward`. Sharded or offloaded weights cannot be wrapped; those are copied.
        holder = nn.Module()
        holder.lm_head = copy.copy(lm_head) if at_hand(lm_head) else bare_copy(lm_head)
        trained = [p for p in lm_head.parameters() if p.requires_grad]
        config = peft.LoraConfig(r=self.rank, lora_alpha=self.rank, target_modules=["lm_head"])
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # peft draws A; every build gets the same
            peft.inject_adapter_in_model(config, holder, adapter_name="exit")
        for parameter in trained:  # peft freezes what it wraps
            parameter.requires_grad_(True)
        adapted: Any = holder.lm_head
        # Only the adapter belongs to the head; the weights under it stay the target's.
        self.adapter = nn.ModuleList([adapted.lora_A, adapted.lora_B])
        like = next(self.norm.parameters(), None)
        self.adapter.to(device_of(lm_head), None if like is None else like.dtype)
        self._lm_head = (adapted,)
