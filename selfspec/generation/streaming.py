"""Streams accepted tokens to a transformers streamer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.generation.streamers import BaseStreamer

from selfspec.sampling.sampler import Context
from selfspec.schedule.stats import Round


class RoundStreamer(BaseStreamer):
    """A streamer that is shown where each token came from, a round at a time."""

    def put_round(self, steps: Sequence[Round]) -> None:
        """Take what each row that took part made of a round, after `put` has taken the prompt."""
        raise NotImplementedError


class Stream:
    """Feeds a streamer, or nobody.

    One row: all tokens of a round in one put. Several rows, which speculation writes at different
    speeds: one put of `[batch]` tokens per step, as plain decoding does, once every row has got
    there; rows that have ended show padding.

    Args:
        streamer: sync, iterator or async streamer of transformers, or `None`.
        start: length of the prompt, as the caller gave it.
        padding: token shown for rows that have ended.
    """

    def __init__(self, streamer: BaseStreamer | None, start: int, padding: int):
        self.streamer = streamer
        self.shown = start
        self.padding = padding

    def put(self, context: Context, finished: Sequence[int], rounds: Sequence[Round]) -> None:
        """Show what has become committed.

        Args:
            context: the text, as far as it is committed.
            finished: rows that ended in this round.
            rounds: what each row that took part made of it.
        """
        if self.streamer is None:
            return
        if isinstance(self.streamer, RoundStreamer):
            self.streamer.put_round(rounds)
            return
        if len(context.lengths) == 1:
            self.streamer.put(torch.tensor(context.new(0, self.shown), dtype=torch.long))
            self.shown = context.lengths[0]
            return
        going = [row for row in context.rows if row not in finished]
        lengths = context.lengths
        ready = min((lengths[row] for row in going), default=max(lengths))
        new = [context.new(row, self.shown) for row in range(len(lengths))]
        for step in range(ready - self.shown):
            column = [row[step] if step < len(row) else self.padding for row in new]
            self.streamer.put(torch.tensor(column))
        self.shown = max(self.shown, ready)

    def end(self) -> None:
        """Tell the streamer that nothing follows."""
        if self.streamer is not None:
            self.streamer.end()
