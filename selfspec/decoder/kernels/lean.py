"""Layers and their parts with fewer operations, for few tokens in half precision on a CPU.

Between the products of a small model's layer lie some fifty operations of a microsecond or two
each: together they take most of the time that the products do. A module gets a lean form if its
code is that of Llama's norm, MLP, attention or layer (or of an attention in `_ATTENTIONS`), as it
is in many families. Lean forms round less often, so outputs are the same within the dtype's
rounding. Anything with hooks, adapters or weights that are not plain parameters runs as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import cache, partial
from importlib.util import find_spec
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.nn.utils.parametrize import is_parametrized
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from selfspec.decoder.direct import Forward, direct, is_compiled, is_watched, undecorated
from selfspec.decoder.kernels.lean_attention import JoinedMasks, LeanAttention, Rotary
from selfspec.decoder.kernels.lean_layer import SILU, lean_layer
from selfspec.decoder.kernels.prepacked import HALF, PackedWeight, joined, may_stand_in

_MODELS = "transformers.models.{0}.modeling_{0}"
_ATTENTIONS = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "glm4_moe": "Glm4Moe",  # which heads have, too
}
_ROTATES = ("apply_rotary_pos_emb", "rotate_half")


def lean_forwards(
    roots: Iterable[nn.Module], approximates: Callable[[], bool] = lambda: False
) -> Iterator[tuple[nn.Module, Forward]]:
    """The modules in these that have a lean form, each with it.

    Linear layers are called as they are now, so their own replacements come first.

    Args:
        roots: where to look for them.
        approximates: whether low-precision copies of layers are read now.
    """
    rotary, masks = Rotary(), JoinedMasks()
    forms: dict[nn.Module, Forward] = {}
    attentions: dict[nn.Module, LeanAttention] = {}
    modules = {part: None for root in roots for part in root.modules()}
    for module in modules:
        kind = _kind(module)
        if kind not in ("norm", "mlp", "attention") or not _is_plain(module):
            continue
        if kind == "norm":
            forms[module] = _norm(module)
        elif kind == "mlp":
            forms[module] = _mlp(module)
        elif _attends_as_llama(module):
            norms = [_norm(norm) for norm in _head_norms(module)]
            attentions[module] = LeanAttention(module, norms, rotary, masks)
            forms[module] = attentions[module].forward
    for layer in filter(partial(_has_lean_parts, forms), modules):
        attention = attentions[layer.get_submodule("self_attn")]
        whole = lean_layer(layer, attention, approximates)
        if whole is not None:
            forms[layer] = whole
    yield from forms.items()


# What has a lean form


@cache
def _kinds() -> dict[Hashable, str]:
    """The kinds of modules, by the code of their forwards."""
    kinds = {
        _in_file("llama", "LlamaRMSNorm", "forward"): "norm",
        _in_file("llama", "LlamaMLP", "forward"): "mlp",
        _in_file("llama", "LlamaDecoderLayer", "forward"): "layer",
    }
    for family, name in _ATTENTIONS.items():
        kinds[_in_file(family, f"{name}Attention", "forward")] = "attention"
    return kinds


@cache
def _in_file(family: str, *names: str) -> Hashable:
    """`_code` of a function in a family's file: the class in memory may have another by now."""
    module = _MODELS.format(family)
    loader: Any = getattr(find_spec(module), "loader", None)
    code: CodeType = loader.get_code(module)
    for name in names:
        parts = [part for part in code.co_consts if isinstance(part, CodeType)]
        code = next(part for part in parts if part.co_name == name)
    return _computed(code)


@cache
def _code(function: Forward) -> Hashable:
    """What a function computes, but for the functions that it calls."""
    bare = undecorated(function)
    code = getattr(bare, "__code__", None)
    return None if code is None or hasattr(bare, "__wrapped__") else _computed(code)


def _computed(code: CodeType) -> Hashable:
    first, *others = code.co_consts or (None,)  # first comes the docstring, or None
    constants = others if isinstance(first, str | None) else code.co_consts
    return code.co_code, code.co_names, code.co_varnames, repr([*constants])


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
    """Whether an attention rotates heads as Llama's or GLM's does, and attends by torch's SDPA.

    GLM's differs only where a part of each head is rotated. Norms of queries and keys have to be
    Llama's, too.
    """
    names = inspect.unwrap(type(module).forward).__globals__
    rotations = [[_in_file(family, name) for name in _ROTATES] for family in ("llama", "glm4_moe")]
    same = [_code(names[name]) for name in _ROTATES] in rotations
    normed = all(_kind(norm) == "norm" for norm in _head_norms(module))
    chosen = getattr(module.config, "_attn_implementation", None)
    return same and normed and ALL_ATTENTION_FUNCTIONS.get(chosen) is sdpa_attention_forward


def _has_lean_parts(forms: Mapping[nn.Module, Forward], layer: Any) -> bool:
    """Whether a layer has Llama's code, and parts that all have lean forms."""
    if _kind(layer) != "layer" or "forward" in layer.__dict__ or is_compiled(layer):
        return False
    norms = layer.input_layernorm, layer.post_attention_layernorm
    return all(part in forms for part in (*norms, layer.self_attn, layer.mlp))


def _head_norms(attention: nn.Module) -> list[nn.Module]:
    """The norms of queries and of keys, if there are any."""
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return [norm for norm in norms if norm is not None]


def _kind(module: nn.Module) -> str | None:
    """The kind of lean form that the code of a module has."""
    code = _code(type(module).forward)
    return None if code is None else _kinds().get(code)


# The lean forms


def _norm(module: Any) -> Callable[..., Tensor]:
    """RMS norm as the first half of the layer norm of [x, -x], whose mean is 0.

    On a CPU torch has a kernel for the latter only; the former takes it seven.
    """
    own, weight, eps = module.forward, module.weight, module.variance_epsilon
    size, dtype, twice = len(weight), weight.dtype, torch.cat([weight, weight])
    shape = (2 * size,)

    def norm(hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != dtype or not may_stand_in(dtype):
            return own(hidden_states)
        both = torch.cat((hidden_states, -hidden_states), -1)
        return torch.layer_norm(both, shape, twice, None, eps).narrow(-1, 0, size)

    return norm


def _mlp(module: Any) -> Callable[..., Tensor]:
    both = joined([module.gate_proj.forward, module.up_proj.forward])
    own, act, down = module.forward, module.act_fn, direct(module.down_proj)
    act, size = silu if type(act) in SILU else direct(act), module.gate_proj.out_features
    dtype = module.down_proj.weight.dtype

    def mlp(x: Tensor) -> Tensor:
        if not may_stand_in(dtype):
            return own(x)
        gate, up = both(x).split_with_sizes((size, size), -1)
        return down(act(gate) * up)

    return mlp
