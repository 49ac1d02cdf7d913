"""Code of others in a model: hooks, modules, forwards, attentions, and weights that are not dense.

Code of the packages that selfspec is built on runs in inference mode, which takes less time than
`no_grad`. Others may keep the tensors that they see, change them later or compute gradients, as
they may in the model's own `generate`. Tensors made in inference mode do not allow it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from selfspec.decoder.families import attention_of

_BUILT_ON = {"torch", "transformers", "peft", "accelerate", "selfspec"}


def without_gradients(foreign: bool) -> AbstractContextManager[object]:
    """Inference mode, or `no_grad` where code of others runs."""
    return torch.no_grad() if foreign else torch.inference_mode()


def has_foreign_code(model: PreTrainedModel) -> bool:
    """Whether a pass of the model runs code of others, or has weights that are not dense."""
    modules = [*model.modules()]
    return any(map(_is_foreign, _code(model, modules))) or any(
        weight is not None and weight.layout != torch.strided
        for module in modules
        for weight in module._parameters.values()
    )


def _code(model: PreTrainedModel, modules: list[nn.Module]) -> Iterator[object]:
    """What a pass runs: classes, functions and objects that are called."""
    kinds = {type(module) for module in modules}
    yield from kinds
    for kind in kinds:
        yield from with_wrapped(kind.forward)
    for module in modules:
        if module._forward_pre_hooks or module._forward_hooks or "forward" in module.__dict__:
            yield from module._forward_pre_hooks.values()
            yield from module._forward_hooks.values()
            yield from with_wrapped(module.__dict__.get("forward"))
    yield from torch_module._global_forward_pre_hooks.values()
    yield from torch_module._global_forward_hooks.values()
    yield from with_wrapped(ALL_ATTENTION_FUNCTIONS.get(attention_of(model)))


def with_wrapped(function: object) -> tuple[object, ...]:
    """A function, and those that it wraps; nothing for `None`."""
    if function is None:
        return ()
    return function, *with_wrapped(getattr(function, "__wrapped__", None))


def _is_foreign(code: object) -> bool:
    while isinstance(code, partial):
        code = code.func
    function = getattr(code, "__func__", code)
    names = getattr(function, "__globals__", None)  # `__module__` may be that of what it wraps
    if names is None:
        kind = function if isinstance(function, type) else type(function)
        names = {"__name__": kind.__module__}
    return names.get("__name__", "").partition(".")[0] not in _BUILT_ON
