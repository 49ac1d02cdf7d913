"""Measures heads on held-out text: acceptance rates, and decoding on prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from selfspec import SelfSpecModel
from selfspec.apps.bench.forecast import draft_of, expected_tokens, round_seconds, write
from selfspec.config import DraftConfig, StrictConfig
from selfspec.decoder import Decoder
from selfspec.heads import ExitHead
from selfspec.schedule.stats import Stats

from ..data import Blocks
from .calibrate import Bin, expected_calibration_error, fit_calibrator, reliability
from .drafts import Drafts, HeldOutDrafts
from .report import ExitFigures


def take_prompts(blocks: Blocks, count: int, tokens: int) -> list[Tensor]:
    """The first `[1, tokens]` of evenly spaced held-out blocks."""
    numbers = range(0, len(blocks), max(1, len(blocks) // max(1, count)))[:count]
    return [blocks[number].tokens[:, :tokens] for number in numbers]


def accepted_lengths(
    spec: SelfSpecModel, head: ExitHead, prompts: Sequence[Tensor], config: MeasureConfig
) -> dict[str, float]:
    """Mean tokens per round, greedily and at temperature 1; empty without prompts."""
    if not prompts:
        return {}
    draft = draft_of(head, config.num_draft_tokens)
    lengths: dict[str, float] = {}
    for mode, sample in (("greedy", False), ("sampled", True)):
        total = Stats()
        for number, prompt in enumerate(prompts):
            source = torch.Generator(spec.decoder.device).manual_seed(number)
            write(spec, prompt, config.new_tokens, draft, sample, source)
            assert spec.last_stats is not None
            total += spec.last_stats
        lengths[mode] = total.mean_accepted_length
    return lengths


# Neighbouring drafts are alike, so the halves for fitting and testing alternate in runs.
_RUN = 64
_TIMED_TOKENS = 32


class MeasureConfig(StrictConfig):
    """What is measured on held-out text.

    Attributes:
        depths: number of draft positions.
        blocks: blocks of each domain.
        watched: blocks of the first domain that each evaluation during training reads.
        prompts: prompts that are continued; 0 skips real decoding.
        prompt_tokens: tokens of a prompt.
        new_tokens: tokens generated after it.
        num_draft_tokens: drafts of a round when decoding.
        timed_drafts: numbers of drafts whose rounds are timed, for the predicted speedup.
    """

    depths: int = Field(default=4, ge=1)
    blocks: int = Field(default=64, ge=2)
    watched: int = Field(default=16, ge=1)
    prompts: int = Field(default=8, ge=0)
    prompt_tokens: int = Field(default=64, ge=1)
    new_tokens: int = Field(default=96, ge=2)
    num_draft_tokens: int = Field(default=4, ge=1)
    timed_drafts: list[PositiveInt] = Field(default=[1, 2, 4, 6])


def open_held_out(
    decoder: Decoder,
    heads: Sequence[ExitHead],
    held_out: Mapping[str, Blocks],
    config: MeasureConfig,
) -> dict[str, HeldOutDrafts]:
    """The held-out text of each domain.

    Raises:
        ValueError: there is too little of it to calibrate on, or blocks or outputs are longer than
            the target's positions.
    """
    opened = {
        name: HeldOutDrafts(decoder, heads, blocks, config.depths, config.blocks)
        for name, blocks in held_out.items()
    }
    positions = sum(drafts.positions for drafts in opened.values())
    if positions < 2 * _RUN:
        some_left = any(len(blocks) > config.blocks for blocks in held_out.values())
        remedy = "raise measure.blocks" if some_left else "give more text, or more of it held out"
        raise ValueError(
            f"calibrators need {2 * _RUN} held-out tokens to draft, the blocks that are read hold "
            f"{positions}; {remedy}"
        )
    longest = max(
        config.prompt_tokens + config.new_tokens if config.prompts else 0,
        *(blocks.block_size for blocks in held_out.values()),
    )
    if decoder.max_positions is not None and longest > decoder.max_positions:
        raise ValueError(
            f"the target was made for {decoder.max_positions} positions, got {longest}; lower "
            "block_size, or measure.prompt_tokens and measure.new_tokens"
        )
    return opened


def calibrate(
    spec: SelfSpecModel, drafted: Sequence[Sequence[Drafts]]
) -> tuple[list[float], dict[str, list[Bin]]]:
    """Fit the calibrators of every head on one half of the held-out drafts.

    Args:
        spec: the target and its heads.
        drafted: of each domain the drafts of every head, with features.

    Returns:
        On the other half: the expected calibration error of each head for greedy decoding, and the
        bins of each calibrator, by the name of the exit and of the mode. A head's own confidence
        output has bins, too.
    """
    errors: list[float] = []
    bins: dict[str, list[Bin]] = {}
    for head, drafts in zip(spec.heads, zip(*drafted, strict=True), strict=True):
        own = torch.cat([d.confidence for d in drafts])
        for mode in ("greedy", "sampled"):
            name = f"{head.kind}, exit {head.exit_layer}, {mode}"
            held, predicted, accepted = _calibrate(head, mode, drafts)
            bins[name] = reliability(predicted, accepted)
            if mode == "greedy":
                errors.append(expected_calibration_error(predicted, accepted))
            elif head.confidence is not None:
                bins[f"{name}, own output"] = reliability(own[held], accepted)
        head.calibrators.to(spec.decoder.device)
    return errors, bins


def _calibrate(
    head: ExitHead, mode: str, drafts: Sequence[Drafts]
) -> tuple[Tensor, Tensor, Tensor]:
    """Fit a calibrator on one half.

    Returns:
        A mask `[n]` of the other half, and predictions and outcomes there.
    """
    features = torch.cat([d.features for d in drafts])
    accepted = torch.cat([d.agreed if mode == "greedy" else d.accepted for d in drafts])
    held = (torch.arange(len(features)) // _RUN) % 2 == 1
    fitted = fit_calibrator(features[~held], accepted[~held])
    head.calibrators[mode] = fitted
    return held, fitted.probability(features[held]), accepted[held]


def measure(
    spec: SelfSpecModel,
    blocks: Blocks,
    drafted: Sequence[Drafts],
    errors: Sequence[float],
    config: MeasureConfig,
) -> list[ExitFigures]:
    """Figures of every head on one domain.

    Args:
        spec: the target and its heads.
        blocks: the domain's text; prompts are taken from it.
        drafted: the drafts of every head.
        errors: calibration error of every head.
        config: what is measured.
    """
    prompts = take_prompts(blocks, config.prompts, config.prompt_tokens)
    speedups = _speedups(spec, drafted, prompts, config)
    return [
        ExitFigures(
            kind=head.kind,
            exit_layer=head.exit_layer,
            agreement=drafts.agreement,
            alpha=drafts.alpha,
            accepted_length=accepted_lengths(spec, head, prompts, config),
            predicted_speedup=speedup,
            ece=error,
        )
        for head, drafts, error, speedup in zip(spec.heads, drafted, errors, speedups, strict=True)
    ]


def _speedups(
    spec: SelfSpecModel,
    drafted: Sequence[Drafts],
    prompts: Sequence[Tensor],
    config: MeasureConfig,
) -> list[float | None]:
    """The best greedy speedup of each head, predicted from rates and times of real rounds."""
    if not prompts or not config.timed_drafts:
        return [None] * len(drafted)
    tokens = min(config.new_tokens, _TIMED_TOKENS)
    plain = round_seconds(spec, DraftConfig(drafter="none"), prompts[0], tokens)

    def speedup(head: ExitHead, drafts: Drafts, k: int) -> float:
        seconds = round_seconds(spec, draft_of(head, k), prompts[0], tokens)
        return expected_tokens(drafts.agreement, k) * plain / seconds

    return [
        max(speedup(head, drafts, k) for k in config.timed_drafts)
        for head, drafts in zip(spec.heads, drafted, strict=True)
    ]
