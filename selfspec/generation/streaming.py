"""Streams accepted tokens to a transformers streamer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from selfspec.sampling.context import Context
from selfspec.schedule.stats import Round


class RoundStreamer(BaseStreamer):
    """A streamer that receives whole rounds, with the origin of each token."""

    def put_round(self, steps: Sequence[Round]) -> None:
        """Receive a round of each unfinished row; `put` has received the prompt before."""
        raise NotImplementedError


class Stream:
    """Feeds the caller's streamer.

    With one row, all tokens of a round are one `put`. Several rows advance at different speeds:
    each step is one `put` of `[batch]` tokens, as in plain decoding, once every row has reached it;
    finished rows get padding.

    Args:
        streamer: sync, iterator or async streamer of transformers.
        start: length of the prompt as given by the caller, padding included.
        padding: token for finished rows.
    """

    def __init__(self, streamer: BaseStreamer, start: int, padding: int):
        self.streamer = streamer
        self.shown = start
        self.padding = padding

    def put(self, context: Context, finished: Sequence[int], rounds: Sequence[Round]) -> None:
        """Stream the newly committed tokens.

        Args:
            context: the committed tokens.
            finished: rows that stopped in this round.
            rounds: the round of each row that took part.
        """
        if isinstance(self.streamer, RoundStreamer):
            self.streamer.put_round(rounds)
            return
        if len(context.lengths) == 1:
            self.streamer.put(_on_host(context.new(0, self.shown)))
            self.shown = context.lengths[0]
            return
        going = [row for row in context.rows if row not in finished]
        lengths = context.lengths
        ready = min((lengths[row] for row in going), default=max(lengths.values()))
        new = [context.new(row, self.shown) for row in range(len(lengths))]
        for step in range(ready - self.shown):
            column = [row[step] if step < len(row) else self.padding for row in new]
            self.streamer.put(_on_host(column))
        self.shown = max(self.shown, ready)

    def end(self) -> None:
        """End the stream."""
        self.streamer.end()


def _on_host(tokens: list[int]) -> Tensor:
    return torch.tensor(tokens, dtype=torch.long, device="cpu")
