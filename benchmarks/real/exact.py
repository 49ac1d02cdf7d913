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
    """The outputs of a drafter on all prompts.

    Attributes:
        drafter: its name; `default` is what `generate` does without `draft`.
        equal: outputs equal to those of `generate`.
        outputs: outputs in all.
        margin: difference of the two scores where outputs differ first, the largest of all; `None`
            if there is none, or if one output ended.
        must_equal: whether the weights are float32 or wider; in half precision they may differ.
    """

    drafter: str
    equal: int
    outputs: int
    margin: float | None
    must_equal: bool

    @property
    def failed(self) -> bool:
        """Whether outputs differ that must be equal."""
        return self.must_equal and self.equal < self.outputs


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
    """Compare drafters with the model's own `generate`.

    Args:
        spec: the target.
        tokenizer: its tokenizer.
        mode: one of `MODES`.
        names: the drafters, or `default`.
        prompts: `[1, width]` each.
        tokens: new tokens, at most.
    """
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
        margin = max(margins, default=None)
        yield Compared(name, found.count(None), len(found), margin, writers[0].exact)
