"""Runs both generations of the page in turn, and reports them as frames."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec.apps.display.demo import WARM_UP_TOKENS, Comparison, DemoOptions, Run, verdict
from selfspec.apps.display.trace import Kind, Piece, RoundPieces, kinds
from selfspec.config import DraftConfig
from selfspec.drafters import DRAFTERS
from selfspec.generation.stopping import StopOnRequest
from selfspec.generation.streaming import RoundStreamer
from selfspec.model import SelfSpecModel
from selfspec.schedule.stats import Round, Stats

# Drafters whose exit can be chosen, and those whose draft length cannot.
_AT_AN_EXIT = ("early_exit", "tree", "cascade")
_OWN_LENGTH = ("auto", "lookahead")
# Plain decoding is the other side; a draft model has to be named on the command line.
_UNLESS_NAMED = ("none", "two_model")

LONGEST_DRAFT = 16


class DraftMenu:
    """The drafts that can be chosen: `drafters` and `exits`, and the initial settings.

    Settings of the initial draft `base` without a control on the page are kept as long as its
    drafter is chosen. Raises ValueError if the model has no such exit.
    """

    def __init__(self, spec: SelfSpecModel, base: DraftConfig):
        self.spec, self.base = spec, base
        self.drafters = [
            name for name in DRAFTERS if name not in _UNLESS_NAMED or name == base.drafter
        ]
        fitted = [head.exit_layer for head in spec.heads]
        self.exits = sorted({*range(1, spec.decoder.depth), *fitted})
        self._first = spec.engine.head(base if self.at_an_exit(base.drafter) else DraftConfig())
        self.exit_layer = self._first.exit_layer
        self.num_draft_tokens = self.length_of(base.drafter)

    def heads(self, exit_layer: int) -> list[str]:
        """Kinds of the heads at an exit layer, the initial one first."""
        kinds = [head.kind for head in self.spec.heads if head.exit_layer == exit_layer]
        if exit_layer == self._first.exit_layer:
            kinds.insert(0, self._first.kind)
        if exit_layer > 0:
            kinds.append("shared")
        return list(dict.fromkeys(kinds))

    def at_an_exit(self, drafter: str) -> bool:
        """Whether the drafter's exit can be chosen."""
        return drafter in _AT_AN_EXIT

    def takes_length(self, drafter: str) -> bool:
        """Whether the drafter's draft length can be chosen."""
        return drafter not in _OWN_LENGTH

    def length_of(self, drafter: str) -> int:
        """The initial draft length of a drafter."""
        base = self.base if drafter == self.base.drafter else DraftConfig(drafter=drafter)
        return min(base.most_tokens, LONGEST_DRAFT)

    def draft(self, drafter: str, exit_layer: int, head: str, num_draft_tokens: int) -> DraftConfig:
        """The chosen draft, without settings that the drafter ignores.

        Raises ValueError if the settings are invalid.
        """
        chosen = self.base.model_dump(exclude_unset=True) if drafter == self.base.drafter else {}
        chosen["drafter"] = drafter
        if self.at_an_exit(drafter):
            chosen |= {"exit_layer": exit_layer, "head": head}
        if self.takes_length(drafter):
            chosen["num_draft_tokens"] = num_draft_tokens
        return DraftConfig.of(chosen)


State = Literal["waiting", "plain", "speculative", "done"]


@dataclass(frozen=True)
class Pane:
    """The output of one generation so far."""

    pieces: tuple[Piece, ...] = ()  # the text
    seconds: float = 0.0  # prefill included
    counts: Mapping[Kind, int] = field(default_factory=dict)  # rejected drafts included
    stats: Stats = field(default_factory=Stats)

    @property
    def rate(self) -> float:
        """Tokens per second; 0 before the first token."""
        return self.stats.emitted / self.seconds if self.seconds > 0 else 0.0


class Ending(NamedTuple):
    """The comparison of both outputs."""

    line: str  # the result
    equal: bool | None  # whether they are equal; `None` if they were sampled
    exact: bool  # whether they must be


@dataclass(frozen=True)
class Frame:
    """Both panes at one moment."""

    state: State  # which generation runs; `"waiting"` before, `"done"` after
    prompt: str  # of both
    plain: Pane = Pane()  # output of the model's own `generate`
    speculative: Pane = Pane()  # output of selfspec's
    ending: Ending | None = None  # once both are complete; `None` if they were stopped before

    @property
    def speedup(self) -> float:
        """Speed of self-speculation over plain decoding so far; 0 before both have begun."""
        return self.speculative.rate / self.plain.rate if self.plain.rate else 0.0


class Progress(RoundStreamer):
    """Collects the output of one generation; another thread may read it at any time."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: list[int], rejected: bool):
        self.cut = RoundPieces(tokenizer, context, rejected=rejected, skip_special_tokens=True)
        self.pieces: list[Piece] = []
        self.counts: Counter[Kind] = Counter()
        self.stats = Stats()
        self.began = self.seconds = 0.0
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        """Take the prompt, then tokens of plain decoding, each as a round without drafts."""
        if self._prompt_seen:
            for token in value.flatten().tolist():
                self._take(Round((), 0, token))
        self._prompt_seen = True

    def put_round(self, steps: Sequence[Round]) -> None:
        """Take a round of selfspec's."""
        self._take(*steps)

    def end(self) -> None:
        """Show what is held of an incomplete character."""
        self.pieces.append(self.cut.flush())

    def _take(self, step: Round) -> None:
        self.pieces += self.cut.push(step)
        self.counts.update(kinds(step))
        with nullcontext() if self.stats.emitted else self.stats.prefilling():
            self.stats.count(step)

    def pane(self) -> Pane:
        """A snapshot."""
        seconds = self.seconds
        if self.began and not seconds:
            seconds = time.perf_counter() - self.began
        return Pane(tuple(self.pieces), seconds, dict(self.counts), replace(self.stats))


class SideBySide:
    """Generates for any number of readers, one at a time."""

    def __init__(
        self, spec: SelfSpecModel, tokenizer: PreTrainedTokenizerBase, interval: float = 0.12
    ):
        self.spec, self.tokenizer, self.interval = spec, tokenizer, interval
        # One thread runs the model, so that nothing disturbs the timing.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="selfspec-app")
        self._closed = threading.Event()

    def close(self) -> None:
        """Stop the current generation and refuse further ones."""
        self._closed.set()
        self._worker.shutdown(wait=False, cancel_futures=True)

    def write(
        self,
        prompt: str,
        options: DemoOptions,
        stop: threading.Event,
        rejected: bool = False,
    ) -> Iterator[Frame]:
        """Generate plainly, then self-speculatively, until `stop` is set; with `rejected` drafts.

        Yields both outputs every `interval` seconds, and at the end with their comparison. Raises
        ValueError if the prompt is empty or too long, or the draft is invalid.
        """
        job = _Job(self._writer(prompt, options), rejected, stop, self._closed)
        done = self._worker.submit(job.run)
        try:
            yield job.frame()
            while not done.done():
                if stop.is_set():
                    done.cancel()  # has an effect only before it starts
                if not wait([done], timeout=0 if done.cancelled() else self.interval).done:
                    yield job.frame()
            ending = None if done.cancelled() else done.result()
            yield replace(job.frame(), state="done", ending=ending)
        finally:
            stop.set()

    def _writer(self, prompt: str, options: DemoOptions) -> Comparison:
        if not prompt.strip():
            raise ValueError("an empty prompt; type the beginning of a text, or take an example")
        writer = Comparison(self.spec, self.tokenizer, prompt, options)
        length, wanted = writer.inputs["input_ids"].shape[1], options.max_new_tokens
        positions = self.spec.decoder.max_positions
        if positions is not None and length + wanted > positions:
            raise ValueError(
                f"the prompt has {length} tokens, with {wanted} new ones it outgrows the model's "
                f"{positions} positions; shorten it, or generate fewer"
            )
        return writer


class _Job:
    """One prompt, continued plainly and self-speculatively in the worker thread."""

    def __init__(
        self, writer: Comparison, rejected: bool, stop: threading.Event, closed: threading.Event
    ):
        self.writer = writer
        self.asked = StopOnRequest(lambda: stop.is_set() or closed.is_set())
        context = writer.inputs["input_ids"][0].tolist()
        self.plain = Progress(writer.tokenizer, context, rejected)
        self.speculative = Progress(writer.tokenizer, context, rejected)
        self.state: State = "waiting"

    def frame(self) -> Frame:
        """Both outputs so far."""
        return Frame(self.state, self.writer.prompt, self.plain.pane(), self.speculative.pane())

    def run(self) -> Ending | None:
        """Generate both; returns their comparison, unless it was stopped."""
        writer = self.writer
        draft = writer.options.draft
        # Drafting first: an invalid draft is refused before anything is shown.
        writer.speculative(draft, WARM_UP_TOKENS, stop=self.asked)
        writer.plain(WARM_UP_TOKENS, stop=self.asked)
        plain = self._generate("plain", self.plain, writer.plain)
        ours = self._generate("speculative", self.speculative, partial(writer.speculative, draft))
        if self.asked.said:
            return None
        divergence = writer.divergence(plain, ours) if writer.comparable else None
        equal = divergence is None if writer.comparable else None
        return Ending(verdict(writer, len(plain), divergence), equal, writer.exact)

    def _generate(self, state: State, progress: Progress, write: Callable[..., Run]) -> list[int]:
        """Run one generation; returns its tokens, none if it was stopped before."""
        if self.asked.said:
            return []
        self.state, progress.began = state, time.perf_counter()
        run = write(streamer=progress, stop=self.asked)
        progress.seconds = run.seconds
        return run.tokens
