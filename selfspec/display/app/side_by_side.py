"""Runs both generations of the page in turn, and reports them as frames."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec.config import DraftConfig
from selfspec.display import Kind, Piece, RoundPieces, kinds
from selfspec.display.demo import (
    WARM_UP_TOKENS,
    DemoOptions,
    Run,
    Writer,
    first_divergence,
    verdict,
)
from selfspec.drafters import DRAFTERS
from selfspec.generation.stopping import StopOnRequest
from selfspec.generation.streaming import RoundStreamer
from selfspec.model import SelfSpecModel
from selfspec.schedule.stats import Round, Stats

# Drafters that draft behind the exit they are told, and those that have no length to be told.
_AT_AN_EXIT = ("early_exit", "tree", "cascade")
_OWN_LENGTH = ("auto", "lookahead")
# Plain decoding is what the page compares with; a draft model is named on the command line.
_UNLESS_NAMED = ("none", "two_model")

LONGEST_DRAFT = 16


class Offer:
    """The choices of how to draft, and the draft that they make.

    Args:
        spec: the target.
        base: the draft to begin with. What a page has no control for stays as it is there, as long
            as its drafter is chosen.

    Attributes:
        drafters: names of the drafters.
        exits: the layers behind which an exit may be.
        exit_layer: the one to begin with.
        num_draft_tokens: the draft length to begin with.

    Raises:
        ValueError: the model has no such exit.
    """

    def __init__(self, spec: SelfSpecModel, base: DraftConfig):
        self.spec, self.base = spec, base
        self.drafters = [
            name for name in DRAFTERS if name not in _UNLESS_NAMED or name == base.drafter
        ]
        fitted = [head.exit_layer for head in spec.heads]
        self.exits = sorted({*range(1, spec.engine.decoder.depth), *fitted})
        self._first = spec.engine.head(base if self.at_an_exit(base.drafter) else DraftConfig())
        self.exit_layer = self._first.exit_layer
        self.num_draft_tokens = self.length_of(base.drafter)

    def heads(self, exit_layer: int) -> list[str]:
        """Kinds of the heads behind that layer, the one to begin with first."""
        kinds = [head.kind for head in self.spec.heads if head.exit_layer == exit_layer]
        if exit_layer == self._first.exit_layer:
            kinds.insert(0, self._first.kind)
        if exit_layer > 0:
            kinds.append("shared")
        return list(dict.fromkeys(kinds))

    def at_an_exit(self, drafter: str) -> bool:
        """Whether it drafts behind an exit that can be chosen."""
        return drafter in _AT_AN_EXIT

    def takes_length(self, drafter: str) -> bool:
        """Whether the length of its drafts can be chosen."""
        return drafter not in _OWN_LENGTH

    def length_of(self, drafter: str) -> int:
        """The draft length to begin with, where it can be chosen."""
        base = self.base if drafter == self.base.drafter else DraftConfig(drafter=drafter)
        return min(base.most_tokens, LONGEST_DRAFT)

    def draft(self, drafter: str, exit_layer: int, head: str, num_draft_tokens: int) -> DraftConfig:
        """The draft that was chosen; what the drafter would not heed is left out.

        Raises:
            ValueError: there can be no such draft.
        """
        chosen = self.base.model_dump(exclude_unset=True) if drafter == self.base.drafter else {}
        chosen["drafter"] = drafter
        if self.at_an_exit(drafter):
            chosen |= {"exit_layer": exit_layer, "head": head}
        if self.takes_length(drafter):
            chosen["num_draft_tokens"] = num_draft_tokens
        return DraftConfig.of(chosen)


# What a page shows at a moment: how far both ways have come.

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


# Writes a prompt on by plain decoding, then by self-speculation, and shows both as they go.

Event = Callable[[], None]


class SideBySide:
    """One model, for as many readers as ask; it writes for one at a time, one way after the other.

    Args:
        spec: the target.
        tokenizer: its tokenizer.
        interval: seconds between two frames.
    """

    def __init__(
        self, spec: SelfSpecModel, tokenizer: PreTrainedTokenizerBase, interval: float = 0.12
    ):
        self.spec, self.tokenizer, self.interval = spec, tokenizer, interval
        # One thread runs the model, so that nothing disturbs what is timed.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="selfspec-app")
        self._closed = threading.Event()

    def close(self) -> None:
        """Stop what is being written, and write no more."""
        self._closed.set()
        self._worker.shutdown(wait=False, cancel_futures=True)

    def write(
        self,
        prompt: str,
        options: DemoOptions,
        stop: threading.Event,
        rejected: bool = False,
    ) -> Iterator[Frame]:
        """Write both texts, which takes a thread of its own; whoever leaves stops it.

        Args:
            prompt: the text to go on from.
            options: the same for both ways.
            stop: once it is set, the text ends; it is set when the frames end.
            rejected: show drafts that did not stand too.

        Yields:
            How far both have come, every `interval` seconds; at last whether they are equal.

        Raises:
            ValueError: the prompt is empty or too long, or there can be no such draft.
        """
        job = _Job(self._writer(prompt, options), rejected, stop, self._closed)
        done = self._worker.submit(job.run)
        done.add_done_callback(lambda _: job.events.put(None))
        try:
            yield job.frame()
            yield from self._frames(job, done)
        finally:
            stop.set()

    def _writer(self, prompt: str, options: DemoOptions) -> Writer:
        if not prompt.strip():
            raise ValueError("an empty prompt; type the beginning of a text, or take an example")
        writer = Writer(self.spec, self.tokenizer, prompt, options)
        length, wanted = writer.inputs["input_ids"].shape[1], options.max_new_tokens
        positions = self.spec.engine.decoder.max_positions
        if positions is not None and length + wanted > positions:
            raise ValueError(
                f"the prompt has {length} tokens, with {wanted} new ones it outgrows the model's "
                f"{positions} positions; shorten it, or write fewer"
            )
        return writer

    def _frames(self, job: _Job, done: Future[Ending | None]) -> Iterator[Frame]:
        """A frame whenever the last one is old enough, and one at the end."""
        shown = time.perf_counter()
        while (event := self._next(job, done)) is not None:
            event()
            if time.perf_counter() - shown >= self.interval:
                yield job.frame()
                shown = time.perf_counter()
        ending = None if done.cancelled() else done.result()
        yield replace(job.frame(), state="done", ending=ending)

    def _next(self, job: _Job, done: Future[Ending | None]) -> Event | None:
        """What the worker tells next, `None` at the end; gives up a place in the queue if told."""
        while True:
            try:
                return job.events.get(timeout=max(self.interval, 0.01))
            except Empty:
                if job.stop.is_set():
                    done.cancel()  # only of use while it waits


class _Job:
    """One prompt, written both ways.

    Args:
        writer: the prompt and the options.
        rejected: show drafts that did not stand too.
        stop: once it is set, the text ends.
        closed: once it is set, every text ends.
    """

    def __init__(
        self, writer: Writer, rejected: bool, stop: threading.Event, closed: threading.Event
    ):
        self.writer, self.stop = writer, stop
        self.asked = StopOnRequest(lambda: stop.is_set() or closed.is_set())
        self.events: SimpleQueue[Event | None] = SimpleQueue()
        context = writer.inputs["input_ids"][0].tolist()
        self.plain = Progress(writer.tokenizer, context, rejected)
        self.speculative = Progress(writer.tokenizer, context, rejected)
        self.state: State = "waiting"

    def frame(self) -> Frame:
        """How far it has come, as far as its events were heard."""
        return Frame(self.state, self.writer.prompt, self.plain.pane(), self.speculative.pane())

    def run(self) -> Ending | None:
        """Write; returns what the texts say about exactness, unless they were stopped."""
        writer = self.writer
        draft, sampled = writer.options.draft, bool(writer.options.temperature)
        # Drafting first: what it refuses is said before anything is written.
        writer.speculative(draft, WARM_UP_TOKENS, stop=self.asked)
        writer.plain(WARM_UP_TOKENS, stop=self.asked)
        plain = self._write("plain", self.plain, writer.plain)
        ours = self._write("speculative", self.speculative, partial(writer.speculative, draft))
        if self.asked.said:
            return None
        divergence = None if sampled else first_divergence(writer, plain, ours)
        equal = None if sampled else divergence is None
        line = verdict(len(plain), equal, writer.exact, divergence)
        return Ending(line, equal, writer.exact)

    def _write(self, way: State, progress: Progress, write: Callable[..., Run]) -> list[int]:
        """Write one way, telling every round; returns its tokens, none once it was stopped."""
        if self.asked.said:
            return []
        self._tell(self._begin, way, progress, time.perf_counter())
        listener = Listener(partial(self._tell, progress.take))
        run = write(streamer=listener, stop=self.asked)
        self._tell(progress.end, run.seconds)
        return run.tokens

    def _tell(self, what: Callable[..., None], *about: Any) -> None:
        """Leave it to the reader's thread."""
        self.events.put(partial(what, *about))

    def _begin(self, way: State, progress: Progress, now: float) -> None:
        self.state = way
        progress.begin(now)
