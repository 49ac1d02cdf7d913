"""Attention of few tokens over slots, for families whose attention has Llama's code.

Legend: rows, width = tokens of the pass; heads = of queries; key heads = of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from selfspec.config import Options
from selfspec.decoder.cache import WIDEST, SlotCache
from selfspec.decoder.direct import direct
from selfspec.decoder.kernels.prepacked import joined, may_stand_in
from selfspec.decoder.passes import cache_name


class Rotary:
    """Rotates queries and keys by the angles of a pass, which all its layers share."""

    def __init__(self) -> None:
        self._held: tuple[tuple[Tensor, Tensor], Tensor, Tensor] | None = None

    def __call__(self, states: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated `[rows, width, heads, head_dim]` states.

        Args:
            states: as they are.
            angles: `[rows, width, head_dim]` cosines and sines.
        """
        cos, sin = self.signed(angles, states.dtype)
        return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, -1), sin)

    def signed(self, angles: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`[rows, width, 1, head_dim]` cosines and sines, the first half of these negated."""
        held = self._held
        if held is None or held[0] is not angles or held[1].dtype != dtype:
            cos, sin = (part[:, :, None].to(dtype) for part in angles)
            low, high = sin.chunk(2, dim=-1)
            held = self._held = angles, cos, torch.cat([-low, high], dim=-1)
        return held[1], held[2]


class JoinedMasks:
    """Repeats a mask for heads that are joined; layers with the same mask in a pass share it."""

    def __init__(self) -> None:
        self._held: tuple[Tensor, int, Tensor] | None = None

    def __call__(self, mask: Tensor, group: int) -> Tensor:
        """The mask `[rows, 1, group * width, keys]` of one `[rows, 1, width, keys]`."""
        held = self._held
        if held is None or held[0] is not mask or held[1] != group:
            held = self._held = mask, group, mask.repeat(1, 1, group, 1)
        return held[2]


class LeanAttention:
    """Attention of few tokens, in which heads that share keys are joined into one product.

    Args:
        module: the attention.
        norms: those of queries and of keys, if there are any.
        rotary: rotates them.
        masks: repeats masks.

    Attributes:
        index: of the cache's layer.
        keys: number of heads of keys.
    """

    def __init__(
        self,
        module: Any,
        norms: Sequence[Callable[[Tensor], Tensor]],
        rotary: Rotary,
        masks: JoinedMasks,
    ):
        self._own, self._norms, self.rotary, self.masks = module.forward, norms, rotary, masks
        self._cache = cache_name(type(module).forward)
        self._qkv = joined([getattr(module, f"{name}_proj").forward for name in "qkv"])
        self._out, self.index = direct(module.o_proj), module.layer_idx
        self._size, self.scale = module.head_dim, module.scaling
        self._dtype = module.o_proj.weight.dtype
        self._group = module.num_key_value_groups
        self.keys = module.k_proj.out_features // self._size

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        """What the attention returns."""
        (rows, width, _), size = hidden_states.shape, self._size
        cache = self.cache_of(width, position_embeddings, attention_mask, kwargs)
        if cache is None:
            return self._own(
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **kwargs,
            )
        query, key, value = self._project(hidden_states, position_embeddings)
        key, value = cache.update(key.transpose(1, 2), value.transpose(1, 2), self.index)
        query = query.transpose(1, 2).reshape(rows, self.keys, self._group * width, size)
        mask = self.mask(attention_mask, width)
        output = scaled_dot_product_attention(query, key, value, mask, scale=self.scale)
        output = output.reshape(rows, -1, width, size).transpose(1, 2).reshape(rows, width, -1)
        return self._out(output), None

    def cache_of(
        self,
        width: int,
        angles: tuple[Tensor, Tensor],
        mask: Tensor | None,
        kwargs: Options,
    ) -> SlotCache | None:
        """The cache in the arguments of a pass that this form computes; `None` for other passes."""
        cache = kwargs.get(self._cache)
        few = width == 1 or (width <= WIDEST and mask is not None)
        whole = angles[0].shape[-1] == self._size  # each head is rotated, not a part of it
        known = few and whole and may_stand_in(self._dtype)
        return cache if known and isinstance(cache, SlotCache) else None

    def mask(self, mask: Tensor | None, width: int) -> Tensor | None:
        """A mask for joined heads; the one for a single token is that of each of them."""
        return mask if mask is None or width == 1 else self.masks(mask, self._group)

    def _project(self, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Queries, keys and values, `[rows, width, heads, head_dim]` each."""
        keys = self.keys
        heads = self._qkv(hidden).view(*hidden.shape[:2], -1, self._size)
        sizes = (heads.shape[2] - 2 * keys, keys)
        if self._norms:
            query, key, value = heads.split_with_sizes((*sizes, keys), 2)
            rotated = [
                self.rotary(norm(part), angles)
                for norm, part in zip(self._norms, (query, key), strict=True)
            ]
            return *rotated, value
        both, value = heads.split_with_sizes((sum(sizes), keys), 2)
        return *self.rotary(both, angles).split_with_sizes(sizes, 2), value
