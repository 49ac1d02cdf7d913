"""Views along one dimension of tensors."""

from __future__ import annotations

from torch import Tensor

_AT_ONCE = 64  # views of one place that are cut together


class Pieces:
    """Pieces of tensors that are as long as each other, as views.

    To cut a view takes longer than Python does to find one. Passes that draft are over one place
    each, one behind the other: views of one place are cut many at a time.

    Args:
        wholes: the tensors.
        dim: along which they are cut.
    """

    def __init__(self, *wholes: Tensor, dim: int):
        self.wholes, self._dim, self.length = wholes, dim, wholes[0].shape[dim]
        self._first = self._last = 0  # the places that are cut
        self._ones: list[tuple[Tensor, ...]] = []

    def view(self, start: int, width: int) -> tuple[Tensor, ...]:
        """The `width` places from `start` on, of each."""
        if width != 1:
            return tuple([whole.narrow(self._dim, start, width) for whole in self.wholes])
        if not self._first <= start < self._last:
            self._cut(start)
        return self._ones[start - self._first]

    def _cut(self, start: int) -> None:
        first = start - start % _AT_ONCE
        count = min(_AT_ONCE, self.length - first)
        parts = [whole.narrow(self._dim, first, count) for whole in self.wholes]
        self._ones = list(zip(*(part.split(1, self._dim) for part in parts), strict=True))
        self._first, self._last = first, first + count
