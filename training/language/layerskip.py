"""LayerSkip training (Elhoushi et al. 2024, arXiv 2404.16710)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from selfspec.config import StrictConfig
from selfspec.decoder.families import find_layers, refuse_unsupported

from ..data import Batch
from ..loop.loop import LoopConfig
from ..loop.parallel import processes
from .task import LanguageModelling, Windows, model_inputs


class LayerSkipConfig(StrictConfig):
    """How often layers are dropped and how much the exits weigh.

    Attributes:
        p_max: probability that the last layer is dropped; lower layers are dropped less often, the
            first one never.
        dropout: `constant` for a trained model; `rising`, from 0 to `p_max` over the run, for
            training from scratch.
        e_scale: weight of the exits below the last layer, in [0, 1].
        curriculum: which exits a step has: `rotational`, every `rotation`-th, moving on by one
            each step; `gradual`, from the last layer downwards, all from the run's middle on;
            `none`, all of them.
        rotation: distance between a step's exits, in layers (R in the paper).
    """

    p_max: float = Field(default=0.1, ge=0, lt=1)
    dropout: Literal["constant", "rising"] = "constant"
    e_scale: float = Field(default=0.2, ge=0, le=1)
    curriculum: Literal["rotational", "gradual", "none"] = "rotational"
    rotation: int = Field(default=4, ge=1)


# The paper's schedules, functions of the step alone


def drop_probabilities(config: LayerSkipConfig, depth: int, step: int, steps: int) -> list[float]:
    """p(l, t) = S(t) · (e^(l·ln2/(L-1)) - 1) · p_max for every layer.

    S(t) = e^(t·ln2/(T-1)) - 1 when it rises, else 1.
    """
    time = 2 ** (step / max(1, steps - 1)) - 1 if config.dropout == "rising" else 1.0
    return [time * (2 ** (layer / (depth - 1)) - 1) * config.p_max for layer in range(depth)]


def exits_in_use(config: LayerSkipConfig, depth: int, step: int, steps: int) -> list[bool]:
    """C(t, l) for every exit; the last one is always in use, for it is the model's own output."""
    last = depth - 1
    if config.curriculum == "rotational":
        turn = step % config.rotation
        return [layer % config.rotation == turn or layer == last for layer in range(depth)]
    if config.curriculum == "gradual":
        lowest = last - 2 * depth * step // steps
        return [layer >= lowest for layer in range(depth)]
    return [True] * depth


def exit_weights(config: LayerSkipConfig, depth: int, step: int, steps: int) -> list[float]:
    """C(t, l)·e(l) of every exit, normalised to a sum of 1.

    e(l) = e_scale · Σ_{i ≤ l} i below the last layer, L - 1 + e_scale · Σ_{i ≤ L-2} i for it.
    """
    scale, last = config.e_scale, depth - 1
    raw = [scale * layer * (layer + 1) / 2 for layer in range(last)]
    raw.append(last + scale * (last - 1) * last / 2)
    used = exits_in_use(config, depth, step, steps)
    kept = [weight if use else 0.0 for weight, use in zip(raw, used, strict=True)]
    return [weight / sum(kept) for weight in kept]


def draw_dropped(
    seed: int, step: int, places: Iterable[int], probabilities: Sequence[float]
) -> Tensor:
    """`[rows, layers]`, on the CPU: whether a row skips a layer.

    Args:
        seed: seed of the run.
        step: number of the optimizer step.
        places: index of each row among all rows of the step, over micro-batches and processes.
        probabilities: drop probability of each layer.
    """
    draws = [np.random.default_rng((seed, step, p)).random(len(probabilities)) for p in places]
    return torch.from_numpy(np.stack(draws) < np.asarray(probabilities))


# The model's own layers, norm and LM head


class LayerStack:
    """A causal LM whose layers can be dropped per row, with an exit after each.

    During a call, stand-ins replace the layers in the model's body; afterwards the model is as
    before.

    Args:
        model: any decoder-only causal LM of transformers.

    Raises:
        ValueError: the model has no exits, or drops layers by itself.
    """

    def __init__(self, model: PreTrainedModel):
        refuse_unsupported(model)
        config = model.config.get_text_config(decoder=True)
        if config.num_hidden_layers < 2:
            raise ValueError(f"LayerSkip needs 2 layers or more, got {config.num_hidden_layers}")
        if getattr(config, "layerdrop", 0):
            raise ValueError(
                f"{type(model).__name__} drops whole layers by itself (layerdrop "
                f"{config.layerdrop}); load it with layerdrop=0, p_max takes its place"
            )
        self.model = model
        self.base, self.name, self.layers = find_layers(model, config.num_hidden_layers)
        self._returns_tuple = False

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def states(self, inputs: Mapping[str, Any], dropped: Tensor | None = None) -> list[Tensor]:
        """Hidden states after every layer, each `[rows, width, hidden]`.

        Args:
            inputs: inputs of the model.
            dropped: `[rows, layers]` which rows skip which layers, on the CPU.
        """
        states: list[Tensor] = []

        def watched(number: int, layer: nn.Module) -> Callable[..., Any]:
            def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
                output = layer(hidden_states, *args, **kwargs)
                self._returns_tuple = isinstance(output, tuple)
                after = output[0] if isinstance(output, tuple) else output
                if dropped is not None and dropped[:, number].any():
                    past = dropped[:, number, None, None].to(after.device)
                    after = torch.where(past, hidden_states, after)
                states.append(after)
                return (after, *output[1:]) if isinstance(output, tuple) else after

            return run

        with self._standing_in([watched(n, layer) for n, layer in enumerate(self.layers)]):
            self.base(**inputs)
        return states

    def loss(self, state: Tensor, inputs: Mapping[str, Any], targets: Tensor) -> Tensor:
        """Summed cross-entropy in nats at one exit, with the model's own norm and LM head.

        The model's `forward` runs with `state` in place of its layers, so that scaling and
        soft-capping of every family apply.

        Args:
            state: `[rows, width, hidden]`, one of `states`.
            inputs: inputs of `states`.
            targets: `[rows, width]` token ids, -100 where there is nothing to predict.
        """
        output = (state,) if self._returns_tuple else state
        with self._standing_in([lambda *args, **kwargs: output] * len(self)):
            logits = self.model(**inputs).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")

    @contextmanager
    def _standing_in(self, runs: Sequence[Callable[..., Any]]) -> Iterator[None]:
        # Not hooks: a layer that is recomputed in the backward pass would find them gone.
        stand_ins = [_StandIn(layer, run) for layer, run in zip(self.layers, runs, strict=True)]
        self.base.__dict__[self.name] = stand_ins
        try:
            yield
        finally:
            del self.base.__dict__[self.name]


class _StandIn:
    """Called in a decoder layer's position; the body may ask it for the layer's attributes."""

    def __init__(self, layer: nn.Module, run: Callable[..., Any]):
        self.layer, self.run = layer, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


# The task


class LayerSkip(LanguageModelling):
    """Next-token cross-entropy at a step's exits, with layer dropout.

    Which exits and which layers of which rows is a function of the seed and the step, so a resumed
    run needs no state, and any number of processes or micro-batches draws the same.

    Args:
        model: the causal LM that is trained.
        windows: held-out windows by domain.
        config: how often layers are dropped and how much the exits weigh.
        loop: the run's seed and length.

    Raises:
        ValueError: the model has no exits, or drops layers by itself.
    """

    name = "layerskip"

    def __init__(
        self,
        model: PreTrainedModel,
        windows: Mapping[str, Windows],
        config: LayerSkipConfig,
        loop: LoopConfig,
    ):
        super().__init__(model, windows)
        self.stack = LayerStack(model)
        self.config, self.loop = config, loop
        self._step, self._rows = -1, 0

    def forward(self, batch: Batch, step: int, progress: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Weighted sum of the exits' summed cross-entropies, and each in nats as `exit_<layers>`.

        One exit's logits exist at a time: the backward pass makes them again.
        """
        inputs, targets = model_inputs(self.model, batch), batch.targets
        states = self.stack.states(inputs, self._dropped(len(batch.tokens), step))
        weights = exit_weights(self.config, len(self.stack), step, self.loop.steps)
        total, metrics = states[-1].new_zeros((), dtype=torch.float32), {}
        for number, (state, weight) in enumerate(zip(states, weights, strict=True), start=1):
            if weight:
                loss = checkpoint(self.stack.loss, state, inputs, targets, use_reentrant=False)
                total, metrics[f"exit_{number}"] = total + weight * loss, loss
        return total, metrics

    def _dropped(self, rows: int, step: int) -> Tensor:
        if step != self._step:
            self._step, self._rows = step, 0
        world, rank = processes().num_processes, processes().process_index
        places = range(self._rows * world + rank, (self._rows + rows) * world, world)
        self._rows += rows
        chances = drop_probabilities(self.config, len(self.stack), step, self.loop.steps)
        return draw_dropped(self.loop.seed, step, places, chances)

    @torch.no_grad()
    def exit_bits(self, rows: int = 25) -> dict[str, list[float]]:
        """Held-out bits per byte of each domain after every layer, no layer dropped."""
        training = self.training
        self.eval()
        figures = {name: self._bits(windows, rows) for name, windows in self.windows.items()}
        self.train(training)
        return figures

    def _bits(self, windows: Windows, rows: int) -> list[float]:
        nats = torch.zeros(len(self.stack), dtype=torch.float64)
        for tokens in windows.tokens.to(self.model.device).split(rows):
            inputs = {"input_ids": tokens, "use_cache": False}
            targets = tokens.roll(-1, dims=1)
            targets[:, -1] = -100
            states = self.stack.states(inputs)
            nats += torch.tensor([float(self.stack.loss(s, inputs, targets)) for s in states])
        return (nats / math.log(2) / windows.num_bytes).tolist()
