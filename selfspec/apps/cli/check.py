"""`selfspec check`: tests that a draft does not change the output."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.apps.cli import options as opt
from selfspec.apps.cli.common import Loaded, Source, print_json, progress, read_prompts, reporting

if TYPE_CHECKING:
    from torch import Tensor

    from selfspec.apps.bench import CheckResult


def check(
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help='Prompts: JSON lines with a "prompt" each, or one plain text; - reads stdin.',
            show_default="prose, code and maths in the package",
        ),
    ] = None,
    model: opt.Model = None,
    heads: opt.Heads = None,
    dtype: opt.DtypeOption = "auto",
    device: opt.Device = None,
    kernels: opt.KernelsOption = "auto",
    kv_cache: opt.KVCacheOption = "auto",
    profile: opt.Profile = None,
    config: opt.Config = None,
    draft: opt.Draft = None,
    max_new_tokens: opt.MaxNewTokens = 64,
    samples: Annotated[
        int,
        typer.Option(min=0, help="Sampled continuations per prompt; 0 skips the test."),
    ] = 1024,
    seed: opt.Seed = 0,
    as_json: opt.AsJson = False,
) -> None:
    """Test exactness: greedy outputs equal the model's own, samples follow its distribution.

    Exit code 1: an output differs by more than rounding, or the distribution is wrong.
    """
    from selfspec.apps.bench import Sampling, check_exactness

    drafting = opt.draft_config(config, draft)
    with reporting(as_json) as console:
        target = Source(model, heads, dtype, device, profile, kernels, kv_cache).load()
        drafting = drafting or target.spec.default_draft
        prompts = _prompts(target, file)
        sampling = Sampling(samples=samples) if samples else None
        with progress().status("comparing outputs"):
            result = check_exactness(target.spec, drafting, prompts, max_new_tokens, sampling, seed)
        console.print(*_verdicts(target, result), sep="\n")
    if as_json:
        print_json({**target.to_dict(), "draft": drafting.model_dump(), **result.to_dict()})
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
