"""A chain of drafts that is copied on where it leads into what the text has said before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from selfspec.chain import ExitChain
from selfspec.draft import Draft
from selfspec.engine import State
from selfspec.lookup import Lookup
from selfspec.reading import ExitReader
from selfspec.schedule import OptimalStop


class CopyingChain:
    """An exit's drafts, and behind them what followed where their end occurred before.

    A draft takes a pass of the shallow layers, a copy nothing but its part in verification. Text
    that is about to repeat itself, names and phrases above all, does so behind a draft or two.

    Args:
        reader: the exit head and the passes behind it.
        longest: the most tokens of a round, copies among them.
        stop: when to stop drafting, and what copies are worth.
        lookup: what the call's rows said before.

    Attributes:
        drafted: tokens of the last round that the head drafted.
    """

    def __init__(self, reader: ExitReader, longest: int, stop: OptimalStop, lookup: Lookup):
        self._chain = ExitChain(reader, longest, stop)
        self._stop, self._lookup = stop, lookup
        self.drafted = 0
        self._copied: list[int] = []  # tokens of each row

    def propose(self, state: State, limit: int, copying: bool) -> Draft:
        """Draft at most `limit` tokens, copies among them.

        Drawn text repeats itself too seldom: its drafts go without copies.
        """
        self._stop.copying = copying = copying and not state.sampler.do_sample
        draft = self._chain.propose(state, limit)
        self.drafted, self._copied = draft.length, []
        room = min(self._chain.longest, limit) - draft.length
        return self._copied_on(state, draft, room) if copying and room > 0 else draft

    def _copied_on(self, state: State, draft: Draft, room: int) -> Draft:
        drafts = draft.tokens.tolist()
        matches = self._lookup.behind(state.context, drafts)
        leads = [match is not None for match in matches]
        count = self._stop.worth_copying(leads, room)
        if not count:
            return draft
        self._copied = [count * one for one in leads]
        device = state.context.device
        copies = torch.tensor(self._lookup.copied(matches, drafts, count), device=device)
        tokens = torch.cat([draft.tokens, copies], dim=1)
        if all(leads):
            return replace(draft, tokens=tokens)
        counts = torch.tensor(self._copied, device=device) + draft.length
        return replace(draft, tokens=tokens, counts=counts)

    def end(self, accepted: Sequence[int]) -> None:
        """Learn from the round: `accepted` drafts and copies of each row stand."""
        self._stop.end(self.drafted, accepted, self._copied)

    def pause(self) -> None:
        """Leave a round to another way."""
        self._stop.pause()
