"""What a page shows at a moment: how far both ways have come."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec.display import Kind, Piece, RoundPieces, kinds
from selfspec.generation.streaming import RoundStreamer
from selfspec.schedule.stats import Round, Stats

State = Literal["waiting", "plain", "speculative", "done"]


@dataclass(frozen=True)
class Pane:
    """What one way has written so far.

    Attributes:
        pieces: the text, each piece with where it came from.
        tokens: how many tokens it has.
        seconds: what they took, reading the prompt included.
        counts: tokens by where they came from, drafts that did not stand among them.
        acceptance_rate: accepted over drafted.
        mean_accepted_length: tokens of a round.
    """

    pieces: tuple[Piece, ...] = ()
    tokens: int = 0
    seconds: float = 0.0
    counts: Mapping[Kind, int] = field(default_factory=dict)
    acceptance_rate: float = 0.0
    mean_accepted_length: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second; 0 where there is nothing to tell yet."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class Ending(NamedTuple):
    """What the two texts say about exactness.

    Attributes:
        line: in a line.
        equal: whether they are equal; `None` for sampled ones.
        exact: whether they had to be.
    """

    line: str
    equal: bool | None
    exact: bool


@dataclass(frozen=True)
class Frame:
    """Both panes at a moment.

    Attributes:
        state: which way is writing; `"waiting"` before, `"done"` after.
        prompt: the text that both go on from.
        plain: what the model's own `generate` has written.
        speculative: what selfspec's has.
        ending: what the texts say about exactness, once both are whole.
    """

    state: State
    prompt: str
    plain: Pane = Pane()
    speculative: Pane = Pane()
    ending: Ending | None = None

    @property
    def stopped(self) -> bool:
        """Whether it ended before the texts were whole."""
        return self.state == "done" and self.ending is None

    @property
    def speedup(self) -> float:
        """How many times faster self-speculation is, as far as both have come; 0 before."""
        return self.speculative.rate / self.plain.rate if self.plain.rate else 0.0


class Progress:
    """Collects what one way writes, round by round, into panes.

    Args:
        tokenizer: the target's.
        context: tokens of the prompt.
        rejected: show drafts that did not stand too.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: list[int], rejected: bool):
        self.cut = RoundPieces(tokenizer, context, rejected=rejected, skip_special_tokens=True)
        self.pieces: list[Piece] = []
        self.counts: Counter[Kind] = Counter()
        self.stats = Stats()
        self.began: float | None = None
        self.seconds: float | None = None

    def begin(self, now: float) -> None:
        """The way begins to read the prompt."""
        self.began = now

    def take(self, step: Round) -> None:
        """A round was settled; the first of all is what reading the prompt wrote."""
        self.pieces += self.cut.push(step)
        self.counts.update(kinds(step))
        first = not self.stats.emitted
        self.stats.count(step)
        if first:
            self.stats.prefilled, self.stats.rounds = self.stats.emitted, 0

    def end(self, seconds: float) -> None:
        """The way has written all."""
        self.pieces.append(self.cut.flush())
        self.seconds = seconds

    def pane(self) -> Pane:
        """What there is by now."""
        seconds = self.seconds
        if seconds is None:
            seconds = 0.0 if self.began is None else time.perf_counter() - self.began
        return Pane(
            tuple(self.pieces),
            self.stats.emitted,
            seconds,
            dict(self.counts),
            self.stats.acceptance_rate,
            self.stats.mean_accepted_length,
        )


class Listener(RoundStreamer):
    """Hands every round on; each token of plain decoding is a round without drafts.

    Args:
        tell: is given the rounds.
    """

    def __init__(self, tell: Callable[[Round], None]):
        self.tell, self.began = tell, False

    def put(self, value: Tensor) -> None:
        """Take the prompt, then tokens of plain decoding."""
        if self.began:
            for token in value.flatten().tolist():
                self.tell(Round((), 0, token))
        self.began = True

    def put_round(self, steps: Sequence[Round]) -> None:
        """Take a round."""
        (step,) = steps
        self.tell(step)

    def end(self) -> None:
        """Nothing follows."""
