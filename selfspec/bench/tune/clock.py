"""Seconds of the passes of a round on this device: interleaved medians of real calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import TemperatureLogitsWarper

from selfspec.bench.tune.config import TuneConfig
from selfspec.bench.tune.texts import in_batches, padded
from selfspec.config import DraftConfig
from selfspec.display.demo.timing import in_turn
from selfspec.drafters import make_drafter
from selfspec.drafters.engine import Engine
from selfspec.generation.loop import Session
from selfspec.generation.prompts import Prompt
from selfspec.generation.stopping import Stops
from selfspec.generation.streaming import Stream
from selfspec.heads import ExitHead
from selfspec.sampling.draft import Draft
from selfspec.sampling.sampler import Sampler
from selfspec.schedule.profile import DraftSeconds, Times, exit_name
from selfspec.schedule.stats import Stats

_MORE = 4  # drafts behind the first, over which the time of one is taken

Progress = Callable[[int, int], object]  # turns done, of how many


class Probe(NamedTuple):
    """Something to time.

    Attributes:
        call: what is timed.
        stats: of the call of `generate` that it belongs to.
    """

    call: Callable[[], object]
    stats: Stats


class Seconds(NamedTuple):
    """What a probe takes.

    Attributes:
        wall: from its beginning to its end.
        inside: the part of it in layers and heads; on a GPU what their launches take.
    """

    wall: float
    inside: float


class Measured(NamedTuple):
    """Times of passes, and what of them is spent inside layers and heads."""

    wall: Times
    inside: Times


@torch.inference_mode()
def measure_times(
    engine: Engine,
    heads: Sequence[ExitHead],
    prompts: Sequence[Tensor],
    rows: int,
    config: TuneConfig,
    on_turn: Progress | None = None,
) -> Measured:
    """Time plain rounds, the passes below and above each exit, and the drafts of each head.

    Args:
        engine: the target and its passes.
        heads: exit heads that would draft.
        prompts: what the passes stand behind.
        rows: of every pass.
        config: widths, turns and temperature.
        on_turn: told after each turn.
    """
    batch = padded(in_batches(prompts, rows)[0], engine.decoder.device)
    with engine.decoder:
        plain = begin(engine, DraftConfig(drafter="none"), batch, config)
        state = plain.start()
        probes = {"plain": Probe(lambda: plain.step(state), state.stats)}
        exits = sorted({head.exit_layer for head in heads})
        probes |= dict(_passes(engine, batch, exits, sorted({1, *config.widths}), config))
        for head in heads:
            probes |= dict(_drafts(engine, head, batch, config))
        found = medians(probes, config.turns, engine.decoder.device, on_turn)
    wall, inside = ({key: s[part] for key, s in found.items()} for part in (0, 1))
    return Measured(
        _sorted(wall, rows, exits, heads, config), _sorted(inside, rows, exits, heads, config)
    )


def begin(
    engine: Engine, draft: DraftConfig, batch: tuple[Tensor, Tensor], config: TuneConfig
) -> Session:
    """A call as `generate` would make it."""
    tokens, mask = batch
    processors = LogitsProcessorList()
    if config.temperature not in (0, 1):
        processors.append(TemperatureLogitsWarper(config.temperature))
    source = torch.Generator(tokens.device).manual_seed(config.seed)
    return Session(
        engine,
        make_drafter(engine, draft),
        Prompt(engine, tokens, mask, cache=None, keep_cache=False),
        Sampler(processors, config.temperature > 0, source),
        Stops(StoppingCriteriaList(), engine.ranks),
        GenerationConfig(),
        Stream(None, tokens.shape[1], padding=0),
    )


def _passes(
    engine: Engine,
    batch: tuple[Tensor, Tensor],
    exits: Sequence[int],
    widths: Sequence[int],
    config: TuneConfig,
) -> Iterator[tuple[Hashable, Probe]]:
    """Shallow and verifying passes behind a prompt; none of them settles anything."""
    state = begin(engine, DraftConfig(drafter="none"), batch, config).start()
    source = torch.Generator().manual_seed(config.seed)
    shape, vocab = (state.rows, widths[-1]), engine.decoder.vocab_size
    tokens = torch.randint(vocab, shape, generator=source).to(state.pending.device)
    for exit_layer in sorted({0, *exits}):
        hidden = None
        if exit_layer in exits:
            hidden = engine.shallow(state, tokens, exit_layer, 0).hidden
        for width in widths:
            some = tokens[:, :width]
            known = hidden[:, :width] if hidden is not None and exit_layer else None
            draft = Draft(some[:, 1:], depth=exit_layer, hidden=known)
            if exit_layer in exits:
                shallow = lambda some=some, at=exit_layer: engine.shallow(state, some, at, 0)  # noqa: E731
                yield ("shallow", exit_layer, width), Probe(shallow, state.stats)
            verify = lambda draft=draft: engine.verify(state, draft)  # noqa: E731
            yield ("verify", exit_layer, width), Probe(verify, state.stats)


def _drafts(
    engine: Engine, head: ExitHead, batch: tuple[Tensor, Tensor], config: TuneConfig
) -> Iterator[tuple[Hashable, Probe]]:
    """One draft, and several, by the drafter itself."""
    draft = DraftConfig(
        exit_layer=head.exit_layer, head=head.kind, num_draft_tokens=1 + _MORE, schedule="fixed"
    )
    session = begin(engine, draft, batch, config)
    state = session.start()
    session.step(state)  # from its second round on a head has drafts of its own to read again
    for count in (1, 1 + _MORE):
        propose = lambda count=count: session.drafter.propose(state, count)  # noqa: E731
        yield ("draft", head.kind, head.exit_layer, count), Probe(propose, state.stats)


def medians(
    probes: Mapping[Hashable, Probe],
    turns: int,
    device: torch.device,
    on_turn: Progress | None = None,
) -> dict[Hashable, Seconds]:
    """Time probes in turn, after one call of each that does not count."""
    for probe in probes.values():
        probe.call()
    seconds: dict[Hashable, list[Seconds]] = {key: [] for key in probes}
    for turn in range(turns):
        for key in in_turn(probes, turn):
            seconds[key].append(_timed(probes[key], device))
        if on_turn is not None:
            on_turn(turn + 1, turns)
    return {
        key: Seconds(*(median(values) for values in zip(*taken, strict=True)))
        for key, taken in seconds.items()
    }


def _timed(probe: Probe, device: torch.device) -> Seconds:
    wait_for(device)
    before, start = _inside(probe.stats), time.perf_counter()
    probe.call()
    wait_for(device)
    return Seconds(time.perf_counter() - start, _inside(probe.stats) - before)


def _inside(stats: Stats) -> float:
    return sum(stats.seconds[part] for part in ("shallow", "deep", "head"))


def wait_for(device: torch.device) -> None:
    """Wait until a device has done all it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _sorted(
    seconds: Mapping[Hashable, float],
    rows: int,
    exits: Sequence[int],
    heads: Sequence[ExitHead],
    config: TuneConfig,
) -> Times:
    widths = sorted({1, *config.widths})

    def table(part: str, at: Sequence[int]) -> dict[int, dict[int, float]]:
        return {e: {width: seconds[part, e, width] for width in widths} for e in at}

    drafts: dict[str, DraftSeconds] = {}
    for head in heads:
        kind, at = head.kind, head.exit_layer
        first, many = (seconds["draft", kind, at, count] for count in (1, 1 + _MORE))
        more = max(0.0, many - first) / _MORE
        drafts[exit_name(kind, at)] = DraftSeconds(first=first, more=more)
    return Times(
        batch=rows,
        plain=seconds["plain"],
        shallow=table("shallow", exits),
        verify=table("verify", sorted({0, *exits})),
        drafts=drafts,
    )
