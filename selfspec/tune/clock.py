"""Seconds of the passes of a round on this device: interleaved medians of real calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import TemperatureLogitsWarper

from selfspec.config import DraftConfig
from selfspec.decoding import Session
from selfspec.demo.timing import in_turn
from selfspec.draft import Draft
from selfspec.drafters import make_drafter
from selfspec.engine import Engine
from selfspec.heads import ExitHead
from selfspec.profile import DraftSeconds, Times, exit_name
from selfspec.prompts import Prompt
from selfspec.sampling import Sampler
from selfspec.stopping import Stops
from selfspec.streaming import Stream
from selfspec.tune.config import TuneConfig
from selfspec.tune.texts import in_batches, padded

_MORE = 4  # drafts behind the first, over which the time of one is taken

Probes = dict[Hashable, Callable[[], object]]
Progress = Callable[[int, int], object]  # turns done, of how many


@torch.no_grad()
def measure_times(
    engine: Engine,
    heads: Sequence[ExitHead],
    prompts: Sequence[Tensor],
    rows: int,
    config: TuneConfig,
    on_turn: Progress | None = None,
) -> Times:
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
        plain = _begin(engine, DraftConfig(drafter="none"), batch, config)
        state = plain.start()
        probes: Probes = {"plain": lambda: plain.step(state)}
        exits = sorted({head.exit_layer for head in heads})
        probes |= dict(_passes(engine, batch, exits, sorted({1, *config.widths}), config))
        for head in heads:
            probes |= dict(_drafts(engine, head, batch, config))
        seconds = _medians(probes, config.turns, engine.decoder.device, on_turn)
    return _sorted(seconds, rows, exits, heads, config)


def _begin(
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
        Stops(StoppingCriteriaList()),
        GenerationConfig(),
        Stream(None, tokens.shape[1], padding=0),
    )


def _passes(
    engine: Engine,
    batch: tuple[Tensor, Tensor],
    exits: Sequence[int],
    widths: Sequence[int],
    config: TuneConfig,
) -> Iterator[tuple[Hashable, Callable[[], object]]]:
    """Shallow and verifying passes behind a prompt; none of them settles anything."""
    state = _begin(engine, DraftConfig(drafter="none"), batch, config).start()
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
                yield (
                    ("shallow", exit_layer, width),
                    lambda some=some, at=exit_layer: engine.shallow(state, some, at, 0),
                )
            yield (
                ("verify", exit_layer, width),
                lambda draft=draft: engine.verify(state, draft),
            )


def _drafts(
    engine: Engine, head: ExitHead, batch: tuple[Tensor, Tensor], config: TuneConfig
) -> Iterator[tuple[Hashable, Callable[[], object]]]:
    """One draft, and several, by the drafter itself."""
    draft = DraftConfig(
        exit_layer=head.exit_layer, head=head.kind, num_draft_tokens=1 + _MORE, schedule="fixed"
    )
    session = _begin(engine, draft, batch, config)
    state = session.start()
    session.step(state)  # from its second round on a head has drafts of its own to read again
    for count in (1, 1 + _MORE):
        yield (
            ("draft", head.kind, head.exit_layer, count),
            lambda count=count: session.drafter.propose(state, count),
        )


def _medians(
    probes: Probes, turns: int, device: torch.device, on_turn: Progress | None
) -> dict[Hashable, float]:
    for probe in probes.values():
        probe()
    seconds: dict[Hashable, list[float]] = {key: [] for key in probes}
    for turn in range(turns):
        for key in in_turn(probes, turn):
            wait_for(device)
            start = time.perf_counter()
            probes[key]()
            wait_for(device)
            seconds[key].append(time.perf_counter() - start)
        if on_turn is not None:
            on_turn(turn + 1, turns)
    return {key: median(values) for key, values in seconds.items()}


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
