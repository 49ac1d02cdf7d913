"""How likely a draft falls: by its place, and by what is feared of it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from selfspec.schedule.mean import Mean, Slope

_RECENT = 0.01  # weight of the newest draft in how many fall: texts change
_DRAWN = 0.0025  # the same where a coin decides: what changes with the text is lost in luck
_PLACED = 0.01  # in what a place adds
_DOUBT = 3.0  # falls, as often as feared, that are taken for seen before any were
_DOUBT_DRAWN = 1.0  # the same of drawn drafts: how seldom two draws agree is more than will fall
_PLACE_DOUBT = 10.0  # drafts at a place that fell like others, taken for seen
_SLOPE_DOUBT = 0.4  # squared distances of fears from their mean, in sum, that told as they should


@dataclass
class Falls:
    """How often drafts fall that all before them stand behind, learned round by round.

    Linear regression that forgets. A draft falls as often as others did lately, but for its place
    (block verification forgives: what is behind a draft that was hardly kept falls less often), and
    for what is feared of it beyond the usual. How much that tells is learned, too: fears may be
    right, or all the same to the verdict, or too small where they are large.

    Attributes:
        fell: the share that fell.
        feared: the share that was to fall, by what was feared of them.
        places: by the number of drafts before, how many more fell than elsewhere.
        fears: by the number of drafts before, how much more was feared.
        telling: how much more often drafts fall, by how much more they were feared for.
        doubt: falls, as often as feared, that count as seen.
    """

    fell: Mean = field(default_factory=lambda: Mean(_RECENT))
    feared: Mean = field(default_factory=lambda: Mean(_RECENT))
    places: dict[int, Mean] = field(default_factory=lambda: defaultdict(lambda: Mean(_PLACED)))
    fears: dict[int, Mean] = field(default_factory=lambda: defaultdict(lambda: Mean(_PLACED)))
    telling: Slope = field(default_factory=lambda: Slope(1.0, _SLOPE_DOUBT))
    doubt: float = _DOUBT
    _level: float = field(init=False)  # how many fall, wherever they stand: asked for often

    def __post_init__(self):
        """Begin with what is handed in."""
        self._find_level()

    @classmethod
    def of_drawn(cls) -> Falls:
        """What is learned of drawn drafts."""
        return cls(fell=Mean(_DRAWN), feared=Mean(_DRAWN), doubt=_DOUBT_DRAWN)

    def usual(self, place: int) -> float:
        """How likely a draft falls that has that many before it, if it is not asked of."""
        return _bounded(self._level + _at(self.places, place))

    def expected(self, place: int, fear: float) -> float:
        """How likely it falls if so much is feared of it."""
        if not self.fell.count:
            return fear
        told = self.telling.value * self._unusual(place, fear)
        return _bounded(self._level + _at(self.places, place) + told)

    def add(self, place: int, fell: bool, fear: float | None = None) -> None:
        """Take in a draft that was reached, and what was feared of it, if that was asked."""
        if self.fell.count:
            beyond = fell - self._level
            if fear is not None and self.feared.count:
                left = beyond - _at(self.places, place)
                self.telling.add(self._unusual(place, fear), left)
                self.fears[place].add(fear - self.feared.value)
            self.places[place].add(beyond)
        self.fell.add(fell)
        if fear is not None:
            self.feared.add(fear)
        self._find_level()

    def unseen(self, place: int) -> None:
        """A draft there would have been reached, and was not made: what is known of it fades."""
        at = self.places[place]
        at.doubt(max(0, int(at.weighed) - 1))

    def _unusual(self, place: int, fear: float) -> float:
        """How much more is feared than usually there."""
        return fear - self.feared.value - _at(self.fears, place)

    def _find_level(self) -> None:
        if not self.feared.count:
            self._level = self.fell.value
            return
        seen, fear = self.fell.weighed, self.feared.value
        # Where next to nothing is feared, for as much as is ever seen, and no more.
        doubt = self.doubt / max(fear, self.doubt * self.fell.weight)
        self._level = (self.fell.value * seen + fear * doubt) / (seen + doubt)


def _at(places: dict[int, Mean], place: int) -> float:
    """What a place adds, as far as it has been seen."""
    added = places[place]
    return added.value * added.weighed / (added.weighed + _PLACE_DOUBT)


def _bounded(chance: float) -> float:
    return min(1.0, max(0.0, chance))
