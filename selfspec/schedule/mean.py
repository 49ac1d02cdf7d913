"""Running means, and slopes, of what changes."""

from __future__ import annotations

from dataclasses import dataclass, field

_STEADY = 0.005  # weight of the newest value in a slope
_FADE = 0.03  # share of what a slope stands on that is forgotten at a time
_WILD = 2.0  # a measurement beyond that many times the estimate counts as that many


@dataclass
class Mean:
    """A running mean that trusts its first values most and forgets old ones.

    Attributes:
        weight: of the newest value, once there are enough.
        clipped: whether values are times, which the machine disturbs in one way only: one far above
            the mean is a disturbance, one far below shows that the mean was.
        value: the mean so far.
        count: values seen.
    """

    weight: float
    clipped: bool = False
    value: float = 0.0
    count: int = 0

    @property
    def weighed(self) -> float:
        """How many values it stands on."""
        return min(self.count, 1 / self.weight)

    def doubt(self, count: int) -> None:
        """Trust what is known no more than `count` values: it is old."""
        self.count = min(self.count, count)

    def add(self, value: float) -> None:
        """Take a value."""
        if self.clipped and self.count > 2:
            value = min(value, _WILD * self.value)
        if self.clipped and value * _WILD < self.value:
            self.count = 0
        self.count += 1
        self.value += max(self.weight, 1 / self.count) * (value - self.value)


@dataclass
class Slope:
    """How much one thing changes with another: least squares that forget.

    Attributes:
        usual: what it is before anything was seen.
        doubt: the sum of squared distances that is taken to have told so.
        squares: of the one thing's distances from its mean.
        products: of these with the other thing's.
    """

    usual: float
    doubt: float
    squares: Mean = field(default_factory=lambda: Mean(_STEADY))
    products: Mean = field(default_factory=lambda: Mean(_STEADY))

    @property
    def value(self) -> float:
        """The slope so far."""
        seen = self.squares.weighed
        told = self.products.value * seen + self.usual * self.doubt
        return told / (self.squares.value * seen + self.doubt)

    def add(self, one: float, other: float) -> None:
        """Take in the distances of both from their means."""
        self.squares.add(one * one)
        self.products.add(one * other)

    def fade(self) -> None:
        """Forget some of what was seen: it cannot be seen again."""
        self.squares.value *= 1 - _FADE
        self.products.value *= 1 - _FADE
