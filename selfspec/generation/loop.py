"""The loop: draft, verify, accept, cut, commit.

`speculate` is what `model.generate(custom_generate=...)` calls, so every option of generate keeps
its meaning: processors, stopping criteria, streamers and returned dictionaries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from selfspec.config import Options
from selfspec.decoder import (
    CACHE,
    Pass,
    entered,
    has_foreign_code,
    locked,
    without_gradients,
)
from selfspec.decoder.cache import WIDEST
from selfspec.drafters import Drafter
from selfspec.drafters.engine import Engine, State
from selfspec.drafters.text_store import BEGINNING
from selfspec.generation.adapters import RowAdapters
from selfspec.generation.prompts import Prompt
from selfspec.generation.rounds import RowRound, StepRecord, broken_positions, read_rounds
from selfspec.generation.stopping import Stops
from selfspec.generation.streaming import Stream
from selfspec.generation.unsupported import refuse_unsupported_inputs, split_media
from selfspec.sampling import COUPLED, LOSSLESS_RULES, accept, walk
from selfspec.sampling.context import Context
from selfspec.sampling.coupled_noise import Noise
from selfspec.sampling.draft import Draft, Verdict
from selfspec.sampling.sampler import Sampler
from selfspec.schedule.stats import Round, Stats, Trace

_FIRST_ROOM = 1024  # tokens reserved ahead; buffers double when a call writes more
AT_LAST_POSITION = "the text has reached the last of the model's {} positions; lower max_new_tokens"


@dataclass
class SpecOutput(GenerateDecoderOnlyOutput):
    """What `generate(return_dict_in_generate=True)` returns: transformers' fields and ours.

    Attributes:
        stats: counters and clocks of the call.
        trace: every round of every row.
    """

    stats: Stats | None = None
    trace: Trace | None = None


class Session:
    """One call of `generate`.

    Args:
        engine: the target and its passes.
        drafter: the strategy.
        prompt: the caller's rows.
        sampler: turns scores into tokens.
        stops: the stopping criteria.
        config: the call's generation config.
        stream: feeds the caller's streamer, if there is one.
        adapters: the adapters of rows that do not all use the active one.
    """

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter,
        prompt: Prompt,
        sampler: Sampler,
        stops: Stops,
        config: GenerationConfig,
        stream: Stream | None = None,
        adapters: RowAdapters | None = None,
    ):
        self.adapters = adapters
        self.engine, self.drafter, self.prompt = engine, drafter, prompt
        self.sampler, self.stops, self.stream, self.config = sampler, stops, stream, config
        self.chunk = config.prefill_chunk_size
        wanted = bool(config.return_dict_in_generate)
        empty: list[list[Any]] = [[] for _ in range(prompt.rows)]
        self.scores = StepRecord(wanted and bool(config.output_scores), [*map(list, empty)])
        self.logits = StepRecord(wanted and bool(config.output_logits), [*map(list, empty)])
        self.trace = Trace([*map(list, empty)])
        exact = not sampler.do_sample or sampler.walks or sampler.rule in LOSSLESS_RULES
        self.stats = Stats(lossless=exact)

    def run(self) -> State:
        """Generate until every row has stopped."""
        hooked = nullcontext() if self.adapters is None else self.adapters.hooked()
        decoders = self.engine.decoder, *self.drafter.decoders
        foreign = any(has_foreign_code(decoder.causal_lm) for decoder in decoders)
        # PEFT's hooks are put into the model: other threads wait, and kernels look for hooks.
        with (
            without_gradients(foreign and not self.prompt.is_inference),
            locked(*decoders),
            hooked,
            entered(*decoders),
            self.stats.clock("total"),
        ):
            state = self.start()
            while state.rows:
                self.step(state)
        if self.stream is not None:
            self.stream.end()
        return state

    def start(self) -> State:
        """Prefill the prompts and generate each row's first token."""
        with self.stats.clock("prefill"):
            state = self.state()
            self._run_next(state)
            untimed = replace(state, stats=Stats())  # clocks of parts count the rounds only
            tokens, counts = self.prompt.prefill()
            logits = self.engine.prefill(
                untimed,
                tokens,
                counts,
                self.chunk,
                keep=self.drafter.keep,
                on_block=lambda block, offset: self.prefilled(untimed, block, offset, counts),
                prompt=self.prompt.own_inputs(),
            )
            # Every new token commits one slot; here it is that of the prompt's last token.
            state.slots.commit([count - 1 for count in counts])
            nothing = Draft.empty(state.rows, tokens.device)
            verdict, broken = self._accept(state, nothing, logits)
            with self.stats.prefilling():
                self._commit(state, verdict, self._read(state, nothing, verdict, broken))
        return state

    def state(self) -> State:
        """The state before the prefill, with space for new tokens."""
        context = self.prompt.context(padding_id(self.config))
        room = room_of(self.stops, context)
        context.reserve(self.prompt.width + room)
        slots = self.prompt.slots(room, self.prompt.switches())
        pending, keep = self.prompt.tokens[:, -1:], self.drafter.keep
        return State(slots, context, pending, self.sampler, self.stats, keep)

    def prefilled(self, state: State, block: Pass, offset: int, counts: Sequence[int]) -> None:
        """Called after each pass of the prefill."""
        self.drafter.prefilled(state, block, offset, counts)

    def _run_next(self, state: State) -> None:
        """Tell the adapters of rows which rows the next passes run."""
        if self.adapters is not None:
            self.adapters.run_next(state)

    def step(self, state: State) -> None:
        """One round."""
        self._run_next(state)
        _check_positions(state, self.engine.decoder.tabled_positions)
        self._prefill_again(state)
        limit = _most_drafts(state, self.stops, self.prompt, self.engine.decoder.max_positions)
        draft = nothing = Draft.empty(state.rows, state.pending.device)
        forced = _forced(state, limit) if self.drafter.drafts else None
        if forced is not None:
            self.drafter.pause()
            draft = forced
        elif limit > 0:
            draft = self.drafter.draft(state, limit, self.engine.decoder)
        try:
            verified = self.engine.verify(state, draft)
        except IndexError as error:
            problem = self.drafter.unknown_tokens(draft, self.engine.decoder.vocab_size)
            raise error if problem is None else ValueError(problem) from error
        with self.stats.clock("sampling"):
            verdict, broken = self._accept(state, draft, verified.logits)
        rounds = self._read(state, draft, verdict, broken)  # the one synchronisation of a round
        if verdict.branch is not None and any(step.moved for step in rounds):
            state.slots.gather(torch.nn.functional.pad(verdict.branch, (1, 0)))
        own = draft if forced is None else nothing
        self.drafter.commit(state, own, verified, verdict)
        self._commit(state, verdict, rounds)

    def _accept(self, state: State, draft: Draft, logits: Tensor) -> tuple[Verdict, Tensor]:
        """Apply the acceptance rule to the target's logits.

        Returns:
            The verdict, and `[rows, m + 1]` whether the logits at a position are broken.
        """
        if state.sampler.walks:
            verdict = self.walk(draft, logits, state.context)
            self.logits.begin(logits, verdict.branch)
            return verdict, broken_positions(logits, verdict.branch, self.sampler.do_sample)
        if draft.tree is None:
            if state.sampler.reads_prefix:
                state.context.write(draft.tokens)
            scores = state.sampler.scores(logits, state.context)
        else:
            scores = state.sampler.tree_scores(logits, state.context, draft.tokens, draft.tree)
        judged = state.sampler.choosable(scores, state.context, draft.tree)
        verdict = accept(draft, judged, state.sampler)
        self.logits.begin(logits, verdict.branch)
        self.scores.begin(scores, verdict.branch)
        return verdict, broken_positions(logits, verdict.branch, self.sampler.do_sample)

    def walk(self, draft: Draft, logits: Tensor, context: Context) -> Verdict:
        """Accept position by position, for processors that may have a state."""

        def ended(tokens: Sequence[int], text: Tensor, scores: Tensor) -> list[bool]:
            self.scores.append(context.rows, scores)
            return self.stops.after_step(context, tokens, text, self.scores)

        return walk(draft, logits, self.sampler, context, ended)

    def _read(self, state: State, draft: Draft, verdict: Verdict, broken: Tensor) -> list[RowRound]:
        """Copy the round to the host."""
        rounds = read_rounds(draft, verdict, broken)
        for step in rounds:
            check_logits(step, self.sampler)
        return rounds

    def _prefill_again(self, state: State) -> None:
        """Compute the cache anew for rows whose next token is beyond the original length.

        Only for families whose own `generate` does (`Decoder.prefills_again`).
        """
        if self.prompt.prefills_again and state.slots.reach_switches():
            self.prompt.restart()
            with self.stats.clock("prefill"):
                self.engine.prefill_again(state, self.chunk)

    def _commit(self, state: State, verdict: Verdict, rounds: list[RowRound]) -> None:
        """Cut the new tokens at their stops, then commit the rest."""
        context, rows = state.context, list(state.context.rows)
        blocks = [step.block for step in rounds]
        # The tensor of all tokens is written only if somebody reads it; tokens are on the host.
        written = state.sampler.reads_prefix or bool(self.stops.others)
        if written:
            context.write(verdict.tokens)
        kept, ended = verdict.cut or self.stops.cut(context, blocks, self.scores)
        steps = [step.cut(count) for step, count in zip(rounds, kept, strict=True)]
        for row, step in zip(rows, steps, strict=True):
            context.commit(row, step.tokens, written)
            self.stats.count(step)
            self._record(row, step)
        self.scores.keep(rows, kept)
        self.logits.keep(rows, kept)
        state.slots.commit(kept)
        state.commit(verdict)
        if self.stream is not None:
            self.stream.put(context, [rows[i] for i, stop in enumerate(ended) if stop], steps)
        if any(ended):
            self._leave(state, [index for index, stop in enumerate(ended) if not stop])

    def _rounds(self, row: int) -> list[Round]:
        """The rounds of a row so far."""
        return self.trace.rows[row]

    def _record(self, row: int, step: Round) -> None:
        """Add a row's round to the trace."""
        self._rounds(row).append(step)

    def _leave(self, state: State, stay: Sequence[int]) -> None:
        """Remove finished rows from the batch; their KV is kept if the caller gets the cache."""
        rows, last = state.context.rows, [index for index in stay if index >= len(stay)]
        leaving = {row: index for index, row in enumerate(rows) if index not in stay}
        self.prompt.retire(state.slots, leaving)
        store = self.engine.store
        if store is not None:
            for row in leaving:
                new = sum(len(step.tokens) for step in self._rounds(row))
                # With the last tokens of its prompt.
                store.add(state.context.text[row][-(new + BEGINNING) :])
        # The last rows take the indices of finished rows, so that few are copied.
        going = [index if index in stay else last.pop() for index in range(len(stay))]
        state.select(going)
        if going:
            self.drafter.select(going)


def _check_positions(state: State, tabled: int | None) -> None:
    if tabled is not None and max(state.slots.lengths) >= tabled:
        raise ValueError(AT_LAST_POSITION.format(tabled))


def _most_drafts(state: State, stops: Stops, prompt: Prompt, positions: int | None) -> int:
    """The most drafts that can be used: the last allowed token is the target's own."""
    limit, lengths = stops.remaining(state.context) - 1, state.slots.lengths
    if positions is not None:
        limit = min(limit, positions - 1 - max(lengths))
    if prompt.prefills_again and state.slots.switches is not None:
        # Drafts beyond the switch need keys and values that are computed anew there.
        rows = zip(lengths, state.slots.switches, strict=True)
        limit = min(limit, *(at - 1 - have for have, at in rows if have < at), limit)
    return limit


def _forced(state: State, limit: int) -> Draft | None:
    """What processors with a state force in half of the rows or more.

    Rows without such tokens take a plain step. At most half of the block is padding: a longer one
    costs all rows more than it brings a few.
    """
    if limit < 1 or not state.sampler.walks:
        return None
    forced = state.sampler.forced(state.context, min(limit, WIDEST - 1))
    length = sorted(map(len, forced))[state.rows // 2]
    forced = [tokens[:length] for tokens in forced]
    return Draft.of(forced, state.pending.device) if length else None


def check_logits(step: RowRound, sampler: Sampler) -> None:
    """Raise ValueError if a row's logits are NaN or infinite, and no processor replaces them."""
    if step.broken and not sampler.removes_invalid:
        raise ValueError(
            "the model's logits are NaN or infinite; check its weights and dtype (float16 "
            "overflows where bfloat16 and float32 do not)"
        )


def room_of(stops: Stops, context: Context) -> int:
    """Number of slots to reserve for new tokens."""
    return min(stops.remaining(context) + 1, _FIRST_ROOM)


def open_session(
    causal_lm: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    call: Call,
    **model_kwargs: Any,
) -> Session:
    """Open a session from what `generate(custom_generate=...)` has prepared.

    Args:
        causal_lm: the model whose `generate` calls.
        input_ids: `[batch, width]`, left-padded where rows differ.
        logits_processor: the caller's processors.
        stopping_criteria: the caller's criteria.
        generation_config: the call's options.
        call: the arguments that selfspec's `generate` adds.
        **model_kwargs: attention mask and cache, as `generate` prepared them.

    Raises:
        ValueError: an unsupported option or an invalid prompt.
    """
    media, others = split_media(causal_lm, model_kwargs, generation_config)
    refuse_unsupported_inputs(causal_lm, others)
    mask = model_kwargs.get("attention_mask")
    if mask is None and call.mask is not None:
        # `generate` drops a mask of ones; its width tells how many tokens the cache holds.
        mask = input_ids.new_ones(input_ids.shape[0], call.mask.shape[1])
    returned = bool(generation_config.return_dict_in_generate)
    returned = returned and generation_config.use_cache is not False
    positions = model_kwargs.get("position_ids")
    chunk = generation_config.prefill_chunk_size
    prompt = Prompt(call.engine, input_ids, mask, call.cache, returned, chunk, positions, media)
    if call.adapters is not None:
        for row, text in enumerate(prompt.context().text.values(), call.row):
            call.adapters.read(row, text)
    call.engine.ranks.check_alike(input_ids)
    stops = Stops(stopping_criteria, call.engine.ranks)
    sampler = call.sampler(logits_processor, bool(generation_config.do_sample), prompt, stops)
    stream, streamer = None, call.streamer
    if streamer is not None:
        stream = Stream(streamer, prompt.width, padding_id(generation_config))
    options = generation_config, stream, call.adapters
    return Session(call.engine, call.drafter, prompt, sampler, stops, *options)


def speculate(*prepared: Any, call: Call, **options: Any) -> Tensor | SpecOutput:
    """Generate: the callable of `generate(custom_generate=...)`; see `open_session`."""
    if call.adapters is not None:
        call.adapters.check_rows(prepared[1].shape[0])
    session = open_session(*prepared, call=call, **options)
    if call.opened is not None:
        call.opened(session)
    state = session.run()
    sequences = state.context.padded()
    final_cache = session.prompt.final_cache(state.slots)
    if not session.config.return_dict_in_generate:
        return sequences
    cache: Options = {CACHE: final_cache}
    return SpecOutput(
        sequences=sequences,  # pyright: ignore[reportArgumentType]
        scores=session.scores.steps(),  # pyright: ignore[reportArgumentType]
        logits=session.logits.steps(),  # pyright: ignore[reportArgumentType]
        stats=session.stats,
        trace=session.trace,
        **cache,
    )


@dataclass(frozen=True)
class Call:
    """The arguments that `SelfSpecModel.generate` adds to those of transformers.

    Attributes:
        engine: the target and its passes.
        drafter: the strategy.
        rule: how sampled drafts are verified.
        cache: the caller's cache, if any.
        mask: the caller's attention mask, if any.
        streamer: the caller's streamer, if any.
        generator: source of random numbers.
        adapters: the adapters of rows that do not all use the active one.
        row: the first row's index in `adapters`.
        opened: called with the session before it runs.
    """

    engine: Engine
    drafter: Drafter
    rule: str = "block"
    cache: Cache | None = None
    mask: Tensor | None = None
    streamer: BaseStreamer | None = None
    generator: torch.Generator | None = None
    adapters: RowAdapters | None = None
    row: int = 0
    opened: Callable[[Session], None] | None = None

    def sampler(
        self, processors: LogitsProcessorList, do_sample: bool, prompt: Prompt, stops: Stops
    ) -> Sampler:
        """The sampler of the call; with the rule "coupled" it draws the seeds of its noise."""
        noise, device = None, prompt.tokens.device
        if do_sample:
            self.engine.ranks.draw_alike(self.generator, device)
            if self.rule == COUPLED:
                noise = Noise([prompt.width] * prompt.rows, device, self.generator)
        eos = frozenset(stops.eos)
        return Sampler(processors, do_sample, self.generator, noise, self.rule, eos=eos)


def padding_id(config: GenerationConfig) -> int:
    """The padding token after rows that have stopped."""
    padding = getattr(config, "_pad_token_tensor", None)
    return int(padding) if padding is not None else 0
