"""What a call keeps for its caller beside the tokens: scores and logits of every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class StepRecord:
    """One `[vocab]` vector per emitted token of each row, or nothing when not asked for.

    Attributes:
        wanted: whether the caller asked for them.
        rows: the vectors kept so far, per row of the call.
        block: `[rows, k + 1, vocab]` vectors of the round that is being cut, unfinished rows.
    """

    wanted: bool
    rows: list[list[Tensor]] = field(default_factory=list)
    block: Tensor | None = None

    def begin(self, block: Tensor, branch: Tensor | None) -> None:
        """Take the vectors of a round whose tokens have not been cut yet.

        Args:
            block: `[rows, n + 1, vocab]` behind each place of the block.
            branch: `[rows, levels]` the places that count, of a tree.
        """
        if self.wanted:
            if branch is not None:
                way = torch.nn.functional.pad(branch, (1, 0))[..., None]
                block = block.gather(1, way.expand(-1, -1, block.shape[2]))
            self.block = block.float()

    def keep(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Settle the first `counts` vectors of the round."""
        if self.block is None:
            return
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            self.rows[row].extend(self.block[index, :count].unbind(0))

    def until(self, row: int, index: int, place: int) -> tuple[Tensor, ...] | None:
        """What a criterion is given for `row` (at `index` in the round) after `place` new tokens.

        As in plain decoding a tuple of `[batch, vocab]`, one per step; all rows show this row's.
        """
        if self.block is None:
            return None
        steps = [*self.rows[row], *self.block[index, :place].unbind(0)]
        return tuple(step.expand(len(self.rows), -1) for step in steps)

    def steps(self) -> tuple[Tensor, ...] | None:
        """`[batch, vocab]` per step, as transformers returns them; zeros where a row has ended."""
        if not self.wanted:
            return None
        longest = max((len(row) for row in self.rows), default=0)
        blank = next((torch.zeros_like(row[0]) for row in self.rows if row), None)
        return tuple(
            torch.stack([row[step] if step < len(row) else blank for row in self.rows])  # type: ignore[misc]
            for step in range(longest)
        )
