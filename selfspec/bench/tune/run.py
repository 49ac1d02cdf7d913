"""From measured times and acceptance rates to a profile.

The best predictions and the other drafters are run on held-out prompts beside plain decoding.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec.bench.prompts import cut_prompts, in_batches, padded, split_prompts
from selfspec.bench.tune.config import TuneConfig
from selfspec.bench.tune.measure import (
    WorkFile,
    Written,
    generate_options,
    measure_rates,
    measure_times,
    write_on,
)
from selfspec.config import DraftConfig, SkipConfig, TreeConfig
from selfspec.display.demo import in_turn
from selfspec.drafters import DRAFTERS, make_drafter
from selfspec.drafters.engine import Engine
from selfspec.heads import ExitHead
from selfspec.model import SelfSpecModel
from selfspec.schedule.profile import (
    ExitRates,
    Place,
    Prediction,
    Profile,
    Times,
    Validation,
    exit_name,
    expected_tokens,
    predict_speedup,
)

PLAIN = "none"
_WARM_UP = 8
_COUNTERS = ("rounds", "drafted", "accepted", "emitted", "prefilled")


class Way(NamedTuple):
    """A strategy that is run.

    Attributes:
        draft: how.
        predicted: its predicted speedup, if there is one.
    """

    draft: DraftConfig
    predicted: float | None = None


def choose_ways(
    engine: Engine, predictions: Sequence[Prediction], config: TuneConfig
) -> tuple[dict[str, Way], dict[str, str]]:
    """What is worth running, plain decoding first, and why something that was wanted is not.

    Args:
        engine: the target and its passes.
        predictions: of every exit and length.
        config: how many chains, which trees.
    """
    ranked = sorted(predictions, key=lambda found: -found.speedup)[: config.best]
    wanted = {PLAIN: Way(DraftConfig(drafter=PLAIN))}
    wanted |= {f"{p.name} × {p.num_draft_tokens}": Way(p.draft, p.speedup) for p in ranked}
    wanted |= {name: Way(draft) for name, draft in _others(ranked[0], config).items()}
    left_out: dict[str, str] = {}
    for name, way in wanted.items():
        try:
            make_drafter(engine, way.draft)
        except ValueError as error:
            left_out[name] = str(error)
    return {name: way for name, way in wanted.items() if name not in left_out}, left_out


def _others(best: Prediction, config: TuneConfig) -> dict[str, DraftConfig]:
    """Strategies that are run without a prediction, with the exit that promises most."""
    exit = {"exit_layer": best.exit_layer, "head": best.kind}
    others = {"optimal": DraftConfig(schedule="optimal", **exit)}
    for nodes in config.nodes:
        levels = min(best.num_draft_tokens, nodes)
        tree = TreeConfig(nodes=nodes)
        others[f"tree {nodes}"] = DraftConfig(
            drafter="tree", num_draft_tokens=levels, tree=tree, **exit
        )
    for name in DRAFTERS:
        if name not in ("early_exit", "tree", PLAIN):
            # Without a set that was searched for, layers are chosen on the fly.
            skip = SkipConfig(search="clasp" if name == "layer_skip" else "none")
            others[name] = DraftConfig(drafter=name, skip=skip, **exit)
    return others


class Runner:
    """Writes held-out prompts on in one way or another.

    Args:
        spec: the target and its heads.
        prompts: that nothing was measured on.
        config: batch, tokens, temperature.
    """

    def __init__(self, spec: SelfSpecModel, prompts: Sequence[Tensor], config: TuneConfig):
        self.spec, self.config = spec, config
        device = spec.engine.decoder.device
        self.batches = [padded(rows, device) for rows in in_batches(prompts, config.batch)]
        wide = spec.engine.decoder.dtype in (torch.float32, torch.float64)
        self.exact = wide and not config.temperature

    def warm_up(self, draft: DraftConfig) -> None:
        """Write a few tokens in one way."""
        self._write(draft, *self.batches[0], count=_WARM_UP)

    def run(self, draft: DraftConfig) -> dict[str, Any]:
        """Write all prompts on in one way.

        Returns:
            Tokens per second of the calls, counters, and what tells the text from others.
        """
        seconds = 0.0
        texts: list[list[int]] = []
        counts: dict[str, int] = dict.fromkeys(_COUNTERS, 0)
        for tokens, mask in self.batches:
            start = time.perf_counter()
            self._write(draft, tokens, mask, self.config.new_tokens)
            seconds += time.perf_counter() - start
            stats, trace = self.spec.last_stats, self.spec.last_trace
            assert stats is not None and trace is not None
            texts += [trace.tokens(row) for row in range(len(tokens))]
            for name in counts:
                counts[name] += getattr(stats, name)
        digest = hashlib.sha256(str(texts).encode()).hexdigest()
        return {"tokens_per_second": counts["emitted"] / seconds, "text": digest, **counts}

    def _write(self, draft: DraftConfig, tokens: Tensor, mask: Tensor, count: int) -> None:
        # Rounds bring their tokens to the host, so a call is over when it returns.
        source = torch.Generator(tokens.device).manual_seed(self.config.seed)
        options = {**generate_options(self.config), "max_new_tokens": count}
        self.spec.generate(tokens, attention_mask=mask, draft=draft, generator=source, **options)


def sum_up(
    ways: Mapping[str, Way], turns: Sequence[Mapping[str, Mapping[str, Any]]], exact: bool
) -> list[Validation]:
    """Medians over the turns, fastest first.

    Args:
        ways: what was run.
        turns: of each turn what `Runner.run` found, by way.
        exact: whether plain decoding's tokens had to come.
    """
    found = [_sum_up(name, way, turns, exact) for name, way in ways.items()]
    return sorted(found, key=lambda ran: -ran.speedup)


def _sum_up(
    name: str, way: Way, turns: Sequence[Mapping[str, Mapping[str, Any]]], exact: bool
) -> Validation:
    last = turns[-1][name]
    decoded = last["emitted"] - last["prefilled"]
    rate = "tokens_per_second"
    return Validation(
        name=name,
        draft=way.draft,
        tokens_per_second=median(turn[name][rate] for turn in turns),
        speedup=median(turn[name][rate] / turn[PLAIN][rate] for turn in turns),
        predicted=way.predicted,
        equal=all(turn[name]["text"] == turn[PLAIN]["text"] for turn in turns) if exact else None,
        acceptance_rate=last["accepted"] / max(1, last["drafted"]),
        mean_accepted_length=decoded / max(1, last["rounds"]),
    )


def fastest(validation: Sequence[Validation]) -> DraftConfig:
    """The fastest way whose text is not wrong; plain decoding where nothing is faster."""
    right = [ran for ran in validation if ran.equal is not False]
    return max(right, key=lambda ran: ran.speedup).draft


# From measured times and rates to a profile.

Progress = Callable[[str, int, int], object]
"""Told what is measured, how much of it is done, and of how much."""


def tune(
    spec: SelfSpecModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str] = (),
    config: TuneConfig | None = None,
    work: str | Path | None = None,
    on_progress: Progress | None = None,
) -> Profile:
    """Measure how a target drafts best on this device and these texts.

    Times of passes and rates of acceptance predict the speedup of every exit and length (design:
    Leviathan et al. 2023, theorem 3.8); the best of them and the other strategies are then run.

    Args:
        spec: the target and its heads.
        tokenizer: the target's.
        texts: what it is to write on; none takes the passages in the package.
        config: what is measured.
        work: file that keeps what was measured; what it holds is not measured again.
        on_progress: told how far it is.

    Raises:
        ValueError: the texts hold no token, an exit that is not there, or prompts too long for the
            target.
    """
    config = config or TuneConfig()
    return _Tuning(spec, tokenizer, texts, config, work, on_progress or _say_nothing).run()


class _Tuning:
    def __init__(
        self,
        spec: SelfSpecModel,
        tokenizer: PreTrainedTokenizerBase,
        texts: Sequence[str],
        config: TuneConfig,
        work: str | Path | None,
        say: Progress,
    ):
        self.spec, self.config, self.say = spec, config, say
        self.heads = heads_to_try(spec.engine, config)
        prompts = cut_prompts(tokenizer, texts, config.prompt_tokens, config.prompts)
        self.measured, self.held_out = split_prompts(prompts)
        _check_positions(spec.engine, prompts, config)
        self.place = Place.of(spec.engine.decoder)
        depends_on = [
            self.place.model_dump(),
            [_identity(head) for head in self.heads],
            [prompt.tolist() for prompt in prompts],
        ]
        self.work = WorkFile(None if work is None else Path(work), depends_on)

    def run(self) -> Profile:
        """Measure, predict, validate, choose."""
        times = [self._times(rows) for rows in sorted({1, self.config.batch})]
        rates = self._rates()
        predictions = predict(times[-1], rates, self.config)
        ways, left_out = choose_ways(self.spec.engine, predictions, self.config)
        runner = Runner(self.spec, self.held_out, self.config)
        validation = sum_up(ways, self._turns(runner, ways), runner.exact)
        return Profile(
            draft=fastest(validation),
            place=self.place,
            batch=self.config.batch,
            temperature=self.config.temperature,
            times=times,
            rates=rates,
            predictions=predictions,
            validation=validation,
            left_out=left_out,
        )

    def _settings(self, *names: str) -> dict[str, Any]:
        always = {"temperature", "seed"}
        return self.config.model_dump(mode="json", include={*always, *names})

    def _times(self, rows: int) -> Times:
        part = f"times of passes, batch {rows}"
        self.say(part, 0, self.config.turns)

        def measure() -> dict[str, Any]:
            told = lambda done, of: self.say(part, done, of)  # noqa: E731
            prompts = self.measured
            found = measure_times(self.spec.engine, self.heads, prompts, rows, self.config, told)
            return found.model_dump(mode="json")

        found = self.work.part(part, self._settings("widths", "turns"), measure)
        return Times.model_validate(found)

    def _rates(self) -> list[ExitRates]:
        part, count = "acceptance", len(self.heads) + 1
        self.say(part, 0, count)
        written = self.work.part("texts", self._settings("new_tokens"), self._write)
        texts = [Written(*entry) for entry in written]
        settings = self._settings("new_tokens", "depths")
        found: list[ExitRates] = []
        for number, head in enumerate(self.heads, 1):
            self.say(part, number, count)
            name = f"acceptance of {exit_name(head.kind, head.exit_layer)}"
            rates = self.work.part(name, settings, lambda head=head: self._rates_of(head, texts))
            found.append(ExitRates.model_validate(rates))
        self.say(part, count, count)
        return found

    def _write(self) -> list[list[Any]]:
        return [list(text) for text in write_on(self.spec, self.measured, self.config)]

    def _rates_of(self, head: ExitHead, texts: Sequence[Written]) -> dict[str, Any]:
        rates = measure_rates(self.spec.engine.decoder, head, texts, self.config)
        return rates.model_dump(mode="json")

    def _turns(self, runner: Runner, ways: dict[str, Way]) -> list[dict[str, dict[str, Any]]]:
        """What each way did in each turn, by way."""
        turns: list[dict[str, dict[str, Any]]] = [{} for _ in range(self.config.repeats)]
        runs = [(turn, name) for turn in range(len(turns)) for name in in_turn(ways, turn)]
        warm: set[str] = set()

        def run(name: str) -> dict[str, Any]:
            if name not in warm:
                runner.warm_up(ways[name].draft)
                warm.add(name)
            return runner.run(ways[name].draft)

        for done, (turn, name) in enumerate(runs):
            self.say("validation", done, len(runs))
            settings = [self._settings("new_tokens", "batch"), ways[name].draft.model_dump()]
            found = self.work.part(f"turn {turn}", settings, lambda name=name: run(name))
            turns[turn][name] = found
        self.say("validation", len(runs), len(runs))
        return turns


def heads_to_try(engine: Engine, config: TuneConfig) -> list[ExitHead]:
    """The fitted heads, and the shared one at some exits, lowest exit first.

    Raises:
        ValueError: there is no such exit.
    """
    depth = engine.decoder.depth
    exits = config.exits
    if exits is None:
        usual = {depth // 8, depth // 4, depth // 2, *(head.exit_layer for head in engine.heads)}
        exits = tuple(sorted(e for e in usual if 0 < e < depth))
    shared = [engine.head(DraftConfig(exit_layer=e, head="shared")) for e in sorted(set(exits))]
    every = {(head.exit_layer, head.kind): head for head in [*engine.heads, *shared]}
    return [every[key] for key in sorted(every)]


def predict(times: Times, rates: Sequence[ExitRates], config: TuneConfig) -> list[Prediction]:
    """The speedup of every exit and length."""
    return [_predict(times, exit, k, config.temperature) for exit in rates for k in config.lengths]


def _predict(times: Times, exit: ExitRates, k: int, temperature: float) -> Prediction:
    alphas = exit.alpha if temperature else exit.agreement
    at, more = exit.exit_layer, times.drafts[exit.name].more
    others = times.round(exit.name, at, k) - k * more
    speedup = predict_speedup(alphas, k, more, others, times.plain)
    return Prediction(
        kind=exit.kind,
        exit_layer=at,
        num_draft_tokens=k,
        tokens=expected_tokens(alphas, k),
        speedup=speedup,
    )


def _check_positions(engine: Engine, prompts: Sequence[Tensor], config: TuneConfig) -> None:
    positions, longest = engine.decoder.max_positions, max(len(prompt) for prompt in prompts)
    needed = longest + max(config.new_tokens, config.turns + max(config.widths) + 2)
    if positions is not None and needed > positions:
        raise ValueError(
            f"tuning takes {needed} positions (prompts of {longest} tokens), the model has "
            f"{positions}; lower prompt_tokens, new_tokens or widths"
        )


@torch.no_grad()
def _identity(head: ExitHead) -> list[Any]:
    """Tells a head from one that was fitted differently: a few of its values."""
    digest = hashlib.sha256()
    for tensor in head.state_dict().values():
        flat = tensor.reshape(-1)
        digest.update(str(flat[:: max(1, len(flat) // 64)].tolist()).encode())
    return [head.kind, head.exit_layer, digest.hexdigest()]


def _say_nothing(part: str, done: int, of: int) -> None:
    pass
