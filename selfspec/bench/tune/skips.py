"""Which sublayers to skip: a search over measured tokens per second."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from selfspec.bench.tune.acceptance import write_on
from selfspec.bench.tune.config import TuneConfig
from selfspec.bench.tune.removal import Sublayer, removal_order
from selfspec.bench.tune.validation import PLAIN, Runner
from selfspec.bench.tune.work import WorkFile
from selfspec.config import DraftConfig, SkipConfig
from selfspec.decoder import Decoder, Skips
from selfspec.display.demo.timing import in_turn
from selfspec.drafters.skipped_layers import middle_layers
from selfspec.model import SelfSpecModel
from selfspec.schedule.profile import Place

_TEXTS = 4  # over which it is found out what the target misses least
_FINALISTS, _FINAL_TURNS = 3, 3
_FIRST_LENGTH, _LONGEST = 2, 8  # drafts of a round: of the first trials, and of any


@dataclass(frozen=True)
class SkipTrial:
    """What skipping a set of sublayers brought.

    Attributes:
        draft: the set, and how long drafts were.
        tokens_per_second: with it.
        plain_tokens_per_second: of plain decoding on the same prompts, right before or after.
        acceptance_rate: accepted over drafted.
    """

    draft: DraftConfig
    tokens_per_second: float
    plain_tokens_per_second: float
    acceptance_rate: float

    @property
    def skip(self) -> SkipConfig:
        """The set."""
        return self.draft.skip

    @property
    def speedup(self) -> float:
        """Over plain decoding."""
        return self.tokens_per_second / self.plain_tokens_per_second


@dataclass(frozen=True)
class SkipSearch:
    """What a search found.

    Attributes:
        best: the fastest set, as it was when the best ones were measured again.
        trials: all that was tried, in order.
    """

    best: SkipTrial
    trials: list[SkipTrial]


def search_skips(
    spec: SelfSpecModel,
    prompts: Sequence[Tensor],
    trials: int,
    seed: int = 0,
    on_trial: Callable[[SkipTrial], object] | None = None,
    max_new_tokens: int = 64,
    draft: DraftConfig | None = None,
    work: str | Path | None = None,
) -> SkipSearch:
    """Search for the skip set with the most tokens per second (Draft & Verify, Zhang et al. 2024).

    Bayesian optimisation (TPE) over how many layers stay exact, every sublayer above them, and the
    length of drafts where `draft` gives none. It starts from what the target misses least, from
    prefix exits and from evenly skipped layers. The best are measured again at the end, for the
    fastest of many trials was lucky too.

    Args:
        spec: the target.
        prompts: token ids `[length]` each, to write on one at a time.
        trials: sets to try.
        seed: of the search.
        on_trial: told of each set.
        max_new_tokens: tokens written behind each prompt.
        draft: how to draft otherwise: length, schedule.
        work: file that keeps the measurements; the same search then goes on where it was.

    Raises:
        ImportError: optuna is not installed.
        ValueError: no trial, no prompt, or a target of a single layer.
    """
    optuna = _optuna()
    if trials < 1 or not prompts or spec.engine.decoder.depth < 2:
        raise ValueError(
            "a search takes at least 1 trial, 1 prompt and 2 layers, got "
            f"{trials}, {len(prompts)} and {spec.engine.decoder.depth}"
        )
    judge = _Judge(spec, prompts, max_new_tokens, work)
    space = _Space(spec.engine.decoder, draft or DraftConfig())
    done: list[SkipTrial] = []
    with _quiet(optuna):
        study = optuna.create_study(
            direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed)
        )
        for start in space.starts(judge.order(space.sublayers)):
            study.enqueue_trial(start)
        for number in range(trials):
            asked = study.ask()
            found = judge.measure(space.draft(asked), turns=1, first=number)
            study.tell(asked, found.speedup)
            done.append(found)
            if on_trial is not None:
                on_trial(found)
    return _finish(judge, done)


def _finish(judge: _Judge, trials: list[SkipTrial]) -> SkipSearch:
    different = {trial.draft: trial for trial in trials}.values()
    finalists = sorted(different, key=lambda trial: -trial.speedup)[:_FINALISTS]
    again = [judge.measure(trial.draft, _FINAL_TURNS) for trial in finalists]
    return SkipSearch(max(again, key=lambda trial: trial.speedup), trials)


class _Space:
    """What is searched: layer 0 always runs, so that something is left."""

    def __init__(self, decoder: Decoder, draft: DraftConfig):
        self.depth, self._draft = decoder.depth, draft
        self._any_length = draft.num_draft_tokens is None and draft.schedule == "fixed"
        self.kinds = ("attention", "mlp") if _has_halves(decoder) else ("layer",)

    def draft(self, trial: Any) -> DraftConfig:
        """What a trial asks for."""
        changes: dict[str, Any] = {"drafter": "layer_skip", "skip": self._skip(trial)}
        if self._any_length:
            changes["num_draft_tokens"] = trial.suggest_int("drafts", 1, _LONGEST)
        return self._draft.model_copy(update=changes)

    def _skip(self, trial: Any) -> SkipConfig:
        exact = trial.suggest_int("exact", 1, self.depth - 1)
        chosen: dict[str, list[int]] = {kind: [] for kind in self.kinds}
        for layer in range(exact, self.depth):
            for kind in self.kinds:
                if trial.suggest_categorical(f"{kind} {layer}", [False, True]):
                    chosen[kind].append(layer)
        attention, mlp = chosen[self.kinds[0]], chosen[self.kinds[-1]]
        return SkipConfig(attention=tuple(attention), mlp=tuple(mlp), search="none")

    @property
    def sublayers(self) -> list[Sublayer]:
        """All that may be skipped."""
        return [(kind, layer) for layer in range(1, self.depth) for kind in self.kinds]

    def starts(self, order: Sequence[Sequence[Sublayer]]) -> Iterator[dict[str, Any]]:
        """What is tried first.

        Args:
            order: sublayers by step, those that are missed least first.
        """
        for steps in range(len(order) - 1, 1, -1):
            yield self._asking(list(chain(*order[:steps])))
        for quarters in (3, 2, 1):
            count = max(1, self.depth * quarters // 4)
            if count < self.depth:
                yield self._asking(self._whole(range(self.depth - count, self.depth)))
                yield self._asking(self._whole(middle_layers(self.depth, count)))

    def _whole(self, layers: Sequence[int]) -> list[Sublayer]:
        return [(kind, layer) for layer in layers for kind in self.kinds]

    def _asking(self, skipped: Sequence[Sublayer]) -> dict[str, Any]:
        """The parameters that ask for a set."""
        exact = max(1, min(layer for _, layer in skipped))
        above = ((kind, layer) for kind, layer in self.sublayers if layer >= exact)
        choices = {f"{kind} {layer}": (kind, layer) in skipped for kind, layer in above}
        return {"exact": exact, "drafts": _FIRST_LENGTH, **choices}


def _has_halves(decoder: Decoder) -> bool:
    """Whether attention and MLP can be skipped one without the other, in every layer."""
    try:
        for layer in range(1, decoder.depth):
            decoder.check_skips(Skips.of([layer], []))
            decoder.check_skips(Skips.of([], [layer]))
    except ValueError:
        return False
    return True


class _Judge:
    """Measures ways to skip beside plain decoding, and remembers what it measured."""

    def __init__(
        self,
        spec: SelfSpecModel,
        prompts: Sequence[Tensor],
        max_new_tokens: int,
        work: str | Path | None,
    ):
        self.runner = Runner(spec, prompts, TuneConfig(new_tokens=max_new_tokens))
        place = Place.of(spec.engine.decoder).model_dump()
        depends_on = [place, [prompt.tolist() for prompt in prompts], max_new_tokens]
        self.work = WorkFile(None if work is None else Path(work), depends_on)
        self._spec, self._prompts, self._warm = spec, prompts, False

    def order(self, sublayers: Sequence[Sublayer]) -> list[list[Sublayer]]:
        """Sublayers by step, those that the target misses least first."""
        found = self.work.part("removal", [*sublayers], lambda: self._order(sublayers))
        return [[(kind, layer) for kind, layer in step] for step in found]

    def _order(self, sublayers: Sequence[Sublayer]) -> list[list[Sublayer]]:
        texts = write_on(self._spec, self._prompts[:_TEXTS], self.runner.config)
        return removal_order(self._spec.engine.decoder, texts, sublayers)

    def measure(self, draft: DraftConfig, turns: int, first: int = 0) -> SkipTrial:
        """What it brings over so many turns; what was measured so is not run again."""
        settings = [draft.model_dump(mode="json"), turns]
        found = self.work.part("skips", settings, lambda: self._run(draft, turns, first))
        return SkipTrial(draft, *found)

    def _run(self, draft: DraftConfig, turns: int, first: int) -> list[float]:
        ways = {"plain": DraftConfig(drafter=PLAIN), "skips": draft}
        if not self._warm:
            for way in ways.values():
                self.runner.warm_up(way)
            self._warm = True
        ran: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
        for turn in range(first, first + turns):
            for name in in_turn(ways, turn):
                ran[name].append(self.runner.run(ways[name]))
        last = ran["skips"][-1]
        rates = [_rate(ran["skips"]), _rate(ran["plain"])]
        return [*rates, last["accepted"] / max(1, last["drafted"])]


def _rate(runs: Sequence[dict[str, Any]]) -> float:
    """Tokens per second of all runs together: their harmonic mean."""
    return len(runs) / sum(1 / run["tokens_per_second"] for run in runs)


def _optuna() -> Any:
    try:
        return importlib.import_module("optuna")
    except ImportError:
        raise ImportError(
            "searching for sublayers to skip needs optuna; install it with "
            "`pip install 'selfspec[tune]'`"
        ) from None


@contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    """Without a line for every trial."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)
