"""Whether every drafter writes what a checkpoint's own `generate` writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from selfspec.apps.display.demo import Comparison, DemoOptions
from selfspec.config import DraftConfig
from selfspec.drafters import DRAFTERS, TwoModel
from selfspec.model import SelfSpecModel

# Sampled with the noise of a seed, `generate` and drafters choose the same tokens.
MODES: Mapping[str, DemoOptions] = {
    "greedy": DemoOptions(),
    "coupled": DemoOptions(temperature=1.0, draft=DraftConfig(rule="coupled")),
}


class Compared(NamedTuple):
    """The outputs of a drafter on all prompts."""

    drafter: str  # its name; `default` is what `generate` does without `draft`
    equal: int  # outputs equal to those of `generate`
    outputs: int  # in all
    margin: float | None  # the largest difference of two scores where outputs differ first
    failed: bool  # whether outputs differ in float32; in half precision they may


def drafters() -> list[str]:
    """Names of the drafters that need no other model."""
    return sorted(set(DRAFTERS) - {TwoModel.name})


def compare(
    spec: SelfSpecModel,
    tokenizer: Any,
    mode: str,
    names: Sequence[str],
    prompts: Sequence[Tensor],
    tokens: int,
) -> Iterator[Compared]:
    """Compare drafters, or `default`, with `generate` on prompts `[1, width]`."""
    options = MODES[mode].model_copy(update={"max_new_tokens": tokens})
    writers = [Comparison(spec, tokenizer, prompt, options) for prompt in prompts]
    own = [writer.plain().tokens for writer in writers]
    for name in names:
        draft = DraftConfig(drafter=name, rule=options.draft.rule) if name != "default" else None
        found = [
            writer.divergence(plain, writer.speculative(draft).tokens)
            for writer, plain in zip(writers, own, strict=True)
        ]
        margins = [one.margin for one in found if one is not None and one.margin is not None]
        equal, failed = found.count(None), writers[0].exact and any(found)
        yield Compared(name, equal, len(found), max(margins, default=None), failed)
