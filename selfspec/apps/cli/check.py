"""`selfspec check`: tests that a draft does not change the output."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.apps.cli.common import Loaded, Reporter, Source, command, progress, read_prompts
from selfspec.apps.cli.options import Drafting, MaxNewTokens, Prompts, Seed

if TYPE_CHECKING:
    from torch import Tensor

    from selfspec.apps.bench import CheckResult


@command
def check(
    console: Reporter,
    source: Source,
    drafting: Drafting,
    file: Prompts = None,
    max_new_tokens: MaxNewTokens = 64,
    samples: Annotated[
        int, typer.Option(min=0, help="Sampled continuations per prompt; 0 skips the test.")
    ] = 1024,
    seed: Seed = 0,
) -> None:
    """Test exactness: greedy outputs equal the model's own, samples follow its distribution.

    Prompts are those of --file, or else prose, code and maths in the package.

    Exit code 1: an output differs by more than rounding, or the distribution is wrong.
    """
    from selfspec.apps.bench import Sampling, check_exactness

    chosen = drafting.chosen
    target = source.load()
    draft = chosen or target.spec.default_draft
    prompts = _prompts(target, file)
    sampling = Sampling(samples=samples) if samples else None
    with progress().status("comparing outputs"):
        result = check_exactness(target.spec, draft, prompts, max_new_tokens, sampling, seed)
    console.print(*_verdicts(target, result), sep="\n")
    console.answer({**target.to_dict(), "draft": draft.model_dump(), **result.to_dict()})
    if not result.passed:
        raise typer.Exit(1)


def _prompts(target: Loaded, file: Path | None) -> list[Tensor]:
    from selfspec.apps.display.demo import load_prompts

    texts = read_prompts(None, file) if file else [prompt.text for prompt in load_prompts()]
    device = target.spec.decoder.device
    return [target.tokenizer(text, return_tensors="pt").input_ids.to(device) for text in texts]


def _verdicts(target: Loaded, result: CheckResult) -> list[str]:
    """The results in sentences."""
    equal = result.texts - len(result.divergences)
    lines = [f"greedy: {equal} of {result.texts} outputs are equal"]
    for number, found in result.divergences.items():
        excuse = " (rounding)" if found.rounding else ""
        lines.append(f"  output {number} differs at {found.describe(target.tokenizer)}{excuse}")
    if not result.wide and result.divergences:
        lines.append("  half precision rounds passes of different width differently")
    if result.p_values:
        rate = f"{result.acceptance_rate:.2f} of drafts accepted"
        lines.append(f"sampled: least p-value {min(result.p_values):.3g}, {rate}")
    return [*lines, "passed" if result.passed else "FAILED"]
