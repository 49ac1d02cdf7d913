"""Whether every drafter writes what a checkpoint's own `generate` writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from selfspec.apps.bench.exactness import first_divergence
from selfspec.apps.bench.prompts import Batch
from selfspec.apps.display.demo import CoupledChoice
from selfspec.drafters import DRAFTERS, TwoModel
from selfspec.heads.files import append_line, read_lines
from selfspec.model import SelfSpecModel

MODES = ("greedy", "coupled")
_SEED = 0


class Compared(NamedTuple):
    """The outputs of a drafter on all prompts.

    Attributes:
        dtype: of the weights.
        mode: `greedy`, or `coupled`: sampled at temperature 1 with the noise of a seed.
        drafter: its name; `default` is what `generate` does without `draft`.
        tokens: new tokens of an output, at most.
        equal: outputs equal to those of `generate`.
        outputs: outputs in all.
        margin: difference of the two scores where outputs differ first, the largest of all; `None`
            if there is none, or if one output ended.
        rounding: whether rounding explains all differences.
    """

    dtype: str
    mode: str
    drafter: str
    tokens: int
    equal: int
    outputs: int
    margin: float | None
    rounding: bool

    @property
    def failed(self) -> bool:
        """Whether outputs in float32 differ; in half precision they may."""
        return self.dtype == "float32" and self.equal < self.outputs

    def __str__(self) -> str:
        """The comparison in a line."""
        apart = "" if self.margin is None else f", margin {self.margin:.2g}"
        wrong = "NOT EQUAL: " if self.failed else ""
        return (
            f"{self.dtype}, {self.mode}, {self.drafter}: {wrong}{self.equal} of {self.outputs} "
            f"outputs of {self.tokens} tokens are equal{apart}"
        )


def drafters() -> list[str]:
    """Names of the drafters that need no other model."""
    return sorted(set(DRAFTERS) - {TwoModel.name})


def compare(
    spec: SelfSpecModel,
    mode: str,
    drafts: Mapping[str, Any],
    prompts: Sequence[Tensor],
    tokens: int,
    **options: Any,
) -> Iterator[Compared]:
    """Compare drafts with the model's own `generate`.

    Args:
        spec: the target.
        mode: one of `MODES`.
        drafts: what `generate` takes as `draft`, by name.
        prompts: `[1, width]` each.
        tokens: new tokens.
        options: more options of both `generate`.
    """
    options = {"max_new_tokens": tokens, "pad_token_id": 0, **options}
    own = [_own(spec, mode, prompt, options) for prompt in prompts]
    for name, draft in drafts.items():
        found = [
            first_divergence(
                spec,
                Batch.of(prompt),
                _choices(mode, prompt) | options,
                plain,
                _drafted(spec, mode, draft, prompt, options),
            )
            for prompt, plain in zip(prompts, own, strict=True)
        ]
        differ = [one for one in found if one is not None]
        margins = [one.margin for one in differ if one.margin is not None]
        yield Compared(
            dtype=str(spec.decoder.dtype).removeprefix("torch."),
            mode=mode,
            drafter=name,
            tokens=tokens,
            equal=len(found) - len(differ),
            outputs=len(found),
            margin=max(margins, default=None),
            rounding=all(one.rounding for one in differ),
        )


def _choices(mode: str, prompt: Tensor) -> dict[str, Any]:
    """Options with which the model's own greedy `generate` chooses as the mode does."""
    if mode == "greedy":
        return {"do_sample": False}
    noise = CoupledChoice(1.0, prompt.shape[1], prompt.device, _SEED)
    return {"do_sample": False, "logits_processor": LogitsProcessorList([noise])}


def _own(spec: SelfSpecModel, mode: str, prompt: Tensor, options: dict[str, Any]) -> list[int]:
    generate: Any = spec.model.generate
    mask = torch.ones_like(prompt)
    output = generate(prompt, attention_mask=mask, **_choices(mode, prompt), **options)
    return output[0, prompt.shape[1] :].tolist()


def _drafted(
    spec: SelfSpecModel, mode: str, draft: Any, prompt: Tensor, options: dict[str, Any]
) -> list[int]:
    chosen: dict[str, Any] = {"do_sample": False}
    if mode == "coupled":
        chosen = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        draft = {"rule": "coupled", **draft}
    output = spec.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        draft=draft,
        generator=torch.Generator(prompt.device).manual_seed(_SEED),
        **chosen,
        **options,
    )
    assert isinstance(output, Tensor)
    return output[0, prompt.shape[1] :].tolist()


class Results:
    """Comparisons in a file, one a line.

    Args:
        path: the file.
        show: called with every comparison as it is made.
    """

    def __init__(self, path: Path, show: Callable[[Compared], object]):
        self.path, self.show = path, show
        self.found = [Compared(**record) for record in read_lines(path)]

    def missing(self, dtype: str, mode: str, names: Sequence[str], tokens: int) -> list[str]:
        """The drafts that were not compared yet."""
        wanted = (dtype, mode, tokens)
        done = {one.drafter for one in self.found if (one.dtype, one.mode, one.tokens) == wanted}
        return [name for name in names if name not in done]

    def add(self, compared: Compared) -> None:
        """Store a comparison and show it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        append_line(self.path, compared._asdict())
        self.found.append(compared)
        self.show(compared)
