"""Bytes that a round has to read, and how fast this device reads them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import nn

from selfspec.bench.tune.clock import wait_for
from selfspec.decoder import Decoder, Span
from selfspec.heads import ExitHead

_MOST = 2**30  # bytes of the buffer that is read: beyond any cache
_COLUMNS = 1024
_TURNS = 7
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class Traffic:
    """Bytes of weights and KV that the passes of a round read, each weight once a pass.

    Embeddings, activations and what is written are left out, so that a round cannot read less.

    Args:
        decoder: the target.

    Raises:
        ValueError: the target is a mixture of experts, of which a pass reads some.
    """

    def __init__(self, decoder: Decoder):
        if any(getattr(decoder.config, name, None) for name in _EXPERTS):
            raise ValueError(
                f"{type(decoder.causal_lm).__name__} is a mixture of experts: how much of it a "
                "pass reads depends on the tokens, so there is no such limit; leave --limit out"
            )
        self.decoder = decoder
        self._layers = [_bytes([layer]) for layer in decoder.layers]
        self._lm_head = _bytes([decoder.lm_head])
        self._token = kv_bytes(decoder)

    @property
    def weights(self) -> int:
        """Bytes of the weights that a step of plain decoding reads."""
        return sum(self._layers) + self._lm_head

    def plain(self, context: float) -> float:
        """Bytes that a step of plain decoding reads behind `context` tokens."""
        return self._span(0, self.decoder.depth, context) + self._lm_head

    def round(self, head: ExitHead, num_draft_tokens: int, context: float) -> float:
        """Bytes that a round with a chain of drafts reads; without drafts it is a plain step."""
        if num_draft_tokens == 0:
            return self.plain(context)
        # The last draft passes the shallow layers when it is verified.
        shallow = (num_draft_tokens + 1) * self._span(0, head.exit_layer, context)
        deep = self._span(head.exit_layer, self.decoder.depth, context) + self._lm_head
        once = _bytes(m for n, m in head.named_children() if n in ("feature_norms", "fuse"))
        each = _bytes([head]) - once - _bytes([head.calibrators])
        each += self._lm_head if head.lm_head is None else _bytes([head.lm_head])
        if head.layer is not None:
            each += self._kept(head.place, context)
        return shallow + deep + once + num_draft_tokens * each

    def _span(self, start: int, stop: int, context: float) -> float:
        return sum(self._layers[i] + self._kept(i, context) for i in range(start, stop))

    def _kept(self, layer: int, context: float) -> float:
        """Bytes of KV that a token reads in a layer."""
        window = self.decoder.windows[layer]
        return self._token[layer] * (context if window is None else min(context, window))


def kv_bytes(decoder: Decoder) -> list[int]:
    """Measured: bytes of one token's keys and values in each layer."""
    slots = decoder.new_slots(1)
    with torch.inference_mode():
        token = torch.zeros(1, 1, dtype=torch.long, device=decoder.device)
        decoder.run(token, Span(0, decoder.depth), slots)
    return slots.token_bytes


def _bytes(modules: Iterable[nn.Module]) -> int:
    return sum(tensor.nbytes for module in modules for tensor in module.parameters())


def read_bandwidth(nbytes: int, device: torch.device) -> float:
    """Bytes per second of reading `nbytes` again and again, by the fastest of two kernels.

    What fits into a cache is read from there, as a model of that size would be.
    """
    rows = max(1, min(nbytes, _MOST) // (4 * _COLUMNS))
    matrix = torch.ones(rows, _COLUMNS, device=device)
    vector = torch.ones(_COLUMNS, device=device)
    seconds = min(_seconds(lambda: matrix @ vector, device), _seconds(matrix.sum, device))
    return matrix.nbytes / seconds


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """The shortest of several runs: a limit is what the device can do when nothing disturbs it."""
    taken: list[float] = []
    for _ in range(_TURNS):
        wait_for(device)
        start = time.perf_counter()
        call()
        wait_for(device)
        taken.append(time.perf_counter() - start)
    return min(taken)
