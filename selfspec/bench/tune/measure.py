"""Measurements of `selfspec tune`: times of passes and acceptance rates, resumable.

Legend: n = tokens generated after a prompt; a draft of depth d is the d-th of its round, from 0.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import TemperatureLogitsWarper

from selfspec.bench.prompts import in_batches, padded
from selfspec.bench.tune.config import TuneConfig
from selfspec.config import DraftConfig
from selfspec.decoder import Decoder
from selfspec.display.demo import in_turn
from selfspec.drafters import make_drafter
from selfspec.drafters.engine import Engine
from selfspec.generation.loop import Session
from selfspec.generation.prompts import Prompt
from selfspec.generation.stopping import Stops
from selfspec.generation.streaming import Stream
from selfspec.heads import ExitHead
from selfspec.heads.teacher_forcing import draft_states, target_states
from selfspec.model import SelfSpecModel
from selfspec.sampling.draft import Draft
from selfspec.sampling.sampler import Sampler
from selfspec.schedule.profile import DraftSeconds, ExitRates, Times, exit_name


class WorkFile:
    """Parts of a measurement, one JSON object a line, added as they come.

    Args:
        path: where they are kept; `None` keeps them nowhere.
        place: what they all depend on; parts measured elsewhere are not taken.
    """

    def __init__(self, path: Path | None, place: Any):
        self.path, self._place = path, place
        self._found = dict(_read(path)) if path is not None and path.is_file() else {}

    def part(self, name: str, settings: Any, measure: Callable[[], Any]) -> Any:
        """What was measured of a part with these settings, or what `measure` finds now.

        Args:
            name: of the part.
            settings: what else it depends on.
            measure: returns plain values.
        """
        key = _digest([self._place, name, settings])
        if key not in self._found:
            self._found[key] = measure()
            self._append({"key": key, "part": name, "value": self._found[key]})
        return self._found[key]

    def _append(self, line: dict[str, Any]) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A line that was cut off gets its end first, so that this one stands alone.
        before = self.path.read_bytes() if self.path.is_file() else b""
        cut_off = bool(before) and not before.endswith(b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * cut_off + json.dumps(line) + "\n")


def _read(path: Path) -> list[tuple[str, Any]]:
    """Whole lines; one that was cut off when the machine went down is measured again."""
    found: list[tuple[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
            found.append((entry["key"], entry["value"]))
        except (json.JSONDecodeError, TypeError, KeyError):
            continue
    return found


def _digest(settings: Any) -> str:
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# How often drafts would be kept, teacher-forced over texts that the target itself has written.

_ROWS = 8  # prompts that are continued at once


class Written(NamedTuple):
    """A prompt and what the target wrote after it.

    Attributes:
        tokens: all of it.
        start: tokens of the prompt.
    """

    tokens: list[int]
    start: int


def write_on(spec: SelfSpecModel, prompts: Sequence[Tensor], config: TuneConfig) -> list[Written]:
    """What the target makes of prompts by plain decoding, greedily or sampled."""
    written: list[Written] = []
    source = torch.Generator(spec.engine.decoder.device).manual_seed(config.seed)
    for batch in in_batches(prompts, min(_ROWS, len(prompts))):
        tokens, mask = padded(batch, spec.engine.decoder.device)
        options = generate_options(config)
        spec.generate(tokens, attention_mask=mask, draft="none", generator=source, **options)
        assert spec.last_trace is not None
        for row, prompt in enumerate(batch):
            more = spec.last_trace.tokens(row)
            written.append(Written([*prompt.tolist(), *more], len(prompt)))
    return written[: len(prompts)]


def generate_options(config: TuneConfig) -> dict[str, Any]:
    """Options of transformers' `generate`: from the whole distribution where it is sampled."""
    options: dict[str, Any] = {"do_sample": False}
    if config.temperature:
        whole = {"top_k": 0, "top_p": 1.0}
        options = {"do_sample": True, "temperature": config.temperature, **whole}
    return {"max_new_tokens": config.new_tokens, "pad_token_id": 0, **options}


@torch.no_grad()
def measure_rates(
    decoder: Decoder, head: ExitHead, texts: Sequence[Written], config: TuneConfig
) -> ExitRates:
    """How often drafts of a head are kept, by depth, where those before them were.

    A round may begin at any token of a text. Its d-th draft is reached if the ones before it are
    what the target wrote, so the rates account for tokens that are hard, or easy, one after the
    other, as rates by depth alone would not.

    Args:
        decoder: the target.
        head: what drafts.
        texts: the target's own.
        config: depths and temperature.
    """
    depths = min(config.depths, max(len(text.tokens) - text.start for text in texts))
    reached: list[list[Tensor]] = [[], []]
    for text in texts:
        if len(text.tokens) - text.start >= depths:
            for found, kept in zip(
                reached, _kept(decoder, head, text, depths, config.temperature or 1.0), strict=True
            ):
                found.append(reach(kept))
    agreement, alpha = (conditional(torch.cat(found, dim=1)) for found in reached)
    return ExitRates(kind=head.kind, exit_layer=head.exit_layer, agreement=agreement, alpha=alpha)


def _kept(
    decoder: Decoder, head: ExitHead, text: Written, depths: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """`[depths, n]` each: whether the top token is the target's, and Σ min(p, q)."""
    tokens = torch.tensor([text.tokens], device=decoder.device)
    reading = target_states(decoder, tokens, None, head.input_layers)
    behind = slice(text.start - 1, len(text.tokens) - 1)  # where the written tokens are said
    target = decoder.unembed(reading.normed[:, behind])[0].float()
    target_probs = (target / temperature).softmax(-1)
    agreed: list[Tensor] = []
    overlap: list[Tensor] = []
    unrolled = 1 if decoder.counts_keys else depths
    for state in draft_states(decoder, head, reading, unrolled):
        logits = head.expand_logits(head.logits(decoder, state[:, behind]), decoder)[0].float()
        agreed.append((logits.argmax(-1) == target.argmax(-1)).double())
        probs = (logits / temperature).softmax(-1)
        overlap.append(torch.minimum(probs, target_probs).sum(-1).double())
    # A head that is not unrolled says the same at every depth.
    repeat = depths // len(agreed)
    return torch.stack(agreed * repeat), torch.stack(overlap * repeat)


def reach(kept: Tensor) -> Tensor:
    """`[depths, starts]` how likely each draft of a round stands, from each token it may begin at.

    Args:
        kept: `[depths, n]` how likely the draft of each token is kept at each depth.
    """
    depths, count = kept.shape
    starts = count - depths + 1
    along = [kept[depth, depth : depth + starts] for depth in range(depths)]
    return torch.stack(along).cumprod(0)


def conditional(reached: Tensor) -> list[float]:
    """By depth, how likely a draft is accepted if those before it are, of `[depths, starts]`."""
    means = [1.0, *reached.mean(1).tolist()]
    return [after / before if before else 0.0 for before, after in itertools.pairwise(means)]


# Seconds of the passes of a round on this device: interleaved medians of real calls.

_MORE = 4  # drafts after the first, over which the time of one is taken

Progress = Callable[[int, int], object]  # turns done, of how many


@torch.inference_mode()
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
        prompts: what the passes run after.
        rows: of every pass.
        config: widths, turns and temperature.
        on_turn: told after each turn.
    """
    batch = padded(in_batches(prompts, rows)[0], engine.decoder.device)
    with engine.decoder:
        plain = begin(engine, DraftConfig(drafter="none"), batch, config)
        state = plain.start()
        probes: dict[Hashable, Callable[[], object]] = {"plain": lambda: plain.step(state)}
        exits = sorted({head.exit_layer for head in heads})
        probes |= dict(_passes(engine, batch, exits, sorted({1, *config.widths}), config))
        for head in heads:
            probes |= dict(_drafts(engine, head, batch, config))
        found = medians(probes, config.turns, engine.decoder.device, on_turn)
    return _sorted(found, rows, exits, heads, config)


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
) -> Iterator[tuple[Hashable, Callable[[], object]]]:
    """Shallow passes and verifications after a prompt; none of them is committed."""
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
                yield ("shallow", exit_layer, width), shallow
            verify = lambda draft=draft: engine.verify(state, draft)  # noqa: E731
            yield ("verify", exit_layer, width), verify


def _drafts(
    engine: Engine, head: ExitHead, batch: tuple[Tensor, Tensor], config: TuneConfig
) -> Iterator[tuple[Hashable, Callable[[], object]]]:
    """One draft, and several, by the drafter itself."""
    draft = DraftConfig(
        exit_layer=head.exit_layer, head=head.kind, num_draft_tokens=1 + _MORE, schedule="fixed"
    )
    session = begin(engine, draft, batch, config)
    state = session.start()
    session.step(state)  # from its second round on a head has drafts of its own to read again
    for count in (1, 1 + _MORE):
        propose = lambda count=count: session.drafter.propose(state, count)  # noqa: E731
        yield ("draft", head.kind, head.exit_layer, count), propose


def medians(
    probes: Mapping[Hashable, Callable[[], object]],
    turns: int,
    device: torch.device,
    on_turn: Progress | None = None,
) -> dict[Hashable, float]:
    """Median seconds of interleaved calls, after one warm-up call of each."""
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
    return {key: median(taken) for key, taken in seconds.items()}


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
