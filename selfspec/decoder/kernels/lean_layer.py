"""A layer of few tokens as two scripts in float32, with the KV cache between them.

Called from Python, an operation takes a microsecond, and FBGEMM's product ten, before it computes
anything; in a script they take a third of that. States stay in float32 from one product to the
next, so nothing is rounded between them. Attention itself is computed in the keys' dtype.

Legend: rows, width = tokens of the pass; heads = of queries; key heads = of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers.activations import ACT2FN

from selfspec.decoder.kernels.fbgemm import Packed, Product, has_scripts, multiply, scripted
from selfspec.decoder.kernels.lean_attention import LeanAttention
from selfspec.decoder.kernels.prepacked import fbgemm_of, most_tokens

SILU = nn.SiLU, type(ACT2FN["silu"])


def lean_layer(
    module: Any, attention: LeanAttention, approximates: Callable[[], bool]
) -> LeanLayer | None:
    """The lean form of a layer with Llama's code; `None` if its products are not FBGEMM's.

    Args:
        module: the layer, whose parts all have lean forms.
        attention: that of its attention.
        approximates: whether low-precision copies of layers are read now.
    """
    attends, mlp = module.self_attn, module.mlp
    found = [
        fbgemm_of([getattr(part, f"{name}_proj").forward for name in names])
        for part, names in (
            (attends, "qkv"),
            (attends, "o"),
            (mlp, ("gate", "up")),
            (mlp, ["down"]),
        )
    ]
    products = [product for product in found if product is not None]
    if len(products) < len(found) or type(mlp.act_fn) not in SILU or not has_scripts():
        return None
    return LeanLayer(module, attention, products, approximates)


class LeanLayer:
    """A layer that runs few tokens as two scripts.

    Args:
        module: the layer.
        attention: the lean form of its attention.
        products: those of queries, keys and values; of what attention read; of gate and up; and of
            what they give.
        approximates: whether low-precision copies of layers are read now.

    Attributes:
        in_parts: the layer's own forward, which calls its attention and its MLP.
    """

    def __init__(
        self,
        module: Any,
        attention: LeanAttention,
        products: Sequence[Product],
        approximates: Callable[[], bool],
    ):
        self.in_parts, self._attention = module.forward, attention
        self._approximates = approximates
        self._most = most_tokens(module.mlp.down_proj.weight.dtype)
        self._before, self._after = scripted(before_cache), scripted(after_cache)
        self._qkv, self._others = products[0].held, sum((p.held for p in products[1:]), ())
        norms = module.input_layernorm, module.post_attention_layernorm
        (first, eps), self._second = ((_twice(norm), norm.variance_epsilon) for norm in norms)
        of_heads = [getattr(module.self_attn, name, None) for name in ("q_norm", "k_norm")]
        head_eps = 0.0 if of_heads[0] is None else of_heads[0].variance_epsilon
        self._first = first, eps, *(None if n is None else _twice(n) for n in of_heads), head_eps

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *args: object,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: object,
    ) -> Tensor:
        """The layer's output `[rows, width, hidden]`."""
        rows, width, _ = hidden_states.shape
        attention, angles, cache = self._attention, position_embeddings, None
        if angles is not None and rows * width <= self._most and not self._approximates():
            cache = attention.cache_of(width, angles, attention_mask, kwargs)
        if angles is None or cache is None:
            given = {**kwargs, "position_embeddings": angles}
            return self.in_parts(hidden_states, attention_mask, *args, **given)
        cos, sin = attention.rotary.signed(angles, torch.float32)
        query, key, value = self._before(
            hidden_states, *self._qkv, *self._first, cos, sin, attention.keys
        )
        key, value = cache.update(key, value, attention.index)
        mask = attention.mask(attention_mask, width)
        read = query, key, value, mask, attention.scale
        return self._after(*read, hidden_states, *self._others, *self._second)


def _twice(norm: Any) -> Tensor:
    """The weight of a norm as `_norm` reads it."""
    return norm.weight.detach().float().repeat(2)


def _norm(states: Tensor, twice: Tensor, eps: float) -> Tensor:
    """RMS norm as the first half of the layer norm of [x, -x]; see `lean.py`."""
    size = states.size(-1)
    both = torch.cat((states, -states), -1)
    return torch.layer_norm(both, [2 * size], twice, None, eps).narrow(-1, 0, size)


def before_cache(
    hidden: Tensor,
    qkv: Packed,
    inverse: Tensor,
    norm: Tensor,
    eps: float,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    head_eps: float,
    cos: Tensor,
    sin: Tensor,
    keys: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, product and rotation.

    Returns:
        Queries, keys and values `[rows, heads, width, head_dim]`, in the dtype of `hidden`.
    """
    size, dtype = cos.size(-1), hidden.dtype
    read = multiply(_norm(hidden.float(), norm, eps), qkv, inverse)
    heads = read.view(hidden.size(0), hidden.size(1), -1, size)
    count = heads.size(2) - 2 * keys
    both, value = heads.narrow(2, 0, count + keys), heads.narrow(2, count + keys, keys)
    if query_norm is not None and key_norm is not None:
        query = _norm(both.narrow(2, 0, count), query_norm, head_eps)
        key = _norm(both.narrow(2, count, keys), key_norm, head_eps)
        both = torch.cat((query, key), 2)
    both = torch.addcmul(both * cos, both.roll(size // 2, -1), sin).to(dtype).transpose(1, 2)
    value = value.to(dtype).transpose(1, 2)
    return both.narrow(1, 0, count), both.narrow(1, count, keys), value


def after_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    hidden: Tensor,
    out: Packed,
    out_inverse: Tensor,
    gate_and_up: Packed,
    up_inverse: Tensor,
    down: Packed,
    down_inverse: Tensor,
    norm: Tensor,
    eps: float,
) -> Tensor:
    """Attention and MLP.

    Returns:
        The layer's output `[rows, width, hidden]`, in the dtype of `hidden`, its input.
    """
    rows, width, size = hidden.size(0), hidden.size(1), query.size(-1)
    joined = query.reshape(rows, key.size(1), -1, size)
    read = scaled_dot_product_attention(joined, key, value, mask, 0.0, False, scale=scale)
    read = read.reshape(rows, -1, width, size).transpose(1, 2).reshape(rows, width, -1)
    states = hidden.float() + multiply(read, out, out_inverse)
    gate, up = multiply(_norm(states, norm, eps), gate_and_up, up_inverse).chunk(2, -1)
    return (states + multiply(silu(gate) * up, down, down_inverse)).to(hidden.dtype)
