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


class CopyingChain(ExitChain):
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
        super().__init__(reader, longest, stop)
        self.stop, self.lookup = stop, lookup
        self.drafted = 0
        self._copied: list[int] = []  # tokens of each row

    def propose(self, state: State, limit: int) -> Draft:
        """Draft at most `limit` tokens, and copy none."""
        draft = super().propose(state, limit)
        self.drafted, self._copied = draft.length, []
        return draft

    def propose_on(self, state: State, limit: int) -> Draft:
        """Draft and copy at most `limit` tokens.

        Drawn drafts go without copies: a token that was not drawn is kept as seldom as the target
        draws it.
        """
        draft = self.propose(state, limit)
        room = min(self.longest, limit) - draft.length
        if room < 1 or not state.sampler.chooses:
            return draft
        context, drafts = state.context, draft.tokens.tolist()
        follow = self.lookup.follows(context, drafts)
        count = self.stop.copies(follow, room)
        if not count:
            return draft
        self._copied = [count * leads for leads in follow]
        behind = self.lookup.behind(context, drafts, count)
        copies = torch.tensor(behind, device=context.device)
        counts = torch.tensor(self._copied, device=context.device) + draft.length
        return replace(
            draft,
            tokens=torch.cat([draft.tokens, copies], dim=1),
            counts=None if all(follow) else counts,
        )

    def end(self, accepted: Sequence[int]) -> None:
        """Learn from the round: `accepted` drafts and copies of each row stand."""
        self.stop.end(self.drafted, accepted, self._copied)
