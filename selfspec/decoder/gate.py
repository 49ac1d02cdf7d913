"""What stands in for one decoder layer while a pass is on."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from selfspec.decoder.devices import device_of
from selfspec.decoder.inputs import MASK
from selfspec.decoder.kernels.graphs import Stretch
from selfspec.decoder.passes import ActivePass, Own, Skips

if TYPE_CHECKING:
    from selfspec.decoder.gates import Gates


class Gate:
    """Stands in for a decoder layer while its gates are in."""

    def __init__(self, gates: Gates, index: int, layer: nn.Module):
        self.gates = gates
        self.index = index
        self.layer = layer
        self.window = gates.windows[index]

    def __getattr__(self, name: str) -> Any:
        """What the layer has: the body may ask it for its type."""
        return getattr(self.layer, name)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; hand `hidden_states` through where it is skipped or outside the span."""
        gates = self.gates
        active = gates.active
        if active is None or gates.owner != threading.get_ident():
            # Plain use of the model, from a streamer or from another thread.
            return self.layer(hidden_states, *args, **kwargs)
        handed = hidden_states
        start, stop = active.span
        if self.index == stop:
            active.result = hidden_states
        if self.index == start and active.hidden is not None:
            hidden_states = active.hidden
        if self.index in active.keep:
            active.kept[self.index] = hidden_states
        skips = active.skips
        if start <= self.index < stop and (skips is None or not self.is_skipped(skips)):
            output = self.run(active, hidden_states, *self._masked(active, args, kwargs))
        else:
            output = (hidden_states,) if gates.returns_tuple else hidden_states
        if self.index == stop - 1 and stop == gates.depth:
            left = output[0] if isinstance(output, tuple) else output
            active.result = active.kept[stop] = left
        if gates.survey is not None:
            gates.survey.layer(self.layer, (handed, *args), kwargs, output)
        return output

    def is_skipped(self, skips: Skips) -> bool:
        """Whether a pass leaves out the whole layer."""
        return self.index in skips.layers

    def run(
        self,
        active: ActivePass,
        hidden_states: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the layer, or a head's own in its place, with what it is to be handed."""
        own, skips, gates = active.own, active.skips, self.gates
        if own is not None and self.index == active.span.stop - 1:
            return self._run_own(own, active, hidden_states, args, kwargs)
        skipped = () if skips is None else gates.sublayers.skipped(self.index, skips)
        began = time.perf_counter()
        if skipped:
            with gates.skipping(self.layer, skipped):
                output = self.layer(hidden_states, *args, **kwargs)
        else:
            output = self._call(self.layer, hidden_states, args, kwargs)
        active.layer_seconds += time.perf_counter() - began
        gates.returns_tuple = isinstance(output, tuple)
        return output

    def _run_own(
        self,
        own: Own,
        active: ActivePass,
        hidden_states: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        began = time.perf_counter()
        if own.enter is not None:
            hidden_states = own.enter(hidden_states)
        if "_hf_hook" in self.layer.__dict__:  # which brings the layer what comes from elsewhere
            device = device_of(own.layer)
            args, kwargs = send_to_device((args, kwargs), device, skip_keys="past_key_values")
        graphs, output = self.gates.graphs, None
        if graphs is not None:
            stretch = Stretch([own.layer], self.index, [(args, kwargs)], [0])
            output = graphs.run(active, stretch, hidden_states)
        if output is None:
            output = self._call(own.layer, hidden_states, args, kwargs)
        elif self.gates.returns_tuple:
            output = (output,)
        active.head_seconds += time.perf_counter() - began
        return output

    def _call(
        self,
        layer: nn.Module,
        hidden_states: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        compiled = self.gates.compiled
        if compiled is None:
            return layer(hidden_states, *args, **kwargs)
        return compiled(layer, self.index, hidden_states, args, kwargs)

    def _masked(
        self, active: ActivePass, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The layer's arguments with the slots' mask for its window."""
        if not active.masks:
            return args, kwargs
        mask, full = active.masks[self.window], active.masks[None]
        if active.add_masks:
            kwargs = dict(kwargs)
            kwargs[MASK] = _added(kwargs.get(MASK), mask)
            return args, kwargs
        if mask is full:
            return args, kwargs
        args = tuple(mask if arg is full else arg for arg in args)
        return args, {name: mask if arg is full else arg for name, arg in kwargs.items()}


def _added(own: Tensor | None, mask: Tensor) -> Tensor:
    """The family's own mask, which carries its position bias, with the slots' mask on top."""
    if own is None or own.dtype == torch.bool:
        return mask
    return torch.where(mask < 0, mask, own.to(mask.dtype))
