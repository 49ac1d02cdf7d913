"""Norms, MLPs and attention with fewer operations, for few tokens in half precision on a CPU.

Between the products of a small model's layer lie some fifty operations of a microsecond or two
each: together they take most of the time that the products do. A module gets a lean form if its
code is that of Llama's norm, MLP or attention (or of Mistral's, Qwen2's or Qwen3's), as it is in
many families. Lean forms round less often, so outputs are the same within the dtype's rounding.
Anything with hooks, adapters or weights that are not plain parameters runs as it is.

Legend: rows, width = tokens of the pass; heads = of queries; key heads = of keys and values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.nn.utils.parametrize import is_parametrized
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from selfspec.decoder.cache import WIDEST, SlotCache
from selfspec.decoder.direct import direct, is_watched
from selfspec.decoder.kernels.prepacked import HALF, PackedWeight, joined
from selfspec.decoder.passes import cache_name

_MODELS = "transformers.models.{0}.modeling_{0}"


def lean_forwards(roots: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """The modules in these that have a lean form, each with it.

    Linear layers are called as they are now, so their own replacements come first.
    """
    rotary, masks = _Rotary(), _Masks()
    for module in {part: None for root in roots for part in root.modules()}:
        kind = _kind(module)
        if kind is None or not _is_plain(module):
            continue
        if kind == "norm":
            yield module, _norm(module)
        elif kind == "mlp":
            yield module, _mlp(module)
        elif _attends_as_llama(module):
            yield module, _Attention(module, rotary, masks).forward


# What has a lean form


@cache
def _kinds() -> dict[Any, str]:
    """The kinds of modules, by the code of their forwards."""
    llama = import_module(_MODELS.format("llama"))
    kinds = {_code(llama.LlamaRMSNorm.forward): "norm", _code(llama.LlamaMLP.forward): "mlp"}
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        attention = getattr(import_module(_MODELS.format(name.lower())), f"{name}Attention")
        kinds[_code(attention.forward)] = "attention"
    return kinds


@cache
def _code(function: Callable[..., Any]) -> Any:
    """What a function computes, but for the functions that it calls."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return None
    constants = [c for c in code.co_consts if c != inspect.unwrap(function).__doc__]
    return code.co_code, code.co_names, code.co_varnames, repr(constants)


def _is_plain(module: nn.Module) -> bool:
    """Whether calling the module and its children does nothing but their classes' forwards."""
    if "forward" in module.__dict__ or module.training:
        return False
    parts, weights = [*module.modules()], [*module.parameters()]
    kinds = (nn.Parameter, PackedWeight)
    known = all(type(w) in kinds and w.dtype in HALF for w in weights)
    cpu = all(weight.device.type == "cpu" for weight in weights)
    linears = [part for name, part in module.named_children() if name.endswith("_proj")]
    bare = all(type(part) is nn.Linear for part in linears)
    return known and cpu and bare and not any(is_watched(p) or is_parametrized(p) for p in parts)


def _attends_as_llama(module: Any) -> bool:
    """Whether an attention rotates all of each head, as Llama does, and attends by torch's SDPA.

    Norms of queries and keys have to be Llama's, too.
    """
    names = inspect.unwrap(type(module).forward).__globals__
    llama = vars(import_module(_MODELS.format("llama")))
    same = all(
        _code(names[name]) == _code(llama[name]) for name in ("apply_rotary_pos_emb", "rotate_half")
    )
    normed = all(_kind(norm) == "norm" for norm in _head_norms(module))
    chosen = getattr(module.config, "_attn_implementation", None)
    return same and normed and ALL_ATTENTION_FUNCTIONS.get(chosen) is sdpa_attention_forward


def _head_norms(attention: Any) -> list[nn.Module]:
    """The norms of queries and of keys, if there are any."""
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return [norm for norm in norms if norm is not None]


def _kind(module: nn.Module) -> str | None:
    """The kind of lean form that the code of a module has."""
    return _kinds().get(_code(type(module).forward))


# The lean forms


def _norm(module: Any) -> Callable[..., Tensor]:
    """RMS norm as the first half of the layer norm of [x, -x], whose mean is 0.

    On a CPU torch has a kernel for the latter only; the former takes it seven.
    """
    own, weight, eps = module.forward, module.weight, module.variance_epsilon
    size, dtype, twice = len(weight), weight.dtype, torch.cat([weight, weight])
    shape = (2 * size,)

    def norm(hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != dtype or torch.is_grad_enabled():
            return own(hidden_states)
        both = torch.cat((hidden_states, -hidden_states), -1)
        return torch.layer_norm(both, shape, twice, None, eps).narrow(-1, 0, size)

    return norm


def _mlp(module: Any) -> Callable[..., Tensor]:
    both = joined([module.gate_proj.forward, module.up_proj.forward])
    own, act, down = module.forward, module.act_fn, direct(module.down_proj)
    act, size = silu if type(act) is nn.SiLU else direct(act), module.gate_proj.out_features

    def mlp(x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return own(x)
        gate, up = both(x).split_with_sizes((size, size), -1)
        return down(act(gate) * up)

    return mlp


class _Rotary:
    """Rotates queries and keys by the angles of a pass, which all its layers share."""

    def __init__(self) -> None:
        self._held: tuple[Any, Tensor, Tensor] | None = None

    def __call__(self, states: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated `[rows, width, heads, head_dim]` states.

        Args:
            states: as they are.
            angles: `[rows, width, head_dim]` cosines and sines.
        """
        held = self._held
        if held is None or held[0] is not angles:
            cos, sin = (part[:, :, None] for part in angles)
            low, high = sin.chunk(2, dim=-1)
            held = self._held = angles, cos, torch.cat([-low, high], dim=-1)
        return torch.addcmul(states * held[1], states.roll(states.shape[-1] // 2, -1), held[2])


class _Masks:
    """Repeats a mask for heads that are joined; layers with the same mask in a pass share it."""

    def __init__(self) -> None:
        self._held: tuple[Tensor, int, Tensor] | None = None

    def __call__(self, mask: Tensor, group: int) -> Tensor:
        """The mask `[rows, 1, group * width, keys]` of one `[rows, 1, width, keys]`."""
        held = self._held
        if held is None or held[0] is not mask or held[1] != group:
            held = self._held = mask, group, mask.repeat(1, 1, group, 1)
        return held[2]


class _Attention:
    """Attention of few tokens, in which heads that share keys are joined into one product."""

    def __init__(self, module: Any, rotary: _Rotary, masks: _Masks):
        self._own, self._rotary, self._masks = module.forward, rotary, masks
        self._cache = cache_name(type(module).forward)
        self._qkv = joined([getattr(module, f"{name}_proj").forward for name in "qkv"])
        self._out, self._index = direct(module.o_proj), module.layer_idx
        self._size, self._scale = module.head_dim, module.scaling
        self._group = module.num_key_value_groups
        self._keys = module.k_proj.out_features // self._size
        self._norms = [_norm(norm) for norm in _head_norms(module)]

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """What the attention returns."""
        (rows, width, _), size = hidden_states.shape, self._size
        cache = kwargs.get(self._cache)
        few = width == 1 or (width <= WIDEST and attention_mask is not None)
        if not few or torch.is_grad_enabled() or not isinstance(cache, SlotCache):
            return self._own(
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **kwargs,
            )
        query, key, value = self._project(hidden_states, position_embeddings)
        key, value = cache.update(key.transpose(1, 2), value.transpose(1, 2), self._index)
        group = self._group
        query = query.transpose(1, 2).reshape(rows, self._keys, group * width, size)
        if attention_mask is not None and width > 1:
            attention_mask = self._masks(attention_mask, group)
        output = scaled_dot_product_attention(query, key, value, attention_mask, scale=self._scale)
        output = output.reshape(rows, -1, width, size).transpose(1, 2).reshape(rows, width, -1)
        return self._out(output), None

    def _project(self, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Queries, keys and values, `[rows, width, heads, head_dim]` each."""
        keys = self._keys
        heads = self._qkv(hidden).view(*hidden.shape[:2], -1, self._size)
        sizes = (heads.shape[2] - 2 * keys, keys)
        if self._norms:
            query, key, value = heads.split_with_sizes((*sizes, keys), 2)
            rotated = [
                self._rotary(norm(part), angles)
                for norm, part in zip(self._norms, (query, key), strict=True)
            ]
            return *rotated, value
        both, value = heads.split_with_sizes((sum(sizes), keys), 2)
        return *self._rotary(both, angles).split_with_sizes(sizes, 2), value
