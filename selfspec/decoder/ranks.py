"""The processes that hold one model in shards, and what they have to decide alike.

Tensor parallel processes write one text, in step: every pass of one waits for the same pass of all
others. All that follows from logits is the same in each of them. What a clock or a random number
decides is for the first of them to say, or they would wait for one another for ever.
"""

from __future__ import annotations

import time
import zlib

import torch
from torch import Tensor, distributed, nn

from selfspec.decoder.placement import is_sharded


class Ranks:
    """The processes of one model; one alone for a model that is not sharded.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module):
        shard = next((tensor for tensor in model.parameters() if is_sharded(tensor)), None)
        self._group = self._device = None
        if shard is not None:
            self._group = shard.device_mesh.get_group()  # pyright: ignore
            self._device = shard.device
            self._first = distributed.get_global_rank(self._group, 0)

    def first(self, values: Tensor) -> Tensor:
        """What the first process gives; every one has to call."""
        if self._group is None:
            return values
        sent = values.to(self._device)
        distributed.broadcast(sent, src=self._first, group=self._group)
        return sent.to(values.device)

    def clock(self) -> float:
        """Seconds from some point in time on, by the first process's clock."""
        return self.agreed(time.perf_counter())

    def agreed(self, value: float) -> float:
        """The first process's value."""
        if self._group is None:
            return value
        return float(self.first(torch.tensor(value, dtype=torch.float64)))

    def draw_alike(self, generator: torch.Generator | None, device: torch.device) -> None:
        """Give every process the random numbers that the first one's generator has next.

        Args:
            generator: the source of the draws; `None` for torch's global one.
            device: where it draws.
        """
        if self._group is None:
            return
        if generator is not None:
            generator.set_state(self.first(generator.get_state()))
        elif device.type == "cpu":
            torch.set_rng_state(self.first(torch.get_rng_state()))
        else:
            source = torch.get_device_module(device)
            source.set_rng_state(self.first(source.get_rng_state(device)), device)

    def check_alike(self, tokens: Tensor) -> None:
        """Raise ValueError, in every process, unless all have the same tokens."""
        if self._group is None:
            return
        sum_of = zlib.crc32(repr(tokens.tolist()).encode())
        ends = torch.tensor([sum_of, -sum_of], device=self._device)
        distributed.all_reduce(ends, distributed.ReduceOp.MIN, group=self._group)
        if ends.sum() != 0:
            raise ValueError(
                "the processes of a tensor parallel model were given different prompts; they write "
                "one text together, so give each of them the same"
            )
