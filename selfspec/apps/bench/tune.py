"""`selfspec tune`: which draft is fastest on this device and these prompts, found by running them.

Every exit head, and the whole model with fewer bits or keys, is tried with several numbers of
drafts on some prompts. The fastest of these and the other drafters are then compared with plain
decoding on other prompts, in turns.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec import __version__
from selfspec.apps.bench.prompts import cut_prompts, in_batches, padded, split_prompts
from selfspec.apps.bench.shapes import size_of, usable_memory
from selfspec.apps.display.demo import in_turn
from selfspec.config import DraftConfig, Precision, SkipConfig, StrictConfig, TreeConfig
from selfspec.drafters import DRAFTERS, Auto, Cascade, make_drafter
from selfspec.drafters.engine import Engine
from selfspec.heads import ExitHead
from selfspec.heads.files import append_line, read_lines
from selfspec.model import SelfSpecModel
from selfspec.schedule.profile import Measured, Place, Profile, exit_name
from selfspec.schedule.stats import Stats

PLAIN = "none"
_WARM_UP = 8  # tokens generated untimed with each draft

Progress = Callable[[str, int, int], object]
"""Told what is measured, how much of it is done, and of how much."""
Found = dict[str, Any]  # what one run of a draft found, as plain values


class TuneConfig(StrictConfig):
    """What `tune` runs.

    Attributes:
        batch: number of rows of a call.
        temperature: sampling temperature; 0 decodes greedily.
        exits: exits at which the `shared` head is tried beside the fitted heads; `None` takes an
            eighth, a quarter and half of the layers, and the exits of the fitted heads.
        precisions: in which the whole model drafts; each has a copy of the weights.
        windows: keys to which the whole model attends when it drafts; each is tried where prompts
            are at least twice as long.
        lengths: numbers of drafts a round that are tried with every head.
        prompt_tokens: the most tokens of a prompt.
        prompts: the most prompts; heads are tried on half of them, and the comparison uses the
            others.
        new_tokens: tokens generated after each prompt; heads are tried with half as many.
        best: number of chains that are compared with the other drafters.
        nodes: sizes of the trees that are compared.
        repeats: number of runs of each draft in the comparison.
        seed: seeds sampling.
    """

    batch: int = Field(default=1, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    exits: tuple[PositiveInt, ...] | None = None
    precisions: tuple[Precision, ...] = ("int4", "int8")
    windows: tuple[PositiveInt, ...] = (256,)
    lengths: tuple[PositiveInt, ...] = Field(default=(1, 2, 4, 8), min_length=1)
    prompt_tokens: int = Field(default=64, ge=1)
    prompts: int = Field(default=8, ge=1)
    new_tokens: int = Field(default=64, ge=2)
    best: int = Field(default=5, ge=1)
    nodes: tuple[PositiveInt, ...] = (8, 16)
    repeats: int = Field(default=2, ge=1)
    seed: int = 0


def tune(
    spec: SelfSpecModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str] = (),
    config: TuneConfig | None = None,
    work: str | Path | None = None,
    on_progress: Progress = lambda part, done, of: None,
) -> Profile:
    """Find the fastest draft for a target on this device and these texts.

    Args:
        spec: the target and its heads.
        tokenizer: the target's.
        texts: texts like those that will be continued; none takes the passages in the package.
        config: what is run.
        work: file that keeps every run; runs that it holds are not made again.
        on_progress: called with the progress.

    Raises:
        ValueError: the texts hold no token, there is no such exit, or prompts are too long for the
            target.
    """
    config = config or TuneConfig()
    heads = heads_to_try(spec.engine, config)
    prompts = cut_prompts(tokenizer, texts, config.prompt_tokens, config.prompts)
    _check_positions(spec.engine, prompts, config)
    tried, held_out = split_prompts(prompts)
    place = Place.of(spec.decoder)
    identity = [__version__, place.model_dump(), [_identity(head) for head in heads]]
    work_file = WorkFile(None if work is None else Path(work), identity)

    plain = {PLAIN: DraftConfig(drafter=PLAIN)}
    exits = {
        exit_name(head.kind, head.exit_layer): {"exit_layer": head.exit_layer, "head": head.kind}
        for head in heads
    }
    whole, no_copies = whole_models(spec.engine, config, max(map(len, prompts)))
    chains = {
        f"{name} × {k}": DraftConfig(num_draft_tokens=k, **keys)
        for name, keys in (exits | whole).items()
        for k in config.lengths
    }
    short = config.model_copy(update={"new_tokens": max(1, config.new_tokens // 2)})
    screening = Race(spec, tried, short, work_file).run(
        "exits and lengths", {**plain, **chains}, 1, on_progress
    )

    ranked = sorted(screening[1:], key=lambda ran: -ran.speedup)[: config.best]
    drafts, left_out = _possible(spec.engine, _others(ranked[0].draft, config))
    drafts = {**plain, **{ran.name: ran.draft for ran in ranked}, **drafts}
    compared = Race(spec, held_out, config, work_file).run(
        "comparison", drafts, config.repeats, on_progress
    )
    compared.sort(key=lambda ran: -ran.speedup)
    return Profile(
        draft=fastest(compared),
        place=place,
        batch=config.batch,
        temperature=config.temperature,
        screening=screening[1:],
        validation=compared,
        left_out=no_copies | left_out,
    )


def fastest(compared: Sequence[Measured]) -> DraftConfig:
    """The fastest draft whose output is not wrong; plain decoding where nothing is faster."""
    right = [ran for ran in compared if ran.equal is not False]
    return max(right, key=lambda ran: ran.speedup).draft


def heads_to_try(engine: Engine, config: TuneConfig) -> list[ExitHead]:
    """The fitted heads, and the shared one at some exits, lowest exit first.

    Raises:
        ValueError: there is no such exit.
    """
    depth = engine.decoder.depth
    exits = config.exits
    if exits is None:
        usual = {depth // 8, depth // 4, depth // 2, *(head.exit_layer for head in engine.heads)}
        exits = tuple(e for e in usual if 0 < e < depth)
    shared = [engine.head(DraftConfig(exit_layer=e, head="shared")) for e in exits]
    every = {(head.exit_layer, head.kind): head for head in [*engine.heads, *shared]}
    return [every[key] for key in sorted(every)]


def whole_models(
    engine: Engine, config: TuneConfig, longest: int
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Drafts of the whole model with fewer bits or keys, and why others are left out.

    Args:
        engine: the target.
        config: the precisions and windows.
        longest: tokens of the longest prompt.
    """
    decoder, drafts, left_out = engine.decoder, {}, {}
    windows = [window for window in config.windows if 2 * window <= longest]
    for precision, window in itertools.product((None, *config.precisions), (None, *windows)):
        if precision is None and window is None:
            continue
        keys = {"exit_layer": decoder.depth, "precision": precision, "window": window}
        name = f"whole {precision or 'model'}" + (f", {window} keys" if window else "")
        try:
            make_drafter(engine, DraftConfig(**keys))
        except ValueError as error:
            left_out[name] = str(error)
            continue
        copy = 0 if precision is None else sum(decoder.copy_bytes(precision).values())
        weights = size_of(decoder.causal_lm) * decoder.dtype.itemsize
        if weights + copy > usable_memory(decoder.device):
            left_out[name] = f"its copy of the weights takes {copy / 1e9:.1f} GB more memory"
        else:
            drafts[name] = keys
    return drafts, left_out


# What a draft of the whole model has in common with others by the same passes.
_PASSES = ("exit_layer", "head", "precision", "lm_head_precision", "window")


def _others(best: DraftConfig, config: TuneConfig) -> dict[str, DraftConfig]:
    """Drafts that are not fixed chains, with the head of the best chain where they need one."""
    passes = best.model_dump(include={*_PASSES})
    others = {"optimal": DraftConfig(schedule="optimal", **passes)}
    for nodes in config.nodes:
        levels = min(best.most_tokens, nodes)
        others[f"tree {nodes}"] = DraftConfig(
            drafter="tree", num_draft_tokens=levels, tree=TreeConfig(nodes=nodes), **passes
        )
    for name in DRAFTERS:
        if name not in ("early_exit", "tree", PLAIN):
            is_exact = not best.approximates
            exit = passes if is_exact or DRAFTERS[name] in (Auto, Cascade) else {}
            # No set of layers is known, so they are chosen while generating.
            skip = SkipConfig(search="clasp" if name == "skip_sublayers" else "none")
            others[name] = DraftConfig(drafter=name, skip=skip, **exit)
    return others


def _possible(
    engine: Engine, drafts: Mapping[str, DraftConfig]
) -> tuple[dict[str, DraftConfig], dict[str, str]]:
    """The drafts that this model can make, and why it cannot make the others."""
    left_out: dict[str, str] = {}
    for name, draft in drafts.items():
        try:
            make_drafter(engine, draft)
        except ValueError as error:
            left_out[name] = str(error)
    return {name: draft for name, draft in drafts.items() if name not in left_out}, left_out


class Race:
    """Runs drafts on the same prompts, in turns.

    Args:
        spec: the target and its heads.
        prompts: what is continued.
        config: batch, tokens, temperature.
        work: keeps what each run found.
    """

    def __init__(
        self, spec: SelfSpecModel, prompts: Sequence[Tensor], config: TuneConfig, work: WorkFile
    ):
        self.spec, self.config, self.work = spec, config, work
        device = spec.decoder.device
        self.batches = [padded(rows, device) for rows in in_batches(prompts, config.batch)]
        wide = spec.decoder.dtype.itemsize >= 4
        self.exact = wide and not config.temperature
        self._warm: set[str] = set()

    def run(
        self, part: str, drafts: Mapping[str, DraftConfig], repeats: int, on_progress: Progress
    ) -> list[Measured]:
        """Medians over the repeats, in the order of `drafts`, of which `none` is one."""
        turns: list[dict[str, Found]] = [{} for _ in range(repeats)]
        runs = [(turn, name) for turn in range(repeats) for name in in_turn(drafts, turn)]
        tokens = [batch.tolist() for batch, _ in self.batches]
        sizes = self.config.model_dump(include={"new_tokens", "temperature", "seed", "batch"})
        for done, (turn, name) in enumerate(runs):
            on_progress(part, done, len(runs))
            settings = [turn, sizes, tokens, drafts[name].model_dump()]
            turns[turn][name] = self.work.get(settings, lambda name=name: self._time(name, drafts))
        on_progress(part, len(runs), len(runs))
        return [self._measured(name, draft, turns) for name, draft in drafts.items()]

    def _time(self, name: str, drafts: Mapping[str, DraftConfig]) -> Found:
        """Tokens per second of whole calls, counters, and a digest of the output."""
        if name not in self._warm:
            self._generate(drafts[name], *self.batches[0], _WARM_UP)
            self._warm.add(name)
        seconds = 0.0
        outputs: list[list[int]] = []
        total = Stats()
        for tokens, mask in self.batches:
            start = time.perf_counter()
            self._generate(drafts[name], tokens, mask, self.config.new_tokens)
            seconds += time.perf_counter() - start
            stats, trace = self.spec.last_stats, self.spec.last_trace
            assert stats is not None and trace is not None
            outputs += [trace.tokens(row) for row in range(len(tokens))]
            total += stats
        return {
            "tokens_per_second": total.emitted / seconds,
            "output": _digest(outputs),
            "acceptance_rate": total.acceptance_rate,
            "mean_accepted_length": total.mean_accepted_length,
        }

    def _generate(self, draft: DraftConfig, tokens: Tensor, mask: Tensor, count: int) -> None:
        # A round brings its tokens to the host, so a call is over when it returns.
        options: dict[str, Any] = {"do_sample": False}
        if self.config.temperature:
            options = {"do_sample": True, "temperature": self.config.temperature}
            options |= {"top_k": 0, "top_p": 1.0}
        source = torch.Generator(tokens.device).manual_seed(self.config.seed)
        self.spec.generate(
            tokens,
            attention_mask=mask,
            draft=draft,
            generator=source,
            max_new_tokens=count,
            pad_token_id=0,
            **options,
        )

    def _measured(
        self, name: str, draft: DraftConfig, turns: Sequence[Mapping[str, Found]]
    ) -> Measured:
        rates = [turn[name]["tokens_per_second"] for turn in turns]
        plain = [turn[PLAIN]["tokens_per_second"] for turn in turns]
        equal = all(turn[name]["output"] == turn[PLAIN]["output"] for turn in turns)
        last = turns[-1][name]
        return Measured(
            name=name,
            draft=draft,
            tokens_per_second=median(rates),
            speedup=median(rate / base for rate, base in zip(rates, plain, strict=True)),
            equal=equal if self.exact else None,
            acceptance_rate=last["acceptance_rate"],
            mean_accepted_length=last["mean_accepted_length"],
        )


class WorkFile:
    """Finished runs, one JSON object a line, so that an interrupted tuning can be resumed.

    Args:
        path: where they are kept; `None` keeps them nowhere.
        identity: what all runs depend on; runs of another identity are ignored.
    """

    def __init__(self, path: Path | None, identity: Any):
        self._path, self._identity = path, identity
        lines = [] if path is None else read_lines(path)
        self._found: dict[str, Found] = {line["key"]: line["value"] for line in lines}

    def get(self, settings: Any, measure: Callable[[], Found]) -> Found:
        """What a run with these settings found; `measure` makes the run if it is not there."""
        key = _digest([self._identity, settings])
        if key not in self._found:
            self._found[key] = measure()
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                append_line(self._path, {"key": key, "value": self._found[key]})
        return self._found[key]


def _digest(values: Any) -> str:
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_positions(engine: Engine, prompts: Sequence[Tensor], config: TuneConfig) -> None:
    positions, longest = engine.decoder.max_positions, max(map(len, prompts))
    needed = longest + max(config.new_tokens, _WARM_UP)
    if positions is not None and needed > positions:
        raise ValueError(
            f"tuning takes {needed} positions (prompts of {longest} tokens), the model has "
            f"{positions}; lower prompt_tokens or new_tokens"
        )


@torch.no_grad()
def _identity(head: ExitHead) -> list[Any]:
    """Tells a head from one that was fitted differently: a few of its values."""
    flat = [tensor.reshape(-1) for tensor in head.state_dict().values()]
    values = [part[:: max(1, len(part) // 64)].tolist() for part in flat]
    return [head.kind, head.exit_layer, _digest(values)]
