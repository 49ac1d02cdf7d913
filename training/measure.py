"""What a fit is worth: calibration, acceptance by depth, tokens a round, predicted speedup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from selfspec import DraftConfig, SelfSpecModel
from selfspec.config import StrictConfig
from selfspec.decoder import Decoder
from selfspec.heads import ExitHead
from selfspec.schedule.prediction import expected_tokens
from training.calibrate import Bin, Calibration, calibration, fit_calibrator
from training.data import Blocks
from training.decode import DecodeConfig, accepted_lengths, draft_of, round_seconds, take_prompts
from training.held_out import Drafts, HeldOutDrafts
from training.report import ExitFigures

# Neighbours are alike: every other draft would leak into the fit, so halves alternate in runs.
_RUN = 64
_TIMED_TOKENS = 32


class MeasureConfig(StrictConfig):
    """What is measured on held-out text.

    Attributes:
        depths: tokens of a draft that are looked at.
        blocks: blocks that are read of each domain.
        watched: blocks of the first domain that are read at each evaluation while training.
        prompts: prompts that are written on; 0 leaves real decoding out.
        prompt_tokens: tokens of a prompt.
        new_tokens: tokens written behind it.
        num_draft_tokens: drafts of a round where tokens a round are compared.
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

    @property
    def decoding(self) -> DecodeConfig:
        """How prompts are written on."""
        return DecodeConfig(self.prompt_tokens, self.new_tokens, self.num_draft_tokens)


def open_held_out(
    decoder: Decoder,
    heads: Sequence[ExitHead],
    held_out: Mapping[str, Blocks],
    config: MeasureConfig,
) -> dict[str, HeldOutDrafts]:
    """The held-out text of each domain, for heads to draft over.

    Raises:
        ValueError: there is not enough of it to measure and to calibrate on, or its blocks or what
            is to be written are longer than the target was made for.
    """
    opened = {
        name: HeldOutDrafts(decoder, heads, blocks, config.depths, config.blocks)
        for name, blocks in held_out.items()
    }
    positions = sum(drafts.positions for drafts in opened.values())
    if positions < 2 * _RUN:
        raise ValueError(
            f"calibrators need {2 * _RUN} held-out tokens that are to be learned, the blocks that "
            f"are read hold {positions}; give more held-out text, or a larger measure.blocks"
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
        On the other half: of each head the expected calibration error when decoding greedily, and
        the bins of each calibrator, by the exit's name and the way of decoding.
    """
    errors: list[float] = []
    bins: dict[str, list[Bin]] = {}
    for head, drafts in zip(spec.heads, zip(*drafted, strict=True), strict=True):
        quality = {mode: _calibrate(head, mode, drafts) for mode in ("greedy", "sampled")}
        head.calibrators.to(spec.engine.decoder.device)
        errors.append(quality["greedy"].ece_after)
        for mode, found in quality.items():
            bins[f"{head.kind}, exit {head.exit_layer}, {mode}"] = found.reliability
    return errors, bins


def _calibrate(head: ExitHead, mode: str, drafts: Sequence[Drafts]) -> Calibration:
    features = torch.cat([d.features for d in drafts])
    accepted = torch.cat([d.agreed if mode == "greedy" else d.accepted for d in drafts])
    held = (torch.arange(len(features)) // _RUN) % 2 == 1
    fitted = fit_calibrator(features[~held], accepted[~held])
    head.calibrators[mode] = fitted
    return calibration(fitted, features[held], accepted[held])


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
        blocks: the domain's text, whose beginnings are written on.
        drafted: the drafts of every head over it.
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
            accepted_length=accepted_lengths(spec, head, prompts, config.decoding),
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
    """The best greedy speedup of each head that rates and the times of real rounds predict."""
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
