"""Continuous batching: new requests join the batch as others finish.

Each request has a session as in a call of `generate` of its own, with its own text, processors,
stopping criteria and noise, so that its output does not depend on other rows. Requests share only
the passes of the model. New requests are prefilled as a group, which then joins the running group.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from selfspec.config import Options
from selfspec.decoder import Pass, entered, has_foreign_code, locked, without_gradients
from selfspec.decoder.cache import WIDEST
from selfspec.drafters import Drafter
from selfspec.drafters.engine import State
from selfspec.generation.loop import AT_LAST_POSITION, Session, check_logits, room_of
from selfspec.generation.prompts import Prompt
from selfspec.generation.rounds import RowRound, StepRecord, read_rounds
from selfspec.generation.stopping import Stops
from selfspec.sampling.context import Context
from selfspec.sampling.coupled_noise import Noise
from selfspec.sampling.draft import Draft, Tree, Verdict
from selfspec.sampling.processors import Processor, joined, signature
from selfspec.sampling.sampler import Sampler
from selfspec.schedule.stats import Round, Stats, Trace

PREFILL = 512  # tokens, padding included, that are prefilled between two rounds


@dataclass
class RequestOutput(GenerationOutput):
    """The result of one request of `generate_batch`, with the fields of transformers' results.

    Times are those of `time.perf_counter`.

    Attributes:
        request_id: `req_0`, `req_1`, …, in the order of the prompts.
        prompt_ids: the prompt.
        generated_tokens: the new tokens, including the one that ended the text.
        logprobs: empty, as transformers' are by default.
        error: why the request failed, or `None`.
        status: `RequestStatus.FINISHED` or `FAILED`.
        created_time: when the prompt was read.
        lifespan: when the prompt's prefill began, and when the request ended.
        timestamps: when each new token was committed, with `record_timestamps`; else `None`.
        trace: every round of the request.
    """

    trace: Trace = field(default_factory=lambda: Trace([[]]))

    def begin(self) -> None:
        """The prefill begins."""
        self.status = RequestStatus.PREFILLING
        self.lifespan = time.perf_counter(), -1

    def fail(self, error: Exception) -> None:
        """The request ends with an error."""
        self.error = f"{type(error).__name__}: {error}"

    def end(self) -> None:
        """The request has finished or failed."""
        self.status = RequestStatus.FINISHED if self.error is None else RequestStatus.FAILED
        self.lifespan = self.lifespan[0], time.perf_counter()
        self.generated_tokens = self.trace.tokens()

    @property
    def number(self) -> int:
        """Index of the prompt in the call."""
        return int(self.request_id.removeprefix("req_"))

    @property
    def stats(self) -> Stats:
        """Counters of the request; seconds are not known per request."""
        stats, rounds = Stats(), self.trace.rows[0]
        with stats.prefilling():
            for step in rounds[:1]:
                stats.count(step)
        for step in rounds[1:]:
            stats.count(step)
        return stats


@dataclass
class Request:
    """One prompt.

    Attributes:
        output: its result, complete when it leaves the batch.
        session: its session, which holds its processors and criteria and is not run itself.
        context: its tokens so far.
        signature: what its processors must have in common with others' to be applied to all rows
            together; `None` if they are applied to its row alone.
    """

    output: RequestOutput
    session: Session
    context: Context
    signature: list[tuple[type, Options]] | None = None

    @contextmanager
    def ends_by_error(self) -> Iterator[None]:
        """Make an exception in the `with` block end only this request."""
        try:
            yield
        except Exception as error:
            self.output.fail(error)


Requests = dict[int, Request]  # by number, which is also the row's number


class JoinedContext(Context):
    """The tokens of several requests, each of which has a context with one row.

    They are also in one buffer, for processors that are applied to all rows together.

    Args:
        requests: the requests.
        device: the buffer's device.
        criteria: whether stopping criteria read the requests' contexts.
    """

    def __init__(self, requests: Requests, device: torch.device, criteria: bool):
        tokens = torch.zeros(len(requests), 0, dtype=torch.long, device=device)
        super().__init__(tokens, [], list(requests))
        self.requests, self._criteria = requests, criteria
        for row, request in requests.items():
            self.lengths[row], self.text[row] = request.context.lengths[0], request.context.text[0]
            self._filled[row] = 0
        self._indices = {row: index for index, row in enumerate(requests)}
        self.alike = self._are_alike()

    def _are_alike(self) -> bool:
        first, *others = (request.signature for request in self.requests.values())
        return first is not None and all(other == first for other in others)

    @property
    def _writes_each(self) -> bool:
        """Whether anything reads the requests' own contexts."""
        return self._criteria or not self.alike

    def _index(self, row: int) -> int:
        return self._indices[row]

    def write(self, block: Tensor, offset: int = 0) -> None:
        """Write `block` `[rows, n]` at `offset` after the committed tokens of unfinished rows."""
        if self.alike:
            super().write(block, offset)
        if self._writes_each:
            for row, tokens in zip(self.rows, block.split(1), strict=True):
                self.requests[row].context.write(tokens, offset)

    def commit(self, row: int, tokens: Sequence[int], written: bool) -> None:
        """Commit tokens of a row; `written` ones are in the buffers already."""
        self.requests[row].context.commit(0, tokens, written and self._writes_each)
        if written and self.alike and self._filled[row] == self.lengths[row]:
            self._filled[row] += len(tokens)
        self.lengths[row] += len(tokens)

    def join(self, other: JoinedContext) -> None:
        """Append other requests, which `requests` has already."""
        self.rows = self.rows + other.rows
        self.lengths |= other.lengths
        self.text |= other.text
        self._filled |= dict.fromkeys(other.rows, 0)
        taken = {*self._indices.values()}
        free = (index for index in count() if index not in taken)
        self._indices |= dict(zip(other.rows, free, strict=False))
        missing = 1 + max(self._indices.values()) - self._tokens.shape[0]
        if missing > 0:
            self._tokens = torch.nn.functional.pad(self._tokens, (0, 0, 0, missing))
        self.alike = self._are_alike()

    def leave(self, row: int) -> None:
        """Forget a request."""
        for known in (self.lengths, self.text, self._filled, self._indices):
            del known[row]


class JoinedNoise(Noise):
    """The noise of several requests."""

    def __init__(self, requests: Requests):
        self.requests = requests

    def ahead(
        self, rows: Sequence[int], lengths: Mapping[int, int], width: int, vocab: int
    ) -> Tensor:
        """`[n, width, vocab]` the noise of the next positions of n rows."""
        noises = [(self.requests[row].session.sampler.noise, lengths[row]) for row in rows]
        return torch.cat([n.ahead([0], {0: length}, width, vocab) for n, length in noises if n])


class JoinedSampler(Sampler):
    """Applies each request's own processors; an exception ends only that request.

    Processors that read only scores, and those of transformers that are alike in all requests, are
    applied to all rows together.

    Args:
        requests: the requests.
        like: a sampler of the same options.
        generator: source of random numbers, except coupled noise.
    """

    def __init__(self, requests: Requests, like: Sampler, generator: torch.Generator | None):
        noise = None if like.noise is None else JoinedNoise(requests)
        options = like.do_sample, generator, noise, like.rule
        super().__init__(like.processors, *options, eos=like.eos)
        self.requests = requests
        self._joined: tuple[list[int], Sequence[Processor]] = ([], [])  # for which rows

    def _for_rows(self, context: Context) -> Sequence[Processor]:
        if self._joined[0] != context.rows:
            own = [self.requests[row].session.sampler.in_blocks for row in context.rows]
            self._joined = list(context.rows), joined(own)
        return self._joined[1]

    def scores(self, logits: Tensor, context: Context, offset: int = 0) -> Tensor:
        """Processed scores `[batch, n, vocab]`."""
        if context.alike or not self.reads_prefix:
            return super().scores(logits, context, offset)

        def score(index: int, request: Request) -> Tensor:
            own = logits[index : index + 1]
            return request.session.sampler.scores(own, request.context, offset)

        return self._each(logits, context, score)

    def tree_scores(
        self, logits: Tensor, context: Context, tokens: Tensor, tree: Tree, first: int = 0
    ) -> Tensor:
        """Processed scores `[batch, n, vocab]` after positions of a tree's block."""
        if context.alike or not self.reads_prefix:
            return super().tree_scores(logits, context, tokens, tree, first)

        def score(index: int, request: Request) -> Tensor:
            here = slice(index, index + 1)
            sampler, text = request.session.sampler, request.context
            own = tree.of_row(index)
            return sampler.tree_scores(logits[here], text, tokens[here], own, first)

        return self._each(logits, context, score)

    def forced(self, context: Context, most: int) -> list[list[int]]:
        """The tokens that each request's processors are expected to force next."""
        tokens: list[list[int]] = [[] for _ in context.rows]
        for index, row in enumerate(context.rows):
            request = self.requests[row]
            if request.output.error is None:
                with request.ends_by_error():
                    tokens[index] = request.session.sampler.forced(request.context, most)[0]
        return tokens

    def _each(
        self, logits: Tensor, context: Context, score: Callable[[int, Request], Tensor]
    ) -> Tensor:
        """Each row's scores by its own processors; unprocessed logits if the request failed."""
        scores = []
        for index, row in enumerate(context.rows):
            request, own = self.requests[row], logits[index : index + 1].float()
            if request.output.error is None:
                with request.ends_by_error():
                    own = score(index, request)
            scores.append(own)
        return torch.cat(scores)


class JoinedStops(Stops):
    """Calls each request's own stopping criteria; an exception ends only that request."""

    def __init__(self, requests: Requests, like: Stops):
        super().__init__(StoppingCriteriaList(like.others), like.ranks)
        self.requests = requests

    def remaining(self, context: Context) -> int:
        """The most tokens that an unfinished row may still emit."""
        own = [self.requests[row] for row in context.rows]
        return max(request.session.stops.remaining(request.context) for request in own)

    def cut(
        self, context: Context, blocks: Sequence[Sequence[int]], scores: StepRecord
    ) -> tuple[list[int], list[bool]]:
        """How many tokens of each row's block are kept, and whether the row stops there."""
        cuts = [
            self._cut(self.requests[row], block, scores)
            for row, block in zip(context.rows, blocks, strict=True)
        ]
        return [kept for kept, _ in cuts], [ended for _, ended in cuts]

    def _cut(self, request: Request, block: Sequence[int], scores: StepRecord) -> tuple[int, bool]:
        if request.output.error is None:
            with request.ends_by_error():
                (kept,), (ended,) = request.session.stops.cut(request.context, [block], scores)
                return kept, ended
        return 0, True


class Group(Session):
    """Requests whose rows share passes.

    Args:
        requests: the requests.
        drafter: a new drafter.
        generator: source of random numbers, except coupled noise.
        stats: counters of the whole call.
        done: the results of finished requests are appended here.
    """

    def __init__(
        self,
        requests: Requests,
        drafter: Drafter,
        generator: torch.Generator | None,
        stats: Stats,
        done: deque[RequestOutput],
    ):
        one = next(iter(requests.values())).session
        for request in requests.values():
            request.output.begin()
        prompt = _joined([request.output.prompt_ids for request in requests.values()], one)
        sampler = JoinedSampler(requests, one.sampler, generator)
        stops = JoinedStops(requests, one.stops)
        options = one.config, None, one.adapters
        super().__init__(one.engine, drafter, prompt, sampler, stops, *options)
        self.requests, self.stats, self.done = requests, stats, done
        self.chunk = self.chunk or PREFILL
        self.room = WIDEST + max(
            room_of(request.session.stops, request.context) for request in requests.values()
        )

    def begin(self, running: Group | None, between: Callable[[], None]) -> Group:
        """Prefill, then join the running group; returns the group of all requests.

        Args:
            running: the running group, if there is one.
            between: runs a round of the running group; called between two passes of the prefill.
        """
        self._between, self._joins = between, running is not None
        try:
            self.running = self.start()
        finally:
            del self._between  # a batch that is dropped before its end is freed at once
        if running is None or not running.running.rows:
            return self
        if self.running.rows:
            running.join(self)
        return running

    def join(self, other: Group) -> None:
        """Append the rows of another group."""
        self.running.join(other.running, other.room)
        self.drafter.join(other.drafter)
        self.requests.update(other.requests)
        self.context.join(other.context)

    def state(self) -> State:
        """The state before the prefill; rows that will join a group need only space for prompts."""
        device, criteria = self.prompt.tokens.device, bool(self.stops.others)
        self.context = JoinedContext(self.requests, device, criteria)
        switches = [request.session.prompt.switches() for request in self.requests.values()]
        switches = [at for row in switches if row is not None for at in row] or None
        slots = self.prompt.slots(0 if self._joins else self.room, switches)
        pending, keep = self.prompt.tokens[:, -1:], self.drafter.keep
        return State(slots, self.context, pending, self.sampler, self.stats, keep)

    def prefilled(self, state: State, block: Pass, offset: int, counts: Sequence[int]) -> None:
        """Called after each pass of the prefill."""
        super().prefilled(state, block, offset, counts)
        if offset + block.hidden.shape[1] < max(counts):
            began = time.perf_counter()
            self._between()
            self._run_next(state)
            self.stats.seconds["prefill"] -= time.perf_counter() - began

    def step(self, state: State) -> None:
        """End requests that have no position left; run one round of the others."""
        last = self.engine.decoder.tabled_positions
        rows = zip(state.context.rows, state.slots.lengths, strict=True)
        full = [row for row, length in rows if last is not None and length >= last]
        for row in full:
            self.requests[row].output.fail(ValueError(AT_LAST_POSITION.format(last)))
        if full:
            rows = enumerate(state.context.rows)
            self._leave(state, [index for index, row in rows if row not in full])
        if state.rows:
            super().step(state)

    def walk(self, draft: Draft, logits: Tensor, context: Context) -> Verdict:
        """Accept the drafts of each request by its own processors and stopping criteria."""
        verdicts = []
        for index, row in enumerate(context.rows):
            request, own = self.requests[row], draft.of_row(index)
            verdict = Verdict.nothing(own)
            if request.output.error is None:
                with request.ends_by_error():
                    here = logits[index : index + 1]
                    verdict = request.session.walk(own, here, request.context)
            verdicts.append(verdict)
        return Verdict.join(verdicts)

    def _read(self, state: State, draft: Draft, verdict: Verdict, broken: Tensor) -> list[RowRound]:
        """Copy the round to the host; requests with NaN or infinite logits end with an error."""
        rounds = read_rounds(draft, verdict, broken)
        for index, row in enumerate(state.context.rows):
            with self.requests[row].ends_by_error():
                check_logits(rounds[index], self.sampler)
            if verdict.cut is not None and self.requests[row].output.error is not None:
                verdict.stop(index)
        return rounds

    def _rounds(self, row: int) -> list[Round]:
        """The rounds of a request so far."""
        return self.requests[row].output.trace.rows[0]

    def _record(self, row: int, step: Round) -> None:
        """Add a row's round to its request's trace."""
        super()._record(row, step)
        output = self.requests[row].output
        if output.timestamps is not None:
            output.timestamps += [time.perf_counter()] * len(step.tokens)

    def _leave(self, state: State, stay: Sequence[int]) -> None:
        """Remove finished rows, and append their results to `done`."""
        before = list(state.context.rows)
        super()._leave(state, stay)
        for row in before:
            if row not in state.context.rows:
                self.context.leave(row)
                output = self.requests.pop(row).output
                output.end()
                self.done.append(output)


class Batch:
    """Runs requests, at most `rows` at a time.

    Iterating yields results as requests finish; each time the model is as it was before. Putting
    the gates in again takes about as long as a round; `run` does it once.

    Args:
        open_request: opens a session for a prompt and its number.
        draft: makes a new drafter.
        prompts: token ids of each request.
        rows: the most requests that run at a time.
        generator: source of random numbers, except coupled noise.
        record_timestamps: whether results have the time of each token.

    Attributes:
        stats: counters and clocks of the whole call.
        done: results that iterating has not yielded yet.
    """

    def __init__(
        self,
        open_request: Callable[[Sequence[int], int], Session],
        draft: Callable[[], Drafter],
        prompts: Iterable[Sequence[int]],
        rows: int,
        generator: torch.Generator | None,
        record_timestamps: bool = False,
    ):
        self._open, self._draft, self._size, self._generator = open_request, draft, rows, generator
        self._record_timestamps = record_timestamps
        # Options that cannot work for any request raise an error before anything runs.
        self._probe, drafter = open_request([0], 0), draft()
        self._probe.sampler.separate()
        _check_join(drafter)
        self._decoders = self._probe.engine.decoder, *drafter.decoders
        self._foreign = any(has_foreign_code(decoder.causal_lm) for decoder in self._decoders)
        self._prompts = iter(enumerate(prompts))
        self._next: Request | None = None  # opened, but not admitted
        self._group: Group | None = None
        self.done: deque[RequestOutput] = deque()
        self.stats = self._probe.stats

    def __iter__(self) -> Iterator[RequestOutput]:
        """The results, as requests finish."""
        try:
            while self._advance():
                while self.done:
                    yield self.done.popleft()
        except KeyboardInterrupt:
            yield from self.done
            raise

    def run(self) -> None:
        """Run all requests; `done` gets their results, in the order in which they finish."""
        self._advance(to_end=True)

    @property
    def _rows(self) -> int:
        return self._group.running.rows if self._group else 0

    def _advance(self, to_end: bool = False) -> bool:
        """Run rounds until a request has finished, or all have (`to_end`); false if none has."""
        adapters = self._probe.adapters
        hooked = nullcontext() if adapters is None else adapters.hooked()
        with (
            without_gradients(self._foreign),
            locked(*self._decoders),
            hooked,
            entered(*self._decoders),
            self.stats.clock("total"),
        ):
            while to_end or not self.done:
                if not self._admit() and not self._rows:
                    self._give_back()
                    break
                self._round()
            self._pause()  # until the next result is asked for
        return bool(self.done)

    def _give_back(self) -> None:
        """Keep the KV cache of a group without rows for the next one."""
        if self._group is not None:
            self._group.engine.decoder.give_back(self._group.running.slots)
            self._group = None

    def _round(self) -> None:
        if self._group is not None and self._rows:
            self._group.step(self._group.running)

    def _pause(self) -> None:
        """End the timing of the last round."""
        if self._group is not None:
            self._group.drafter.pause()

    def _admit(self) -> bool:
        """Let the next requests join, if rows are free; false if none has joined."""
        requests = self._next_requests(self._size - self._rows)
        if not requests:
            return False
        if not self._rows:
            self._give_back()
        self._pause()
        shared = self._draft(), self._generator, self.stats, self.done
        self._group = Group(requests, *shared).begin(self._group, self._round)
        return True

    def _next_requests(self, free: int) -> Requests:
        """The next requests, as many as one pass of the prefill holds."""
        chosen: list[Request] = []
        while len(chosen) < free:
            request = self._next or self._opened()
            if request is None:
                break
            chosen.append(request)
            longest = max(len(each.output.prompt_ids) for each in chosen)
            if len(chosen) > 1 and len(chosen) * longest > PREFILL:
                self._next = chosen.pop()
                break
            self._next = None
        return {request.output.number: request for request in chosen}

    def _opened(self) -> Request | None:
        """The next request whose session can be opened; others end with an error."""
        for number, prompt in self._prompts:
            times: list[float] | None = [] if self._record_timestamps else None
            output = RequestOutput(f"req_{number}", list(prompt), timestamps=times)
            try:
                session = self._open(prompt, number)
                session.sampler.separate()
                known = signature(session.sampler.processors)
                return Request(output, session, session.prompt.context(), known)
            except Exception as error:
                output.fail(error)
            output.end()
            self.done.append(output)
        return None


def _check_join(drafter: Drafter) -> None:
    """Raise ValueError for a drafter that keeps data per row but has no `join`."""
    kind = type(drafter)
    if kind.select is not Drafter.select and kind.join is Drafter.join:
        raise ValueError(
            f"drafter {kind.name!r} keeps something for each row (`select`) and has no `join`, "
            "which generate_batch needs; add one, or choose another drafter"
        )


def _joined(prompts: Sequence[Sequence[int]], one: Session) -> Prompt:
    """The prompts, left-padded."""
    width = max(map(len, prompts))
    rows = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    tokens, mask = torch.tensor([rows, mask], device="cpu")
    return Prompt(one.engine, tokens, mask, cache=None, keep_cache=False)
