"""Coupled noise: random numbers that belong to positions of the sequence, not to a drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Noise:
    """Gumbel noise for every token at every position of the output.

    Args:
        lengths: tokens of each row before the first sampled one.
        device: device of the scores.
        generator: the source of all noise; `None` uses torch's global one.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        generator: torch.Generator | None = None,
    ):
        source = device if generator is None else generator.device
        seeds = torch.randint(2**62, (len(lengths),), generator=generator, device=source)
        # Each row has its own generator, so that its output does not depend on other rows.
        self._sources = [torch.Generator(device).manual_seed(seed) for seed in seeds.tolist()]
        self._starts = list(lengths)  # per row, the position of the first stored noise
        self._drawn: list[Tensor | None] = [None] * len(lengths)
        # float64 keeps the chance of the rarest token; some devices do not have it.
        self._dtype = torch.float32 if device.type == "mps" else torch.float64

    def ahead(
        self, rows: Sequence[int], lengths: Mapping[int, int], width: int, vocab: int
    ) -> Tensor:
        """`[n, width, vocab]` the noise of the next positions of n rows.

        Args:
            rows: row numbers of the call.
            lengths: committed tokens of every row of the call; their noise is dropped.
            width: number of positions.
            vocab: size of the vocabulary.
        """
        return torch.stack([self._of_row(row, lengths[row], width, vocab) for row in rows])

    def _of_row(self, row: int, length: int, width: int, vocab: int) -> Tensor:
        drawn, source = self._drawn[row], self._sources[row]
        if drawn is None:
            drawn = torch.empty(0, vocab, dtype=self._dtype, device=source.device)
        drawn = drawn[length - self._starts[row] :]
        while len(drawn) < width:
            # Drawn in blocks of fixed size, so that the noise does not depend on how many
            # positions are asked for at a time.
            uniform = torch.empty(8, vocab, dtype=self._dtype, device=source.device)
            uniform.uniform_(generator=source)  # on a CPU five times as fast as `exponential_`
            drawn = torch.cat([drawn, uniform.log_().neg_().log_().neg_()])
        self._drawn[row], self._starts[row] = drawn, length
        return drawn[:width]
