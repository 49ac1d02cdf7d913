"""Ways to write a prompt on: the model's own `generate`, its peers in transformers, selfspec."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from selfspec.bench.config import PEER_OPTIONS, MethodConfig
from selfspec.config import DraftConfig
from selfspec.model import SelfSpecModel
from selfspec.stats import Round, Stats
from selfspec.streaming import RoundStreamer

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
        """Take the prompt first, then tokens."""
        if self.prompt_seen:
            self._note(value.numel())
        self.prompt_seen = True

    def put_round(self, step: Round) -> None:
        """Take the tokens of a round of selfspec's."""
        self._note(len(step.tokens))

    def end(self) -> None:
        """Nothing follows."""

    def _note(self, count: int) -> None:
        self.counts.append(count)
        self.times.append(time.perf_counter() - self.start)


@dataclass(frozen=True)
class Written:
    """What one call wrote, and when.

    Attributes:
        tokens: the new token ids.
        counts: tokens of each arrival; the first ends the prefill.
        times: seconds from the call to each arrival.
        stats: counters and clocks, if it was selfspec's.
        accepted: kept drafts of every round behind the prefill.
    """

    tokens: list[int]
    counts: list[int]
    times: list[float]
    stats: Stats | None = None
    accepted: tuple[int, ...] = ()


Write = Callable[[Tensor, dict[str, Any], int], Written]


def make_method(spec: SelfSpecModel, config: MethodConfig) -> Write:
    """What writes: called with a prompt `[1, width]`, options of `generate` and a seed.

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

    def __call__(self, prompt: Tensor, options: dict[str, Any], seed: int) -> Written:
        generator = torch.Generator(prompt.device).manual_seed(seed)
        arrivals = Arrivals()
        output = self.spec.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            draft=self.draft,
            generator=generator,
            streamer=arrivals,
            **options,
        )
        trace = self.spec.last_trace
        assert trace is not None and isinstance(output, Tensor)
        return Written(
            tokens=output[0, prompt.shape[1] :].tolist(),
            counts=arrivals.counts,
            times=arrivals.times,
            stats=self.spec.last_stats,
            accepted=tuple(step.accepted for step in trace.rows[0][1:]),
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

    def __call__(self, prompt: Tensor, options: dict[str, Any], seed: int) -> Written:
        generate: Any = self.spec.model.generate
        with _left_as_it_was(self.spec.causal_lm), self._told(), torch.random.fork_rng():
            torch.manual_seed(seed)
            arrivals = Arrivals()
            output = generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                streamer=arrivals,
                **self.options,
                **options,
            )
        tokens = output[0, prompt.shape[1] :].tolist()
        accepted = tuple(count - 1 for count in arrivals.counts[1:])
        return Written(tokens, arrivals.counts, arrivals.times, accepted=accepted)

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
