"""Runs a benchmark: all methods on all prompts, interleaved, each call stored when it ends."""

from __future__ import annotations

import copy
import ctypes
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, PreTrainedModel, PreTrainedTokenizerBase

from selfspec.apps.bench.config import PEER_OPTIONS, BenchConfig, MethodConfig, ModeConfig
from selfspec.apps.bench.planted import GreedyTexts, generate_planted
from selfspec.apps.bench.prompts import Batch, make_batches, read_prompts
from selfspec.apps.chat_templates import stop_ids
from selfspec.config import JsonObject, Options
from selfspec.decoder import CACHE
from selfspec.decoder.checkpoints import find_checkpoint, load_causal_lm
from selfspec.generation.streaming import RoundStreamer
from selfspec.heads.files import append_line, read_lines, read_object, refuse_changes, replace_text
from selfspec.model import SelfSpecModel
from selfspec.schedule.stats import Round

_PROCESS = Path("/proc/self")
_IDENTITY = "bench.json"  # in a folder of runs


class Memory(NamedTuple):
    """Bytes that a process has resident, or a GPU allocated, at most in a call; and its growth."""

    peak: int
    growth: int


def peak_memory(call: Callable[[], object], device: torch.device) -> Memory | None:
    """Run `call` and measure its memory; `None` if the system does not report it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        peak = torch.cuda.max_memory_allocated(device)
        return Memory(peak, peak - before)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # returns free memory to the system
    before = None
    with suppress(OSError):
        (_PROCESS / "clear_refs").write_text("5")  # proc(5): resets VmHWM
        before = _status("VmRSS")
    call()
    peak = before and _status("VmHWM")
    return Memory(peak, max(0, peak - before)) if before and peak else None


def _status(name: str) -> int | None:
    found = re.search(rf"^{name}:\s+(\d+) kB$", (_PROCESS / "status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


# Settings of transformers' documentation; a config's `options` override them.
_LOOKUP = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 2}


@dataclass
class Arrivals(RoundStreamer):
    """A streamer that records when how many tokens arrive, so that all methods are timed alike."""

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
        self.times.append(round(time.perf_counter() - self.start, 6))


@dataclass(frozen=True)
class Written:
    """The output of one call."""

    texts: list[list[int]]  # the new token ids of each row, up to its stop
    # tokens of each arrival, all rows together; the first arrival ends the prefill
    counts: list[int]
    times: list[float]  # seconds from the call to each arrival
    accepted: list[int]  # accepted drafts of every round of every row after the prefill
    stats: JsonObject | None = None  # fields of selfspec's `Stats`; `None` for a peer

    @property
    def decoded(self) -> int:
        """Tokens after the first arrival."""
        return sum(self.counts[1:])

    @property
    def prefill_seconds(self) -> float:
        """Time to the first arrival."""
        return self.times[0]

    @property
    def decode_seconds(self) -> float:
        """Time from the first arrival to the last."""
        return self.times[-1] - self.times[0]

    @property
    def rate(self) -> float | None:
        """Decoded tokens per second, all rows together; `None` if every row stopped immediately."""
        return self.decoded / self.decode_seconds if self.decoded else None

    @property
    def whole_rate(self) -> float:
        """Tokens per second of the whole call, all rows together."""
        return sum(self.counts) / self.times[-1]


Write = Callable[[Batch, Options, int], Written]
Show = Callable[[str, int, int], object]
"""Told what is done next, how much is done, and of how much."""


def make_method(
    spec: SelfSpecModel, config: MethodConfig, texts: GreedyTexts | None = None, room: int = 0
) -> Write:
    """A function that generates, given prompts, options of `generate` and a seed.

    `texts` are for planted drafts; `room` is the most new tokens of any call, for a static cache.
    Raises OSError without the assistant model, ValueError if the model cannot make such drafts.
    """
    if config.peer is None:
        return partial(_speculate, spec, config, texts)
    if config.peer == "continuous_batching":
        return partial(_generate_batch, spec)
    if config.peer == "static_cache":
        return partial(_generate_static, spec, room)
    options = dict(config.options)
    if config.peer == "assistant_early_exit":
        options = {"assistant_early_exit": max(1, spec.decoder.depth // 4), **options}
    elif config.peer == "prompt_lookup_num_tokens":
        options = {**_LOOKUP, **options}
    elif config.peer == "use_mtp":
        if getattr(spec.decoder.config, "num_mtp_layers", None) is None:
            raise ValueError(
                "transformers drafts with multi-token prediction where the config names "
                f"num_mtp_layers; that of {type(spec.causal_lm).__name__} does not"
            )
        options["use_mtp"] = True
    elif config.peer == "assistant_model":
        path = find_checkpoint(options["assistant_model"])
        model: Any = load_causal_lm(path, dtype=spec.decoder.dtype)
        options["assistant_model"] = model.to(spec.decoder.device)
    return partial(_generate, spec, options)


def _texts(spec: SelfSpecModel, output: Tensor, width: int) -> list[list[int]]:
    """The new tokens of each row, up to its stop."""
    stops = set(stop_ids(spec))
    found: list[list[int]] = []
    for row in output[:, width:].tolist():
        end = next((place for place, token in enumerate(row, 1) if token in stops), len(row))
        found.append(row[:end])
    return found


def _speculate(
    spec: SelfSpecModel,
    config: MethodConfig,
    texts: GreedyTexts | None,
    batch: Batch,
    options: Options,
    seed: int,
) -> Written:
    """Selfspec's `generate`, with planted drafts if the method has an acceptance rate."""
    if config.acceptance is None:
        arrivals = Arrivals()
        output = spec.generate(
            batch.tokens,
            attention_mask=batch.mask,
            draft=config.draft,
            generator=torch.Generator(batch.tokens.device).manual_seed(seed),
            streamer=arrivals,
            **options,
        )
        stats, trace = spec.last_stats, spec.last_trace
    else:
        assert texts is not None and config.draft is not None
        text = texts(batch, options)  # not timed
        arrivals = Arrivals()
        output, session = generate_planted(
            spec, config.draft, batch, text, config.acceptance, seed, streamer=arrivals, **options
        )
        stats, trace = session.stats, session.trace
    assert isinstance(output, Tensor) and stats is not None and trace is not None
    accepted = [step.accepted for row in trace.rows for step in row[1:]]
    found = _texts(spec, output, batch.width)
    return Written(found, arrivals.counts, arrivals.times, accepted, asdict(stats))


def _generate(
    spec: SelfSpecModel, own: Options, batch: Batch, options: Options, seed: int
) -> Written:
    """The model's own `generate`, plain or with the options `own` of a peer."""
    generate: Any = spec.model.generate
    options = {name: options[name] for name in options if name != "prefill_chunk_size"}
    with _left_as_it_was(spec.causal_lm, own) as left, torch.random.fork_rng():
        torch.manual_seed(seed)
        arrivals = Arrivals()
        output = generate(
            batch.tokens,
            attention_mask=batch.mask,
            streamer=arrivals,
            **{CACHE: spec.decoder.own_cache(), **left, **options},
        )
    texts, counts = _texts(spec, output, batch.width), arrivals.counts
    accepted = [count - 1 for count in counts[1:]]
    if batch.rows > 1:
        # One token per row and step; after a row's stop there is padding. Speculation in
        # transformers generates one row only.
        counts = [sum(len(text) > step for text in texts) for step in range(len(counts))]
        accepted = [0] * sum(counts[1:])
    return Written(texts, counts, arrivals.times, accepted)


def _generate_static(
    spec: SelfSpecModel, room: int, batch: Batch, options: Options, seed: int
) -> Written:
    # On a GPU, transformers compiles the model for a static cache, and again for another length.
    longest = batch.width + max(room, options["max_new_tokens"])
    cache = {"cache_implementation": "static", "max_cache_len": longest}
    return _generate(spec, cache, batch, options, seed)


_PAGE = 256  # tokens of a block of KV in transformers' continuous batching


def _generate_batch(spec: SelfSpecModel, batch: Batch, options: Options, seed: int) -> Written:
    """The model's own `generate_batch`, with just enough blocks of KV for the batch."""
    if spec.decoder.kv_cache_dtype != "auto":
        raise ValueError("generate_batch has a KV cache of its own, which does not round")
    model: Any = spec.causal_lm
    config = copy.deepcopy(model.generation_config)
    config.update(**{k: v for k, v in options.items() if k != "prefill_chunk_size"})
    config.eos_token_id = -1 if config.eos_token_id is None else config.eos_token_id
    prompts = [row[real.bool()].tolist() for row, real in zip(*batch, strict=True)]
    pages = (batch.width + options["max_new_tokens"]) // _PAGE + 2
    most = max(sum(map(len, prompts)), _PAGE)
    sizes = ContinuousBatchingConfig(num_blocks=batch.rows * pages, max_batch_tokens=most)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        began = time.perf_counter()
        found = model.generate_batch(
            prompts, config, sizes, record_timestamps=True, warmup=batch.tokens.is_cuda
        )
    results = list(found.values())
    error = next((result.error for result in results if result.error), None)
    if error or len(results) < batch.rows:
        raise RuntimeError(error or "generate_batch ended before its requests")
    texts = [list(result.generated_tokens) for result in results]
    steps = range(max(map(len, texts)))
    counts = [sum(len(text) > step for text in texts) for step in steps]
    times = [
        max(result.timestamps[step] for result in results if len(result.timestamps) > step) - began
        for step in steps
    ]
    return Written(texts, counts, times, [0] * sum(counts[1:]))


@contextmanager
def _left_as_it_was(model: PreTrainedModel, own: Options) -> Iterator[Options]:
    """Yields the options that a call of `generate` takes itself, and undoes what it changes.

    The others are read from the generation config of the assistant, and set there. Transformers
    leaves a model shallow if `assistant_early_exit` fails; and it remembers the longest static
    cache and makes all later ones as long.
    """
    text = model.config.get_text_config(decoder=True)
    depth, config = text.num_hidden_layers, own.get("assistant_model", model).generation_config
    told = {name: own[name] for name in PEER_OPTIONS["assistant_early_exit"][1:] if name in own}
    held = {name: getattr(config, name) for name in told}
    vars(config).update(told)
    try:
        yield {name: own[name] for name in own if name not in told}
    finally:
        vars(config).update(held)
        text.num_hidden_layers = depth
        vars(model).pop("_previous_max_cache_length", None)


class Place(NamedTuple):
    """A row of the report: a method in a mode on a prompt set with a batch size."""

    mode: str
    prompts: str
    batch: int
    method: str


class Key(NamedTuple):
    """A timed call: its row of the report, the number of the batch, and of the repeat."""

    place: Place
    number: int
    repeat: int


@dataclass(frozen=True)
class Run(Written):
    """One timed call, with the key that identifies it."""

    key: Key = field(kw_only=True)


class RunFile:
    """Timed calls, one JSON object a line in `folder`, so that what was stopped can be resumed.

    Without a folder they are in memory only. `identity` is what runs depend on, where their keys do
    not tell; ValueError if the folder holds runs of another one.
    """

    def __init__(self, folder: Path | None, identity: JsonObject | None = None):
        self.runs: dict[Key, Run] = {}  # in the order in which they were made
        self.memory: dict[Place, Memory] = {}  # of warm-ups
        self.failures: dict[Place, str] = {}  # of this process
        self._path = None
        if folder is not None:
            self._path = folder / "runs.jsonl"
            folder.mkdir(parents=True, exist_ok=True)
            if identity is not None:
                _claim(folder, identity)
            for record in read_lines(self._path):
                if "error" not in record:  # failed calls are tried again
                    self._take(record)

    def add(self, place: Place, **record: object) -> None:
        """Store a call, its memory, or the error for which a method has no figures."""
        record = {**place._asdict(), **record}
        if self._path is not None:
            append_line(self._path, record)
        self._take(record)

    def _take(self, record: JsonObject) -> None:
        if not record.keys() >= set(Place._fields):
            return  # of an earlier version of `tune`
        place = Place(*(record.pop(name) for name in Place._fields))
        if "error" in record:
            self.failures[place] = record["error"]
        elif "peak" in record:
            self.memory[place] = Memory(**record)
        else:
            key = Key(place, record.pop("number"), record.pop("repeat"))
            self.runs[key] = Run(**record, key=key)

    @contextmanager
    def guarding(self, place: Place) -> Iterator[None]:
        """Store an error that the block raises as the failure of a method."""
        try:
            yield
        except Exception as error:  # any error becomes a row of the report
            self.add(place, error=reason(error))


def _claim(folder: Path, identity: JsonObject) -> None:
    refuse_another(folder, identity)
    replace_text(folder / _IDENTITY, json.dumps(identity, indent=2) + "\n")


def refuse_another(folder: Path, identity: JsonObject) -> None:
    """Raise ValueError if a folder holds runs of a benchmark that differs in a part of `identity`.

    Methods are compared in turns, so that those of another benchmark cannot be added to its runs.
    """
    path = folder / _IDENTITY
    if path.is_file():
        saved, given = read_object(path), json.loads(json.dumps(identity))
        refuse_changes(
            {part: saved.get(part) for part in given},
            given,
            f"{folder} holds the runs of a benchmark",
            "give another --output, or remove the folder",
        )


def reason(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@dataclass(frozen=True)
class Turns:
    """Methods that generate from the same batches in turn."""

    place: Place  # identifies the runs, without a method
    methods: Mapping[str, Write]  # functions that generate, by name
    batches: Sequence[Batch]  # the prompts
    options: Options  # options of `generate`, the same for every method
    repeats: int  # timed runs of every method on every batch
    warm_up: int  # tokens that every method generates untimed before, on the longest prompts
    seed: int  # seeds sampling

    @property
    def keys(self) -> list[Key]:
        """The timed calls, batch by batch.

        The first method rotates, and every second turn is reversed, so that drift affects all.
        """
        methods, keys = list(self.methods), []
        for turn in range(len(self.batches) * self.repeats):
            first = turn % len(methods)
            order = (methods[first:] + methods[:first])[:: -1 if turn % 2 else 1]
            at = divmod(turn, self.repeats)
            keys += [Key(self.place._replace(method=method), *at) for method in order]
        return keys

    def run(self, file: RunFile, show: Callable[[Place], object] = lambda place: None) -> None:
        """Make the calls that the file does not hold yet.

        The first error of a method ends its calls. `show` is told which method comes next.
        """
        wanted = [key for key in self.keys if key not in file.runs]
        longest = max(self.batches, key=lambda batch: batch.width)
        few = {**self.options, "max_new_tokens": self.warm_up}
        for place in dict.fromkeys(key.place for key in wanted):
            show(place)
            with file.guarding(place):
                call = partial(self.methods[place.method], longest, few, self.seed)
                memory = peak_memory(call, longest.tokens.device)
                if memory is not None:
                    file.add(place, **memory._asdict())
        for key in wanted:
            if key.place not in file.failures:
                show(key.place)
                with file.guarding(key.place):
                    write, batch = self.methods[key.place.method], self.batches[key.number]
                    seed = self.seed + 1000 * key.repeat + key.number
                    written = write(batch, dict(self.options), seed)
                    file.add(key.place, **vars(written), number=key.number, repeat=key.repeat)


def generate_options(spec: SelfSpecModel, mode: ModeConfig, max_new_tokens: int) -> Options:
    """Options of `generate` in a mode, the same for every method."""
    padding = spec.causal_lm.generation_config.pad_token_id
    return {
        **mode.generation,
        "max_new_tokens": max_new_tokens,
        "pad_token_id": next(iter([*stop_ids(spec), 0])) if padding is None else padding,
    }


class Bench:
    """A benchmark of one target.

    `others` generate with other programs, by the names of their methods. Raises as `read_prompts`.
    """

    def __init__(
        self,
        spec: SelfSpecModel,
        tokenizer: PreTrainedTokenizerBase,
        config: BenchConfig,
        others: Mapping[str, Write] | None = None,
    ):
        self.spec, self.tokenizer, self.config = spec, tokenizer, config
        decoder = spec.decoder
        longest = decoder.max_positions and decoder.max_positions - config.max_new_tokens
        self.prompts: dict[str, list[Tensor]] = {
            prompts.name: list(map(torch.tensor, read_prompts(prompts, tokenizer, longest)))
            for prompts in config.prompts
        }
        self.batches: dict[tuple[str, int], list[Batch]] = {
            (name, rows): make_batches(prompts, rows, decoder.device)
            for name, prompts in self.prompts.items()
            for rows in config.batch_sizes
        }
        self.methods: dict[str, Write] = dict(others or {})
        self.bandwidth: float | None = None  # bytes per second of reading memory, if measured
        self.measured: JsonObject = {}  # for the report; may differ when a run is resumed
        texts = GreedyTexts(spec, config.max_new_tokens)
        for method in config.methods:
            if method.name in self.methods:
                continue
            try:
                self.methods[method.name] = make_method(spec, method, texts, config.max_new_tokens)
            except Exception as error:  # any error becomes a row of the report
                self.methods[method.name] = partial(_refuse, error)

    @property
    def total(self) -> int:
        """Timed calls in all."""
        return sum(len(turns.keys) for turns in self.turns)

    def options(self, mode: ModeConfig) -> Options:
        """Options of `generate`, the same for every method."""
        chunk = self.config.prefill_chunk_size
        options = generate_options(self.spec, mode, self.config.max_new_tokens)
        return options if chunk is None else {**options, "prefill_chunk_size": chunk}

    @property
    def turns(self) -> list[Turns]:
        """What is compared: the methods in every mode, on every prompt set and batch size."""
        config = self.config
        same = {"repeats": config.repeats, "warm_up": config.warm_up, "seed": config.seed}
        return [
            Turns(Place(mode.name, *key, ""), self.methods, batches, self.options(mode), **same)
            for mode in config.modes
            for key, batches in self.batches.items()
        ]

    def run(self, file: RunFile, show: Show = lambda doing, done, of: None) -> None:
        """Make all runs that the file does not hold yet, and show each before it is made."""
        total = self.total

        def told(place: Place) -> None:
            doing = f"{place.mode} · {place.prompts} · batch {place.batch} · {place.method}"
            show(doing, len(file.runs), total)

        for turns in self.turns:
            turns.run(file, told)


def _refuse(error: Exception, batch: Batch, options: Options, seed: int) -> Written:
    raise error
