"""What a fitted head would bring, before it is fitted.

Rounds are timed on this device, on a random model with the target's shapes and fewer layers. How
often drafts are accepted, fits that were recorded tell: by the kind of head, and by the tokens that
it has seen.
"""

from __future__ import annotations

import itertools
import math
import operator
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.initialization import no_init_weights
from typing_extensions import Self

from selfspec.apps.bench.shapes import random_model, read_bandwidth
from selfspec.apps.export.draft_model import with_layers
from selfspec.config import DraftConfig, JsonObject, Options
from selfspec.decoder import Decoder
from selfspec.decoder.kernels.prepacked import has_kernels
from selfspec.heads import ExitHead, build_head
from selfspec.heads.teacher_forcing import target_states
from selfspec.model import SelfSpecModel

# Acceptance


class Fit(NamedTuple):
    """Tokens that a head has seen, and the mean Σ min(p, q) of its first drafts and later ones."""

    tokens: float
    first: float
    later: float


# By kind, and whether the exit is above the embeddings; docs/measured/training.md has the commands.
# Up to a million tokens they were fitted to SmolLM2-135M-Instruct, beyond to the demo target, whose
# vocabulary is small (6,144; means over novels, code and maths).
RECORDED: dict[tuple[str, bool], tuple[Fit, ...]] = {
    ("eagle3", False): (
        Fit(0.1e6, 0.28, 0.20),
        Fit(0.2e6, 0.35, 0.28),
        Fit(0.8e6, 0.49, 0.42),
        Fit(2.3e6, 0.65, 0.63),
        Fit(5.9e6, 0.69, 0.68),
    ),
    ("fused", True): (Fit(0.1e6, 0.28, 0.26), Fit(3.0e6, 0.74, 0.73)),
    ("block", True): (Fit(0.1e6, 0.28, 0.28), Fit(3.0e6, 0.71, 0.71)),
}


def acceptance(kind: str, exit_layer: int, tokens: float) -> tuple[float, float]:
    """α of the first draft and of later ones after a fit on that many tokens.

    Between two recorded fits it grows with the logarithm of the tokens; beyond the last one it
    stays, and below the first it falls to zero with the tokens.
    """
    fits = RECORDED[kind, exit_layer > 0]
    known = [math.log(fit.tokens) for fit in fits]
    at, share = math.log(max(tokens, fits[0].tokens)), min(1.0, tokens / fits[0].tokens)
    first, later = (
        share * float(np.interp(at, known, rates))
        for rates in ([fit.first for fit in fits], [fit.later for fit in fits])
    )
    return first, later


def expected_tokens(rates: Sequence[float], num_draft_tokens: int) -> float:
    """Tokens that a round of k drafts emits: 1 + Σ_{i≤k} Π_{j≤i} α_j.

    `rates` are those of drafts where the ones before are accepted; deeper drafts have the last
    rate.
    """
    deeper = itertools.chain(rates, itertools.repeat(rates[-1]))
    reached = itertools.accumulate(itertools.islice(deeper, num_draft_tokens), operator.mul)
    return 1 + sum(reached)


# Seconds


def round_seconds(
    spec: SelfSpecModel, draft: DraftConfig, prompt: Tensor, tokens: int, repeats: int = 3
) -> float:
    """Median seconds of a round."""
    seconds: list[float] = []
    for _ in range(repeats):
        write(spec, prompt, tokens, draft)
        assert spec.last_stats is not None
        seconds.append(spec.last_stats.decode_seconds / max(1, spec.last_stats.rounds))
    return statistics.median(seconds)


def write(
    spec: SelfSpecModel,
    prompt: Tensor,
    tokens: int,
    draft: DraftConfig,
    sample: bool = False,
    generator: torch.Generator | None = None,
) -> None:
    """Generate exactly `tokens` tokens, from the whole distribution when sampling."""
    # These options override the checkpoint's generation config.
    whole = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    options: Options = whole if sample else {"do_sample": False}
    spec.generate(
        prompt.to(spec.decoder.device),
        draft=draft,
        generator=generator,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        pad_token_id=0,
        **options,
    )


# Trimmed vocabularies that a head may have, and the share of the tokens of other text of the same
# kind in them, by the text of the first recorded fits.
COVERAGE = {8_000: 0.94, 16_000: 0.97, 32_000: 0.99}

_SIZES = (min(COVERAGE), max(COVERAGE))  # vocabularies of the timed heads
_BYTES = 2**30  # of the layers of the timed model
_CHAINS = (1, 3, 6)  # drafts of the timed rounds
_WIDE, _READ = 512, 64  # tokens of a timed pass of training, and of the LM head
_VERIFIED, _TRAINED = 0.03, 0.1  # plain steps a token, where nothing can be timed
_TURNS, _SECONDS = 3, 8.0  # at least: every call is timed once a turn


@dataclass(frozen=True)
class DeviceSpeed:
    """Seconds of the whole target on this device."""

    depth: int  # layers of the target
    plain: float  # seconds of a plain decoding step
    layer: dict[int, float]  # seconds of one layer, by the tokens of a pass
    # seconds of rounds of a head at the embeddings, by the size of its vocabulary and by its drafts
    rounds: dict[int, dict[int, float]]
    wide: float  # seconds of a training pass of the target, a token
    read_out: float  # seconds of the LM head in such a pass, a token and row

    def round(self, exit_layer: int, vocab_size: int, drafts: int) -> float:
        """Seconds of a round of that many drafts by a head after `exit_layer` layers.

        A draft runs the layers below the exit, and verification resumes at the exit.
        """
        by_size = {size: _along(by_chain, drafts) for size, by_chain in self.rounds.items()}
        of_head = _along(by_size, vocab_size)
        below = (drafts + 1) * _along(self.layer, 1) - _along(self.layer, drafts + 1)
        return of_head + exit_layer * below

    def fit_rate(self, vocab_size: int, depths: float = 2.0) -> float:
        """Tokens a second of a fit that unrolls `depths` drafts on average.

        The head's layer runs forwards and backwards, which costs as much as three passes, at every
        depth. So does its LM head, but for the gradient of its weights; the target's runs once.
        """
        layer = self.wide / self.depth
        return 1 / (self.wide + 3 * depths * layer + (1 + 2 * depths) * vocab_size * self.read_out)


def _along(known: dict[int, float], at: int) -> float:
    """The line through the two known points nearest to `at`; a single point holds everywhere."""
    points = sorted(known, key=lambda point: abs(point - at))[:2]
    if len(points) == 1:
        return known[points[0]]
    near, far = points
    return known[near] + (at - near) * (known[far] - known[near]) / (far - near)


def measure_device(decoder: Decoder, device: torch.device, dtype: torch.dtype) -> DeviceSpeed:
    """Time rounds on `device` of a target with the shapes of `decoder`, which needs no weights.

    Two random models have as many of its layers as fit into a gigabyte, and half of them. What
    further layers cost is the difference between the two. Raises RuntimeError with too little
    memory, ValueError if the family has no such models, or no head at its embeddings.
    """
    depth, vocab = decoder.depth, decoder.vocab_size
    layer = _size(decoder.layers[0]) * dtype.itemsize
    words = _size(decoder.causal_lm) * dtype.itemsize - depth * layer
    deep = max(2, min(depth, _BYTES // layer))
    needed = 2 * (deep * layer + words)  # packed weights are there twice
    if device.type == "cpu" and needed > psutil.virtual_memory().available / 2:
        raise RuntimeError(f"{needed / 1e9:.1f} GB are too many to time a model of that size here")
    sizes = sorted({min(size, vocab) for size in _SIZES})
    config, half = decoder.causal_lm.config, deep // 2
    timed = {n: _Timed(with_layers(config, range(n)), sizes, device, dtype) for n in (half, deep)}
    found = _shortest({(n, *key): call for n, t in timed.items() for key, call in t.calls.items()})

    # Two noisy times may differ by too little; a layer takes at least its share of the weights.
    share = layer / (deep * layer + words)

    def layer_seconds(*key: object) -> float:
        further = (found[(deep, *key)] - found[(half, *key)]) / (deep - half)
        return max(share * found[(deep, *key)], further)

    layers = {1: layer_seconds(0, 0)} | {n + 1: layer_seconds(sizes[0], n) for n in _CHAINS}
    more = depth - deep
    return DeviceSpeed(
        depth=depth,
        plain=found[deep, 0, 0] + more * layers[1],
        layer=layers,
        rounds={
            size: {n: found[deep, size, n] + more * layers[n + 1] for n in _CHAINS}
            for size in sizes
        },
        wide=found[deep, "wide"] + more * layer_seconds("wide"),
        read_out=found[deep, "read out"],
    )


def device_speed(decoder: Decoder, device: torch.device, dtype: torch.dtype) -> DeviceSpeed:
    """What `measure_device` finds; by the bytes of weights where it cannot measure."""
    try:
        return measure_device(decoder, device, dtype)
    except (RuntimeError, ValueError):
        return assumed_speed(decoder, device, dtype)


def assumed_speed(decoder: Decoder, device: torch.device, dtype: torch.dtype) -> DeviceSpeed:
    """What the bytes of weights tell of a target that cannot be timed.

    Decoding reads them once a step. A token more is verified, and a token is trained, in small
    parts of a step.
    """
    layer, every = _size(decoder.layers[0]), _size(decoder.causal_lm)
    row = decoder.config.hidden_size
    second = read_bandwidth(device) / dtype.itemsize  # weights read
    plain = every / second
    rounds = {
        size: {n: plain * (1 + _VERIFIED * n) + n * (layer + size * row) / second for n in _CHAINS}
        for size in _SIZES
    }
    layers = {n: layer / second * (1 + _VERIFIED * (n - 1)) for n in (1, max(_CHAINS) + 1)}
    trained = _TRAINED * plain
    return DeviceSpeed(decoder.depth, plain, layers, rounds, trained, trained * row / every)


class _Timed:
    """A random model, and calls that return seconds.

    The calls are rounds, by the vocabulary and the drafts of a head (0 and 0 for plain decoding);
    a pass of training (`wide`), a token; and the LM head in it (`read out`), a token and row.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        sizes: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.spec = SelfSpecModel(random_model(config, dtype, device))
        self.decoder = self.fitting = self.spec.decoder
        if not has_kernels(device, dtype):  # fits run in float32 there
            self.fitting = Decoder(random_model(config, torch.float32, device))
        self.calls: dict[tuple[object, ...], Callable[[], float]] = {
            (0, 0): partial(self._round, None, 0),
            ("wide",): self._wide,
            ("read out",): self._read_out,
        }
        for size in sizes:
            head = build_head(self.decoder, "eagle3", 0, {}).eval().requires_grad_(False)
            if size < self.decoder.vocab_size:
                head.trim(self.decoder, torch.arange(size, device=device))
            for drafts in _CHAINS:
                self.calls[size, drafts] = partial(self._round, head.to(dtype), drafts)

    def _tokens(self, count: int) -> Tensor:
        return torch.arange(count, device=self.decoder.device)[None] % self.decoder.vocab_size

    def _round(self, head: ExitHead | None, drafts: int) -> float:
        self.spec.engine.heads = [] if head is None else [head]
        draft = DraftConfig(drafter="none") if head is None else draft_of(head, drafts)
        return round_seconds(self.spec, draft, self._tokens(32), tokens=8, repeats=1)

    def _wide(self) -> float:
        tokens = self._tokens(_WIDE)
        return self._seconds(lambda: target_states(self.fitting, tokens, None, [])) / _WIDE

    def _read_out(self) -> float:
        fitting = self.fitting
        normed = torch.zeros(1, _READ, fitting.config.hidden_size, dtype=fitting.dtype)
        normed = normed.to(fitting.device)
        return self._seconds(lambda: fitting.unembed(normed)) / (_READ * fitting.vocab_size)

    @torch.no_grad()
    def _seconds(self, call: Callable[[], object]) -> float:
        began = time.perf_counter()
        call()
        if self.decoder.device.type == "cuda":
            torch.cuda.synchronize(self.decoder.device)
        return time.perf_counter() - began


def _shortest(calls: Mapping[Any, Callable[[], float]]) -> dict[Any, float]:
    """The shortest time of every call; all take turns, so that all see the same disturbances."""
    ends = time.perf_counter() + _SECONDS
    turns: list[dict[Any, float]] = []
    while len(turns) < _TURNS or time.perf_counter() < ends:
        turns.append({key: call() for key, call in calls.items()})
    return {key: min(turn[key] for turn in turns) for key in calls}


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def draft_of(head: ExitHead, num_draft_tokens: int) -> DraftConfig:
    """Chains of drafts from this head."""
    return DraftConfig(
        exit_layer=head.exit_layer, head=head.kind, num_draft_tokens=num_draft_tokens
    )


# The choice


@dataclass(frozen=True)
class Candidate:
    """A head that could be fitted, and what is expected of it on a device."""

    kind: str
    exit_layer: int  # layers below its exit
    vocab_size: int  # size of its vocabulary; 0 for all tokens
    rows: int  # rows of its LM head
    coverage: float  # share of the text's tokens that it can draft
    speed: DeviceSpeed
    tokens: float  # tokens of text that it will have seen

    def after(self, tokens: float) -> Candidate:
        """The same head after another number of tokens."""
        return replace(self, tokens=tokens)

    @property
    def rates(self) -> tuple[float, float]:
        """α of its first draft and of those after it."""
        first, later = acceptance(self.kind, self.exit_layer, self.tokens)
        return self.coverage * first, self.coverage * later

    @property
    def num_draft_tokens(self) -> int:
        """Drafts of a round with which it is fastest."""
        return max(range(1, max(_CHAINS) + 1), key=self._speedup)

    @property
    def speedup(self) -> float:
        """Over plain decoding, with as many drafts."""
        return self._speedup(self.num_draft_tokens)

    def _speedup(self, drafts: int) -> float:
        return expected_tokens(self.rates, drafts) * self.speed.plain / self._seconds(drafts)

    @property
    def cost(self) -> float:
        """Of one more draft and its verification, in plain steps."""
        return (self._seconds(3) - self._seconds(1)) / 2 / self.speed.plain

    def _seconds(self, drafts: int) -> float:
        return self.speed.round(self.exit_layer, self.rows, drafts)

    @property
    def fit_rate(self) -> float:
        """Tokens a second of its fit."""
        return self.speed.fit_rate(self.rows)

    @property
    def head(self) -> JsonObject:
        """Its entry in the config of a fit."""
        return {"kind": self.kind, "exit_layer": self.exit_layer, "vocab_size": self.vocab_size}


def _exits(decoder: Decoder) -> Iterator[tuple[str, int]]:
    """Kinds and exit layers that a target can have."""
    quarter = max(1, decoder.depth // 4)
    # With attention biases by key index, a head's layer cannot be unrolled over its own drafts.
    deeper = "block" if decoder.counts_keys else "fused"
    for kind, exit_layer in (("eagle3", 0), (deeper, quarter)):
        try:
            with no_init_weights():
                build_head(decoder, kind, exit_layer, {})
        except ValueError:
            continue
        yield kind, exit_layer


HOUR = 3600.0


class Advice(NamedTuple):
    """What to fit to a target on a device."""

    tokens: float  # tokens of text that the run sees
    now: list[Candidate]  # the candidates after that run, the fastest first

    @classmethod
    def of(
        cls, decoder: Decoder, speed: DeviceSpeed, coverage: Mapping[int, float], tokens: float
    ) -> Self:
        """Compare the heads that a target can have, which needs no weights.

        `coverage` is the share of the text's tokens by the size of a vocabulary, 0 for all tokens.
        """
        heads = [
            Candidate(kind, exit_layer, size, size or decoder.vocab_size, share, speed, tokens)
            for kind, exit_layer in _exits(decoder)
            for size, share in coverage.items()
        ]
        return cls(tokens, sorted(heads, key=lambda head: head.speedup, reverse=True))

    @property
    def then(self) -> list[Candidate]:
        """The same candidates after an hour of fitting."""
        return [head.after(head.fit_rate * HOUR) for head in self.now]

    @property
    def most(self) -> list[Candidate]:
        """The same after as much text as any recorded fit has seen."""
        return [head.after(math.inf) for head in self.now]

    @property
    def best(self) -> Candidate:
        """The candidate that is fastest after the run."""
        return self.now[0]

    def check(self) -> None:
        """Raise ValueError if no candidate is faster than plain decoding, however long it learns.

        How much text an hour brings depends on what else the machine does, so it decides nothing.
        """
        hoped = max(head.speedup for head in self.most)
        if hoped <= 1:
            raise ValueError(
                f"no head would make this model faster on this device: {hoped:.2f}x of plain "
                "decoding at best, after as much text as any recorded fit has seen; --force fits "
                "one all the same"
            )
