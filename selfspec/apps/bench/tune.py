"""`selfspec tune`: which draft is fastest on this device and these prompts, found by running them.

Every exit head, and the whole model with fewer bits or keys, is tried with several numbers of
drafts on some prompts. The fastest of these and the other drafters are then compared with plain
decoding on other prompts, in turns.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
from pydantic import Field, PositiveInt
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec import __version__
from selfspec.apps.bench import run as bench
from selfspec.apps.bench.config import MethodConfig, ModeConfig
from selfspec.apps.bench.prompts import cut_prompts, make_batches
from selfspec.apps.bench.results import ratios, usual_rates
from selfspec.apps.bench.run import Run, RunFile, Show, Turns, generate_options, make_method
from selfspec.apps.bench.shapes import usable_memory, weights_held
from selfspec.config import DraftConfig, JsonObject, Precision, SkipConfig, StrictConfig, TreeConfig
from selfspec.drafters import DRAFTERS, make_drafter
from selfspec.drafters.engine import Engine
from selfspec.heads import ExitHead
from selfspec.model import SelfSpecModel
from selfspec.schedule.profile import Measured, Place, Profile, exit_name
from selfspec.schedule.stats import Stats

PLAIN = "none"
_WARM_UP = 8  # tokens generated untimed with each draft


class TuneConfig(StrictConfig):
    """What `tune` runs.

    Attributes:
        batch: number of rows of a call.
        temperature: sampling temperature; 0 decodes greedily.
        exits: exits at which the `shared` head is tried beside the fitted heads; `None` takes an
            eighth, a quarter and half of the layers, and the exits of the fitted heads.
        precisions: in which the whole model drafts; each has a copy of the weights. With both, the
            LM head is also tried in more bits than the layers.
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
    on_progress: Show = lambda part, done, of: None,
) -> Profile:
    """Find the fastest draft for a target on this device and these texts.

    Args:
        spec: the target and its heads.
        tokenizer: the target's.
        texts: texts like those that will be continued; none takes the passages in the package.
        config: what is run.
        work: folder that keeps every run; runs that it holds are not made again.
        on_progress: called with the progress.

    Raises:
        ValueError: the texts hold no token, there is no such exit or nothing to try, or prompts are
            too long for the target.
    """
    config = config or TuneConfig()
    heads = heads_to_try(spec.engine, config)
    prompts = cut_prompts(tokenizer, texts, config.prompt_tokens, config.prompts)
    _check_positions(spec.engine, prompts, config)
    tried, held_out = prompts[::2], prompts[1::2] or prompts
    place = Place.of(spec.decoder)
    identity = [__version__, place.model_dump(), [_identity(head) for head in heads]]
    file = RunFile(None if work is None else Path(work))

    plain = {PLAIN: DraftConfig(drafter=PLAIN)}
    exits = {
        exit_name(head.kind, head.exit_layer): {"exit_layer": head.exit_layer, "head": head.kind}
        for head in heads
    }
    whole, left_out = whole_models(spec.engine, config, max(map(len, prompts)))
    chains = {
        f"{name} × {k}": DraftConfig(num_draft_tokens=k, **keys)
        for name, keys in (exits | whole).items()
        for k in config.lengths
    }
    if not chains:
        reasons = "; ".join(left_out.values()) or "exits, precisions and windows name none"
        raise ValueError(f"there is no draft to try ({reasons}); name an exit or a window")
    short = config.model_copy(update={"new_tokens": max(1, config.new_tokens // 2), "repeats": 1})
    show = partial(on_progress, "exits and lengths")
    (_, *screening), failed = _compared(
        spec, {**plain, **chains}, tried, short, identity, file, show
    )
    left_out |= failed

    ranked = sorted(screening, key=lambda ran: -ran.speedup)[: config.best]
    others, impossible = _possible(spec.engine, _others(ranked[0].draft, config))
    drafts = {**plain, **{ran.name: ran.draft for ran in ranked}, **others}
    show = partial(on_progress, "comparison")
    compared, failed = _compared(spec, drafts, held_out, config, identity, file, show)
    compared.sort(key=lambda ran: -ran.speedup)
    return Profile(
        draft=fastest(compared),
        place=place,
        batch=config.batch,
        temperature=config.temperature,
        screening=screening,
        validation=compared,
        left_out=left_out | impossible | failed,
    )


def fastest(compared: Sequence[Measured]) -> DraftConfig:
    """The fastest draft whose output is not wrong; plain decoding where nothing is faster."""
    right = [ran for ran in compared if ran.equal is not False]
    return max(right, key=lambda ran: ran.speedup).draft


def heads_to_try(engine: Engine, config: TuneConfig) -> list[ExitHead]:
    """The fitted heads, and the shared one at some exits, lowest exit first."""
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
) -> tuple[dict[str, JsonObject], dict[str, str]]:
    """Drafts of the whole model with fewer bits or keys, and why others are left out.

    `longest` is the tokens of the longest prompt.
    """
    decoder, drafts, left_out = engine.decoder, {}, {}
    chosen: list[DraftConfig] = []
    windows = [window for window in config.windows if 2 * window <= longest]
    bits: list[tuple[Precision | None, Precision | None]] = [
        (each, None) for each in (None, *config.precisions)
    ]
    if {"int4", "int8"} <= {*config.precisions}:
        bits.append(("int4", "int8"))
    for (precision, of_lm_head), window in itertools.product(bits, (None, *windows)):
        if precision is None and window is None:
            continue
        keys = {
            "exit_layer": decoder.depth,
            "precision": precision,
            "lm_head_precision": of_lm_head,
            "window": window,
        }
        more = [f"LM head {of_lm_head}"] * bool(of_lm_head) + [f"{window} keys"] * bool(window)
        name = ", ".join([f"whole {precision or 'model'}", *more])
        draft = DraftConfig(**keys)
        try:
            make_drafter(engine, draft)
        except ValueError as error:
            left_out[name] = str(error)
            continue
        held, needed = (weights_held(engine, each) for each in (chosen, [*chosen, draft]))
        if held < needed > usable_memory(decoder.device):
            more = (needed - held) / 1e9
            left_out[name] = f"its copy of the weights takes {more:.1f} GB more memory"
        else:
            chosen.append(draft)
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
            exit = passes if DRAFTERS[name].takes_exit else {}
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


def _compared(
    spec: SelfSpecModel,
    drafts: Mapping[str, DraftConfig],
    prompts: Sequence[Tensor],
    config: TuneConfig,
    identity: object,
    file: RunFile,
    show: Callable[[int, int], object],
) -> tuple[list[Measured], dict[str, str]]:
    """Run drafts in turn, of which `none` is one; what each found, and why others failed.

    Runs have the digest of what they depend on in their keys, so the file may hold others, too.
    """
    sizes = config.model_dump(include={"new_tokens", "temperature", "seed", "batch"})
    mode = ModeConfig(name=_digest([identity, sizes]), temperature=config.temperature)
    keys = {name: f"{name} {_digest(draft.model_dump())}" for name, draft in drafts.items()}
    methods = {
        keys[name]: make_method(spec, MethodConfig(name=name, draft=draft))
        for name, draft in drafts.items()
    }
    turns = Turns(
        bench.Place(mode.name, _digest([prompt.tolist() for prompt in prompts]), config.batch, ""),
        methods,
        make_batches(prompts, config.batch, spec.decoder.device),
        generate_options(spec, mode, config.new_tokens),
        config.repeats,
        _WARM_UP,
        config.seed,
    )
    calls = turns.keys
    turns.run(file, lambda place: show(sum(key in file.runs for key in calls), len(calls)))
    show(len(calls), len(calls))
    failed = {name: file.failures.get(turns.place._replace(method=keys[name])) for name in keys}
    runs = {
        name: [file.runs[key] for key in sorted(calls) if key.place.method == keys[name]]
        for name in keys
        if failed[name] is None
    }
    if PLAIN not in runs or len(runs) == 1:
        raise RuntimeError(f"no drafts can be compared: {next(filter(None, failed.values()))}")
    exact, plain = spec.decoder.dtype.itemsize >= 4 and not config.temperature, runs[PLAIN]
    measured = [_measured(name, drafts[name], own, plain, exact) for name, own in runs.items()]
    return measured, {name: why for name, why in failed.items() if why is not None}


def _measured(
    name: str, draft: DraftConfig, runs: Sequence[Run], plain: Sequence[Run], exact: bool
) -> Measured:
    rates = usual_rates(runs, whole=True)
    stats = sum((Stats(**run.stats) for run in runs if run.stats is not None), Stats())
    return Measured(
        name=name,
        draft=draft,
        tokens_per_second=median(rates.values()),
        speedup=median(ratios(rates, usual_rates(plain, whole=True)).values()),
        equal=[run.texts for run in runs] == [run.texts for run in plain] if exact else None,
        acceptance_rate=stats.acceptance_rate,
        mean_accepted_length=stats.mean_accepted_length,
    )


def _digest(values: object) -> str:
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
def _identity(head: ExitHead) -> list[object]:
    """Tells a head from one that was fitted differently: a few of its values."""
    flat = [tensor.reshape(-1) for tensor in head.state_dict().values()]
    values = [part[:: max(1, len(part) // 64)].tolist() for part in flat]
    return [head.kind, head.exit_layer, _digest(values)]
