"""Recordings of what a CPU does, and a body that does more than graphs can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from selfspec.decoder import CACHE


class Watch(TorchDispatchMode):
    """Notes every operation, and refuses those that a stream cannot record."""

    def __init__(self):
        super().__init__()
        self.done: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        numbered = func is torch.ops.aten.index.Tensor and not any(
            part is not None and part.dtype == torch.bool for part in args[1]
        )
        if tags & set(func.tags) and not numbered:
            raise RuntimeError(f"{func} is not permitted when stream is capturing")
        output = func(*args, **(kwargs or {}))
        self.done.append((func, args, kwargs or {}, output))
        return output


class CpuTape:
    """Does the same operations on the same tensors again."""

    replays = 0

    def __init__(self, run: Callable[[], list[Tensor]]):
        with Watch() as watch:
            self.outputs = run()
        self._done = watch.done

    def replay(self) -> None:
        type(self).replays += 1
        for func, args, kwargs, output in self._done:
            again = func(*args, **kwargs)
            for place, value in zip(tree_leaves(output), tree_leaves(again), strict=True):
                if isinstance(place, Tensor):
                    place.copy_(value)


class Meddling(LlamaModel):
    """A body that may do more than hand hidden states from layer to layer."""

    meddle: str | int = ""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        past_key_values: Any = None,
        use_cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        if attention_mask is not None and attention_mask.ndim == 2:  # of the model's own generate
            attention_mask = None
        hidden = self.embed_tokens(input_ids)
        if self.meddle == "first":
            hidden = hidden * 2
        turned = self.rotary_emb(hidden, position_ids=position_ids)
        for index, layer in enumerate(self.layers):
            hidden = layer(
                hidden,
                attention_mask=attention_mask,
                position_embeddings=tuple(turned),
                **{CACHE: past_key_values if cache is None else cache},
            )
            if self.meddle == "between" and index == 1:
                hidden = hidden + 1
            if self.meddle == "in place" and index == 1:
                hidden.mul_(2)
            marked = input_ids == self.meddle if isinstance(self.meddle, int) else None
            if marked is not None and marked.any() and index == 1:
                hidden = hidden + marked[..., None]
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))
