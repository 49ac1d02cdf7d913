"""Ways to write a prompt on: the model's own `generate`, its peers in transformers, selfspec."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from selfspec.bench.batches import Batch
from selfspec.bench.config import PEER_OPTIONS, MethodConfig
from selfspec.config import DraftConfig
from selfspec.generation.streaming import RoundStreamer
from selfspec.model import SelfSpecModel
from selfspec.schedule.stats import Round, Stats

# What transformers' documentation shows; a config's `options` come before these.
_LOOKUP = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 2}


@dataclass
class Arrivals(RoundStreamer):
    """When tokens arrive: the clock of every method, so that all are timed alike.

    Attributes:
        start: when the call began.
        counts: tokens of each arrival; the first ends the prefill.
        times: seconds from the start to each arrival.
    """

    start: float = field(default_factory=time.perf_counter)
    counts: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    prompt_seen: bool = False

    def put(self, value: Tensor) -> None:
        """Take the prompts first, then tokens."""
        if self.prompt_seen:
            self._note(value.numel())
        self.prompt_seen = True

    def put_round(self, steps: Sequence[Round]) -> None:
        """Take the tokens of a round of selfspec's."""
        self._note(sum(len(step.tokens) for step in steps))

    def end(self) -> None:
        """Nothing follows."""

    def _note(self, count: int) -> None:
        self.counts.append(count)
        self.times.append(time.perf_counter() - self.start)


@dataclass(frozen=True)
class Written:
    """What one call wrote, and when.

    Attributes:
        texts: the new token ids of each row, up to its stop.
        counts: tokens of each arrival, all rows together; the first ends the prefill.
        times: seconds from the call to each arrival.
        stats: counters and clocks, if it was selfspec's.
        accepted: kept drafts of every round of every row behind the prefill.
    """

    texts: list[list[int]]
    counts: list[int]
    times: list[float]
    stats: Stats | None = None
    accepted: tuple[int, ...] = ()


Write = Callable[[Batch, dict[str, Any], int], Written]


def make_method(spec: SelfSpecModel, config: MethodConfig) -> Write:
    """What writes: called with prompts, options of `generate` and a seed.

    Raises:
        OSError: the assistant model is not there.
        ValueError: the draft is none that this model can make.
    """
    if config.peer is None:
        return _Speculation(spec, config.draft)
    options = dict(config.options)
    if config.peer == "assistant_early_exit":
        depth = spec.engine.decoder.depth
        options = {"assistant_early_exit": max(1, depth // 4), **options}
    elif config.peer == "prompt_lookup_num_tokens":
        options = {**_LOOKUP, **options}
    elif config.peer == "assistant_model":
        options["assistant_model"] = _assistant(spec, options["assistant_model"])
    return _Own(spec, options)


def stop_ids(spec: SelfSpecModel) -> list[int]:
    """Tokens that end a text."""
    stops = spec.causal_lm.generation_config.eos_token_id
    return stops if isinstance(stops, list) else [] if stops is None else [stops]


def _texts(spec: SelfSpecModel, output: Tensor, width: int) -> list[list[int]]:
    """The rows of what `generate` returns, without prompt and without padding behind a stop."""
    stops = set(stop_ids(spec))
    found: list[list[int]] = []
    for row in output[:, width:].tolist():
        end = next((place for place, token in enumerate(row, 1) if token in stops), len(row))
        found.append(row[:end])
    return found


def _assistant(spec: SelfSpecModel, path: str) -> PreTrainedModel:
    decoder = spec.engine.decoder
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=decoder.dtype)
    return model.to(decoder.device).eval()


class _Speculation:
    """Selfspec's `generate`.

    Args:
        spec: the target.
        draft: how to draft; `None` leaves it to `generate`.
    """

    def __init__(self, spec: SelfSpecModel, draft: DraftConfig | None):
        self.spec, self.draft = spec, draft

    def __call__(self, batch: Batch, options: dict[str, Any], seed: int) -> Written:
        generator = torch.Generator(batch.tokens.device).manual_seed(seed)
        arrivals = Arrivals()
        output = self.spec.generate(
            batch.tokens,
            attention_mask=batch.mask,
            draft=self.draft,
            generator=generator,
            streamer=arrivals,
            **options,
        )
        trace = self.spec.last_trace
        assert trace is not None and isinstance(output, Tensor)
        return Written(
            texts=_texts(self.spec, output, batch.width),
            counts=arrivals.counts,
            times=arrivals.times,
            stats=self.spec.last_stats,
            accepted=tuple(step.accepted for row in trace.rows for step in row[1:]),
        )


class _Own:
    """The model's own `generate`, plain or with a peer's options.

    Args:
        spec: the target.
        options: of the peer.
    """

    def __init__(self, spec: SelfSpecModel, options: dict[str, Any]):
        self.spec = spec
        assisting = PEER_OPTIONS["assistant_early_exit"][1:]
        self.drafting = {name: options.pop(name) for name in assisting if name in options}
        self.options = options
        self.assistant = options.get("assistant_model", spec.causal_lm)

    def __call__(self, batch: Batch, options: dict[str, Any], seed: int) -> Written:
        generate: Any = self.spec.model.generate
        with _left_as_it_was(self.spec.causal_lm), self._told(), torch.random.fork_rng():
            torch.manual_seed(seed)
            arrivals = Arrivals()
            output = generate(
                batch.tokens,
                attention_mask=batch.mask,
                streamer=arrivals,
                past_key_values=self.spec.engine.decoder.own_cache(),
                **self.options,
                **options,
            )
        texts, counts = _texts(self.spec, output, batch.width), arrivals.counts
        accepted = tuple(count - 1 for count in counts[1:])
        if batch.rows > 1:
            # One token a row and step; what comes behind a row's stop is padding. Speculation in
            # transformers writes one row only.
            counts = [sum(len(text) > step for text in texts) for step in range(len(counts))]
            accepted = (0,) * sum(counts[1:])
        return Written(texts, counts, arrivals.times, accepted=accepted)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Transformers reads how to draft from the assistant's own generation config."""
        config = self.assistant.generation_config
        held = {name: getattr(config, name) for name in self.drafting}
        for name, value in self.drafting.items():
            setattr(config, name, value)
        try:
            yield
        finally:
            for name, value in held.items():
                setattr(config, name, value)


@contextmanager
def _left_as_it_was(model: PreTrainedModel) -> Iterator[None]:
    """`assistant_early_exit` that fails half way leaves the model shallow."""
    depth = model.config.num_hidden_layers
    try:
        yield
    finally:
        model.config.num_hidden_layers = depth
