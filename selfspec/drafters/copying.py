"""A chain of drafts that is copied on where it leads into what the text has said before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from selfspec.drafters.chain import ExitChain
from selfspec.drafters.engine import State
from selfspec.drafters.exit_readers import ExitReader
from selfspec.drafters.suffix_lookup import Lookup, Match
from selfspec.heads import AcceptanceEstimator
from selfspec.sampling.draft import Draft
from selfspec.schedule import OptimalStop
from selfspec.schedule.pace import Pace

_LOOK = 16  # rounds, in one of which what did not pay is copied
_LONG = 8  # tokens of a match from which on another makes no difference

# From the drafts of each row to what matches their end in what was said before.
Find = Callable[[Sequence[Sequence[int]]], list[Match]]


class CopyingStop(OptimalStop):
    """Stops drafting also where copies bring nearly as much in less time.

    A copy costs no more than to be verified, and is the likelier to stand, the more tokens before
    it have been said before. Where both would stand, a copy is what the next draft would have been.
    So drafting on is worth only the places where the copy falls and the draft stands, and what can
    be drafted behind.

    What copies bring makes time worth more.

    Args:
        pace: times and gains so far; may outlive the call.
        copy_cost: drafts whose verification takes as long as that of a copy, which goes through
            all layers and not only those above the exit.

    Attributes:
        drafts: tokens of each row in this round.
        matches: of their ends, with what was said before.
    """

    def __init__(self, pace: Pace, copy_cost: float = 1.0):
        super().__init__(pace)
        self._copy_cost = copy_cost
        self._find: Find | None = None
        self._most = 0
        self.drafts: list[list[int]] = []
        self.matches: list[Match] = []
        self._count = 0  # tokens to copy behind these drafts
        self._cut = False  # whether the chain ended for them

    def prepare(self, find: Find | None, most: int) -> None:
        """Before a round.

        Args:
            find: tells where drafts lead; `None` to copy nothing.
            most: tokens of the round, drafts and copies.
        """
        if (find is None) != (self._find is None):
            self._look_next = self._rounds  # what time is worth was another's
        self._find, self._most = find, most

    def begin(self, judge: AcceptanceEstimator) -> None:
        """Time the round from here."""
        super().begin(judge)
        self.drafts, self.matches, self._count, self._cut = [], [], 0, False

    def goes_on(self, scores: Tensor, tokens: Tensor, probs: Tensor | None) -> bool:
        """Whether a row on average gains enough, and more than by copying."""
        on = super().goes_on(scores, tokens, probs)
        if self._find is None:
            return on
        new = tokens.tolist()
        before = self.drafts or [[] for _ in new]
        self.drafts = [said + more for said, more in zip(before, new, strict=True)]
        self.matches = self._find(self.drafts)
        self._count = self._best_count() if self._leads else 0
        self._cut = on and bool(self._count) and self._better_copied()
        return on and not self._cut

    @property
    def _leads(self) -> bool:
        """Whether there is something to copy, and enough known to decide by."""
        return self._knows and any(match.length for match in self.matches)

    def _better_copied(self) -> bool:
        """Whether another draft would bring less beyond what copies bring than its time is worth.

        One step ahead: behind a draft that was copied as well, the question is the same again.
        """
        stands, passes = self._usually_stands(self._made), 0.0
        for reach, match in zip(self._all_kept(), self.matches, strict=True):
            copy_stands = 1 - self._falls_behind(match.length) if match.length else 0.0
            passes += reach * max(0.0, stands - copy_stands) / len(self.matches)
        saved = self._cost - self._copy_seconds
        return passes * (1 + self._worth_behind(self._made + 1)) < saved * self._rate

    def _worth_behind(self, drafted: int) -> float:
        """Tokens that drafts behind so many that stand bring beyond what their time is worth."""
        worth, best, reach = 0.0, 0.0, 1.0
        for place in range(drafted, self._most):
            reach *= self._usually_stands(place)
            worth += reach - self._cost * self._rate
            best = max(best, worth)
        return best

    def count(self) -> int:
        """How many tokens to copy behind the drafts."""
        if not self._leads or self._made >= self._most:
            return 0
        return self._count or self._copy_again()

    def _best_count(self) -> int:
        """How many tokens to copy, for the most of what they bring beyond their time's worth."""
        rows = zip(self._all_kept(), self.matches, strict=True)
        reach = {row: kept for row, (kept, match) in enumerate(rows) if match.length}
        price = self._copy_seconds * self._rate * len(self.matches)
        best, count, worth = 0.0, 0, 0.0
        for place in range(self._most - self._made):
            for row in reach:
                reach[row] *= 1 - self._falls_behind(self.matches[row].length + place)
            worth += sum(reach.values()) - price
            if worth > best:
                best, count = worth, place + 1
        return count

    def _falls_behind(self, said: int) -> float:
        """How likely a copy falls behind so many tokens that were said before."""
        return self.pace.copy_falls.usual(min(said, _LONG))

    def _copy_again(self) -> int:
        """One token, now and then, to see whether it has become worth it; none otherwise."""
        self.pace.passed_up += 1
        return int(self.pace.passed_up % _LOOK == 0)

    def _without_drafts(self) -> tuple[float, float]:
        """The same with copies behind, as many as lately, whatever drafts they came instead of."""
        tokens, seconds = super()._without_drafts()
        if self._find is None:
            return tokens, seconds
        pace = self.pace
        seconds += pace.copies_made.value * self._copy_seconds
        return tokens + pace.copies_kept.value, seconds

    @property
    def _copy_seconds(self) -> float:
        """Seconds by which a copied token makes a round longer."""
        return self._copy_cost * self.pace.verifying(self._rows)

    def end(self, drafted: int, accepted: Sequence[int], copied: Sequence[int] = ()) -> None:
        """Learn from the round.

        Args:
            drafted: drafts of each row.
            accepted: of these and of what was copied behind them, how many stand.
            copied: tokens of each row that were.
        """
        copies = max(copied, default=0)
        self._end(drafted, accepted, copies * self._copy_cost, self._cut)
        if self._find is None:
            return
        beyond = [max(0, kept - drafted) for kept in accepted]
        self.pace.copies_made.add(copies)
        self.pace.copies_kept.add(sum(beyond) / len(beyond))
        for kept, count, match in zip(accepted, copied, self.matches, strict=False):
            self._learn_copies(match.length, kept - drafted, count)

    def _learn_copies(self, said: int, stand: int, count: int) -> None:
        """Learn from a row of so many copies behind as many tokens that were said before.

        `stand` of them do, or not even all drafts (< 0).
        """
        falls = self.pace.copy_falls
        for place in range(min(count, stand + 1)):
            falls.add(min(said + place, _LONG), place == stand)
        if count and stand == count and said + count <= _LONG:  # behind it all are one place
            falls.unseen(said + count)


class CopyingChain:
    """An exit's drafts, and behind them what followed where their end occurred before.

    A draft takes a pass of the shallow layers, a copy nothing but its part in verification. Text
    that is about to repeat itself, names and phrases above all, does so behind a draft or two.

    Args:
        reader: the exit head and the passes behind it.
        longest: the most tokens of a round, copies among them.
        stop: when to stop drafting, and how many copies are worth it.
        lookup: what the call's rows said before.

    Attributes:
        drafted: tokens of the last round that the head drafted.
    """

    def __init__(self, reader: ExitReader, longest: int, stop: CopyingStop, lookup: Lookup):
        self._chain = ExitChain(reader, longest, stop)
        self._stop, self._lookup = stop, lookup
        self.drafted = 0
        self._copied: list[int] = []  # tokens of each row

    def propose(self, state: State, limit: int, copying: bool) -> Draft:
        """Draft at most `limit` tokens, copies among them.

        Drawn text repeats itself too seldom: its drafts go without copies.
        """
        copying = copying and not state.sampler.do_sample
        if copying:
            self._lookup.read(state.context)
        find = self._lookup.behind if copying else None
        self._stop.prepare(find, min(self._chain.longest, limit))
        draft = self._chain.propose(state, limit)
        self.drafted, self._copied = draft.length, []
        count = self._stop.count()
        return self._copied_on(state, draft, count) if count else draft

    def _copied_on(self, state: State, draft: Draft, count: int) -> Draft:
        drafts, matches = self._stop.drafts, self._stop.matches
        self._copied = [count if match.length else 0 for match in matches]
        device = state.context.device
        copies = torch.tensor(self._lookup.copied(matches, drafts, count), device=device)
        tokens = torch.cat([draft.tokens, copies], dim=1)
        if all(self._copied):
            return replace(draft, tokens=tokens)
        counts = torch.tensor(self._copied, device=device) + draft.length
        return replace(draft, tokens=tokens, counts=counts)

    def end(self, accepted: Sequence[int]) -> None:
        """Learn from the round: `accepted` drafts and copies of each row stand."""
        self._stop.end(self.drafted, accepted, self._copied)

    def pause(self) -> None:
        """Leave a round to another way."""
        self._stop.pause()
