"""Which masks a pass brings, and when the family's own are right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.decoder.cache import SlotCache, Window
from selfspec.decoder.gates import Gates
from selfspec.decoder.packing import Packing


class Masks:
    """Additive masks of passes, one for each sliding window.

    Args:
        gates: the model's gates, which are in when masks are made.
        windows: per layer, the sliding window in tokens, or `None`.

    Attributes:
        slide: whether any layer has a window.
    """

    def __init__(self, gates: Gates, windows: Sequence[int | None]):
        self._gates = gates
        self._kinds = {None, *windows}
        self.slide = self._kinds != {None}

    def of_slots(
        self, slots: SlotCache, window: Window, hidden: Tensor | None, added: bool
    ) -> dict[int | None, Tensor]:
        """Masks of a pass over slots; none where the family's own are right.

        Args:
            slots: the KV cache.
            window: what the pass writes.
            hidden: what it resumes from, if that is not its tokens.
            added: whether a head's own layer runs, which has not seen an earlier turn.
        """
        # A prefill from nothing is causal in every row, and one token of rows of equal length sees
        # all there is: the family's own mask is right then, and may be none at all. Anywhere else
        # masks come from the rows' lengths.
        simple = window.even and window.tight and window.width in (1, window.end)
        if simple and not self._gates.own_masks and not (added and any(slots.added_from)):
            return {}
        dtype = self._dtype(hidden)
        return {kind: slots.mask(kind, dtype, added) for kind in self._kinds}

    def of_packing(
        self, packing: Packing, hidden: Tensor | None, step: int
    ) -> dict[int | None, Tensor]:
        """Masks of a pass over packed text; none where the family's own are right.

        Args:
            packing: which tokens belong together.
            hidden: what the pass resumes from, if that is not its tokens.
            step: earlier readings of the text.
        """
        if packing.whole and step == 0 and not self._gates.own_masks:
            return {}
        dtype = self._dtype(hidden)
        return {window: packing.mask(window, dtype, step) for window in self._kinds}

    def _dtype(self, hidden: Tensor | None) -> torch.dtype:
        return self._gates.dtype if hidden is None else hidden.dtype
