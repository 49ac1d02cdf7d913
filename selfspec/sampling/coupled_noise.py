"""Coupled noise: random numbers that belong to positions of the sequence, not to a drafter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_AT_ONCE = 8  # positions of a row whose noise is drawn together


class Noise:
    """Gumbel noise for every token at every place of the text that is written.

    Args:
        lengths: tokens of each row before the first that is drawn.
        device: where scores are.
        generator: what all noise comes from; `None` takes torch's global one.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        generator: torch.Generator | None = None,
    ):
        source = device if generator is None else generator.device
        seeds = torch.randint(2**62, (len(lengths),), generator=generator, device=source)
        # Each row has a generator of its own, so that its text does not depend on other rows.
        self._sources = [torch.Generator(device).manual_seed(seed) for seed in seeds.tolist()]
        self._starts = list(lengths)  # of each row, the position whose noise comes first
        self._drawn: list[Tensor | None] = [None] * len(lengths)
        # In float64 the rarest token keeps its chance; some devices have none.
        self._dtype = torch.float32 if device.type == "mps" else torch.float64

    def ahead(self, rows: Sequence[int], lengths: Sequence[int], width: int, vocab: int) -> Tensor:
        """`[n, width, vocab]` the noise of the next positions of n rows.

        Args:
            rows: the rows, as they were numbered when the call began.
            lengths: committed tokens of every row of the call; nobody asks for their noise again.
            width: positions after these.
            vocab: tokens to choose from.
        """
        return torch.stack([self._of_row(row, lengths[row], width, vocab) for row in rows])

    def _of_row(self, row: int, length: int, width: int, vocab: int) -> Tensor:
        drawn, source = self._drawn[row], self._sources[row]
        if drawn is None:
            drawn = torch.empty(0, vocab, dtype=self._dtype, device=source.device)
        drawn = drawn[length - self._starts[row] :]
        while len(drawn) < width:
            # Always so many at once: drafts ask for few positions or for many, and all get the
            # same.
            race = torch.empty(_AT_ONCE, vocab, dtype=self._dtype, device=source.device)
            race.exponential_(generator=source)
            drawn = torch.cat([drawn, race.log_().neg_()])
        self._drawn[row], self._starts[row] = drawn, length
        return drawn[:width]
