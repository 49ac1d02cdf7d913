"""Writes a prompt on by plain decoding, then by self-speculation, and shows both as they go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from transformers import PreTrainedTokenizerBase

from selfspec.display.app.frames import Ending, Frame, Listener, Progress, State
from selfspec.display.demo import DemoOptions, Writer, first_divergence, verdict
from selfspec.display.demo.writer import WARM_UP_TOKENS, Run
from selfspec.generation.stopping import StopOnRequest
from selfspec.model import SelfSpecModel

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
