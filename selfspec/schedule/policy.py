"""Which way to draft next: the one that has been fastest, while the others are kept in view.

Every way is judged by what it brought and took when it was used. Trying another costs time when it
is slower; so much is tried that the time lost stays below a small share of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from selfspec.schedule.mean import Mean
from selfspec.schedule.pace import FAST, Pace

PLAIN = "none"  # the way that drafts nothing

_STRETCH = 4  # rounds of a trial
_SETTLED = 8  # rounds that the best way is chosen for
_ENOUGH = 16  # rounds from which luck no longer decides
_SPREAD = 0.5  # of the tokens of a round: standard deviation over mean
_WASTE = {True: 0.01, False: 0.005}  # share of the time that trials may lose of known ways, of new
_DEAREST = 4.0  # times its loss that the trial of a way that lags far behind is charged with
_AGAIN = 0.005  # share of the time without plain decoding that looking at it again may lose
_CREDIT = 1.0  # rounds that may be lost before anything is known
_STALE = 32  # rounds after which a way is worth another look
_USUAL = 0.02  # weight of the newest round in what rounds of a way take
_OLD = 8  # rounds that such a time counts for which was not seen for long
_SHADOW = 0.02  # weight of a token in how often a head would have agreed
_LUCK = 1.5  # standard deviations of that which are no change of the text
_ROUNDING = 1e-9
_MARGIN = 1.02  # how much faster another way must look


@dataclass
class Way:
    """What is known of one way to draft.

    Attributes:
        pace: its rounds' seconds, and tokens of a row.
        shadow: how often it would have agreed with the text, whoever drafted.
        agreed: `shadow` in the rounds that its pace is of; what it has gained since says how the
            text changed.
        firsts: of a head's chain and its tree, tokens that the head's first choices alone bring in
            a round of the tree's levels, learned in rounds of both; `None` for other ways.
        firsts_then: `firsts` in the rounds that its pace is of.
        seen: the round of the last use.
        since: the policy's seconds then.
        guess: its rate by what is known elsewhere, for as long as it was not used here.
        levels: the most drafts that a round can keep.
    """

    # A machine that is slow for a while is slow for all ways: what the one in use takes just then
    # would make the others, last seen before, look fast.
    pace: Pace = field(default_factory=lambda: Pace(round_seconds=Mean(_USUAL, clipped=True)))
    shadow: Mean = field(default_factory=lambda: Mean(_SHADOW))
    agreed: Mean = field(default_factory=lambda: Mean(FAST))
    firsts: Mean | None = None
    firsts_then: Mean = field(default_factory=lambda: Mean(FAST))
    seen: int = 0
    since: float = 0.0
    guess: float | None = None
    levels: int = 1

    def pair(self, firsts: Mean) -> None:
        """Judge it by what its head's first choices bring in rounds of as many levels as these."""
        if firsts is not self.firsts:
            self.firsts, self.firsts_then = firsts, Mean(FAST)

    @property
    def known(self) -> bool:
        """Whether there is something to judge it by."""
        return self.pace.known or self.guess is not None

    @property
    def rate(self) -> float:
        """Tokens per second and row, as far as can be told."""
        if self.guess is not None and not self.pace.known:
            return self.guess
        return self.pace.rate * self._change

    @property
    def _change(self) -> float:
        """How many times as many tokens its rounds would bring now."""
        if self.firsts is not None and self.firsts.count and self.firsts_then.count:
            change = self.firsts.value / self.firsts_then.value
        elif self.agreed.count:
            now, then = self.shadow.value, self.agreed.value
            # Luck changes how often first drafts are kept; a text, how often deeper ones are, too.
            luck = _LUCK * (_SHADOW * then * (1 - then)) ** 0.5
            now = then + max(0.0, now - then - luck) - max(0.0, then - now - luck)
            change = self._length(now) / self._length(then)
        else:
            return 1.0
        # No round keeps more than its levels.
        return min(change, (self.levels + 1) / max(1.0, self.pace.tokens.value))

    def _length(self, agreement: float) -> float:
        """Tokens of a round whose drafts are kept that often: a geometric series."""
        if 1 - agreement < _ROUNDING:
            return self.levels + 1.0
        return (1 - agreement ** (self.levels + 1)) / (1 - agreement)

    @property
    def hope(self) -> float:
        """The rate that bad luck may hide."""
        return self.rate * (1 + self._luck)

    @property
    def proven(self) -> float:
        """The rate that is left without good luck, while there are few rounds."""
        few = self.pace.known and self.pace.tokens.count < _ENOUGH
        return self.rate * (1 - self._luck) if few else self.rate

    @property
    def _luck(self) -> float:
        """Two standard errors of the rate, as a share of it."""
        return 2 * _SPREAD / max(1, self.pace.tokens.count) ** 0.5


@dataclass
class Policy:
    """Chooses among ways to draft, round by round; may outlive the call.

    Attributes:
        ways: what is known of each, the one to begin with first.
        shadows: what several ways share of such knowledge, by its name.
        all_firsts: the same of what first choices bring.
        rounds: rounds so far.
        seconds: what they took.
        lost: seconds that trials took beyond what the best way would have, as they were charged, by
            whether anything was known of what was tried.
    """

    ways: dict[str, Way] = field(default_factory=dict)
    shadows: dict[str, Mean] = field(default_factory=dict)
    all_firsts: dict[str, Mean] = field(default_factory=dict)
    rounds: int = 0
    seconds: float = 0.0
    lost: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})
    _best: str = ""
    _current: str = ""
    _left: int = 0
    _trial: bool = False
    _known: bool = False  # whether what is tried was
    _dear: float = 1.0

    @property
    def _round_seconds(self) -> float:
        return self.seconds / max(1, self.rounds)

    def way(self, name: str, levels: int | None = None) -> Way:
        """What is known of a way; one of other `levels` is another way."""
        found = self.ways.get(name)
        if found is None or levels not in (None, found.levels):
            found = self.ways[name] = Way(levels=levels or 1)
        return found

    def shadow(self, name: str) -> Mean:
        """How often something that several ways share would have agreed with the text."""
        return self.shadows.setdefault(name, Mean(_SHADOW))

    def firsts(self, name: str, levels: int) -> Mean:
        """How many tokens the first choices of a head bring in a round of so many levels."""
        return self.all_firsts.setdefault(f"{name} {levels}", Mean(FAST))

    @property
    def is_settled(self) -> bool:
        """Whether the next choice was made with an earlier one."""
        return self._left > 0

    def choose(self, ways: Mapping[str, object]) -> str:
        """The way of the next round, one of the keys of `ways`."""
        if self._left > 0 and self._current in ways:
            self._left -= 1
            return self._current
        for name in ways:
            self.way(name)
        best = self._best = self.best(ways)
        trial = self._to_try(ways, best)
        self._trial = trial is not None
        self._current = trial or best
        self._known = self.ways[self._current].known
        self._dear = self._charge(self.ways[self._current], self.ways[best])
        if trial and self._is_stale(self.ways[trial]):
            self.ways[trial].pace.tokens.doubt(_ENOUGH)
            self.ways[trial].agreed.doubt(_ENOUGH)
            self.ways[trial].firsts_then.doubt(_ENOUGH)
            self.ways[trial].pace.round_seconds.doubt(_OLD)
        # To choose takes time, too.
        self._left = (_STRETCH if trial else _SETTLED) - 1
        return self._current

    def best(self, ways: Mapping[str, object]) -> str:
        """The fastest as far as is known; the one that was where no other is clearly faster."""
        first = next(iter(ways))
        if not self.ways[first].pace.known:
            return first
        before = self._best if self._best in ways and self.ways[self._best].known else first
        # What a few lucky rounds put first is tried on, but not yet chosen: it would be used until
        # as many more have told otherwise. Plain decoding has no luck.
        known = {
            name: self.ways[name].rate if name in (before, PLAIN) else self.ways[name].proven
            for name in ways
            if self.ways[name].known
        }
        best = max(known, key=lambda name: known[name])
        return before if known[best] < _MARGIN * known[before] else best

    def _to_try(self, ways: Mapping[str, object], best: str) -> str | None:
        """A way that was not fairly tried, or not for long, if its trial may be afforded."""
        top = self.ways[best]
        if not top.known:
            return None
        credit = _CREDIT * self._round_seconds
        budget = {k: _WASTE[k] * self.seconds + credit - lost for k, lost in self.lost.items()}
        others = [name for name in ways if name != best]
        # A few unlucky rounds may have put off what is best: such a way is tried on soon. Not at
        # once, for the text may be an easy one just there.
        unlucky = [] if self._trial else [n for n in others if self._is_unlucky(self.ways[n], top)]
        afforded = [n for n in unlucky if sum(budget.values()) > 0 or self.ways[n].rate > top.rate]
        if afforded:
            return max(afforded, key=lambda name: self.ways[name].hope)
        # What was never tried may be better than all the rest; what is known may have been judged
        # by the wrong rounds. Neither has to wait until the other was afforded.
        unknown = [name for name in others if not self.ways[name].known][:1]
        known = [name for name in others if self.ways[name].known]
        stale = [name for name in known if self._is_stale(self.ways[name])]
        for name in unknown + sorted(stale, key=lambda name: self.ways[name].seen):
            way = self.ways[name]
            if self._price(way, top) <= max(0.0, budget[way.known]):
                return name
        # Plain decoding is what must never be missed, and a few rounds tell how fast it is.
        plain = self.ways.get(PLAIN)
        if plain is not None and PLAIN in others and plain.known and self._is_stale(plain):
            saved = _AGAIN * (self.seconds - plain.since)
            return PLAIN if self._price(plain, top) <= saved else None
        return None

    def _is_unlucky(self, way: Way, top: Way) -> bool:
        return way.pace.known and way.pace.tokens.count < _ENOUGH and way.hope > top.rate

    def _is_stale(self, way: Way) -> bool:
        return self.rounds - way.seen >= _STALE

    def _price(self, way: Way, top: Way) -> float:
        """Seconds that a trial is expected to be charged with."""
        if not way.known:
            return _STRETCH / 2 * self._round_seconds
        slower = max(0.0, 1 - way.rate / top.rate) if top.rate else 0.0
        seconds = way.pace.round_seconds.value or self._round_seconds
        return _STRETCH * seconds * slower * self._charge(way, top)

    def _charge(self, way: Way, top: Way) -> float:
        """How dear a trial's seconds are: the further a way lags behind, the less it promises."""
        if not way.known or not way.rate:
            return 1.0
        return min(_DEAREST, max(1.0, top.rate / way.rate) ** 2)

    def learn(self, name: str, tokens: float, seconds: float, firsts: float | None = None) -> None:
        """Take in a round.

        Args:
            name: the way.
            tokens: that it brought, of a row on average.
            seconds: that it took.
            firsts: tokens that its head's first choices alone bring, if it showed that.
        """
        way = self.way(name)
        way.pace.round_seconds.add(seconds)
        way.pace.tokens.add(tokens)
        # The mean of a mean that has few values makes most of the first of them: luck, which would
        # look like a change of the text.
        if way.shadow.count * _SHADOW >= 1:
            way.agreed.add(way.shadow.value)
        if firsts is not None:
            way.firsts_then.add(firsts)
        self.rounds += 1
        way.seen = self.rounds
        self.seconds += seconds
        way.since = self.seconds
        if self._trial and name == self._current:
            best = self.ways[self._best].rate
            if best > 0:
                lost = max(0.0, seconds - tokens / best)
                self.lost[self._known] += lost * self._dear
