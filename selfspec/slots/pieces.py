"""Views along one dimension of a tensor."""

from __future__ import annotations

from torch import Tensor

_AT_ONCE = 64  # views of one place that are cut together


class Pieces:
    """Pieces of a tensor, as views.

    To cut a view takes longer than Python does to find one. Passes that draft are over one place
    each, one behind the other: views of one place are cut many at a time.

    Args:
        whole: the tensor.
        dim: along which it is cut.
    """

    def __init__(self, whole: Tensor, dim: int):
        self.whole, self._dim, self.length = whole, dim, whole.shape[dim]
        self._block, self._ones = -1, ()

    def view(self, start: int, width: int) -> Tensor:
        """The `width` places from `start` on."""
        if width != 1:
            return self.whole.narrow(self._dim, start, width)
        block, place = divmod(start, _AT_ONCE)
        if block != self._block:
            first = block * _AT_ONCE
            count = min(_AT_ONCE, self.length - first)
            self._ones = self.whole.narrow(self._dim, first, count).split(1, self._dim)
            self._block = block
        return self._ones[place]
