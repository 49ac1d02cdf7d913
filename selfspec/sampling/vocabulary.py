"""The tokens that a drafting model has logits for: all of the target's, or some."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens of a drafting model's logits, in their order.

    Attributes:
        size: tokens of the target.
        ids: `[n]` the target's ids of the tokens, each once; `None` for all, in their order.
    """

    size: int
    ids: Tensor | None = None

    def tokens(self, indices: Tensor) -> Tensor:
        """The target's ids of tokens that are given by index."""
        return indices if self.ids is None else self.ids.to(indices.device)[indices]

    def take(self, values: Tensor) -> Tensor:
        """`[..., n]` what `values` `[..., size]` have for these tokens."""
        return values if self.ids is None else values[..., self.ids.to(values.device)]

    def spread(self, values: Tensor, elsewhere: float) -> Tensor:
        """`[..., size]` the `values` `[..., n]` of these tokens, and `elsewhere` for all others."""
        if self.ids is None:
            return values
        whole = values.new_full((*values.shape[:-1], self.size), elsewhere)
        return whole.scatter_(-1, self.ids.to(values.device).expand_as(values), values)
