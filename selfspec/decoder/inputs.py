"""What a model's body is called with in a pass."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from selfspec.decoder.cache import SlotCache

MASK = "attention_mask"


class Inputs:
    """Names that a family's body takes, and values for them.

    Args:
        body: its class.
        learned_positions: rows of its table of learned positions; `None` without such a table.
        takes_masks: whether it takes a mask for every query and key.
    """

    def __init__(self, body: type[nn.Module], learned_positions: int | None, takes_masks: bool):
        self._takes = set(inspect.signature(body.forward).parameters)
        self._limit = learned_positions
        self._takes_masks = takes_masks

    def __call__(
        self,
        tokens: Tensor,
        slots: SlotCache | None,
        positions: Tensor,
        masks: dict[int | None, Tensor],
    ) -> dict[str, Any]:
        """Arguments of the body's `forward`.

        Args:
            tokens: `[rows, width]` token ids.
            slots: the KV cache, if there is one.
            positions: `[rows, width]` of the tokens.
            masks: by sliding window; none where the family's own hold.
        """
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            "past_key_values": slots,
            "use_cache": slots is not None,
        }
        if "return_dict" in self._takes:
            inputs["return_dict"] = True
        if masks and self._takes_masks:
            inputs[MASK] = masks[None]
        if "position_ids" in self._takes:
            # Behind a row's last token a block may reach past a table of learned positions.
            limit = self._limit
            inputs["position_ids"] = positions if limit is None else positions.clamp(max=limit - 1)
        return inputs
