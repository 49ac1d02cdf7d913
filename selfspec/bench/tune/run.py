"""From measured times and rates to a profile."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec.bench.tune.acceptance import Written, measure_rates, write_on
from selfspec.bench.tune.clock import measure_times
from selfspec.bench.tune.config import TuneConfig
from selfspec.bench.tune.texts import cut_prompts, split_prompts
from selfspec.bench.tune.validation import Runner, Way, choose_ways, fastest, sum_up
from selfspec.bench.tune.work import WorkFile
from selfspec.config import DraftConfig
from selfspec.display.demo.timing import in_turn
from selfspec.drafters.engine import Engine
from selfspec.heads import ExitHead
from selfspec.model import SelfSpecModel
from selfspec.schedule.prediction import expected_tokens, predict_speedup
from selfspec.schedule.profile import ExitRates, Place, Prediction, Profile, Times, exit_name

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
            return found.wall.model_dump(mode="json")

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
