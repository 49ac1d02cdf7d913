"""What promises most is really run, beside plain decoding, on prompts that were kept apart."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfspec.bench.tune.acceptance import generate_options
from selfspec.bench.tune.config import TuneConfig
from selfspec.bench.tune.texts import in_batches, padded
from selfspec.config import DraftConfig, SkipConfig, TreeConfig
from selfspec.drafters import DRAFTERS, make_drafter
from selfspec.drafters.engine import Engine
from selfspec.model import SelfSpecModel
from selfspec.schedule.profile import Prediction, Validation

PLAIN = "none"
_WARM_UP = 8
_COUNTERS = ("rounds", "drafted", "accepted", "emitted", "prefilled")


class Way(NamedTuple):
    """A way to draft that is run.

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
