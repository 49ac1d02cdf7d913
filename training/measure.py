"""What a fit is worth: calibration, acceptance by depth, tokens a round, predicted speedup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from pydantic import Field

from selfspec import DraftConfig, SelfSpecModel
from selfspec.config import StrictConfig
from selfspec.heads import ExitHead
from training.calibrate import Bin, Calibration, calibration, fit_calibrator
from training.data import Blocks
from training.decode import DecodeConfig, accepted_lengths, draft_of, round_seconds, take_prompts
from training.held_out import Drafts, HeldOutDrafts
from training.report import ExitFigures, expected_tokens


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
    timed_drafts: list[int] = Field(default=[1, 2, 4, 6])

    @property
    def decoding(self) -> DecodeConfig:
        """How prompts are written on."""
        return DecodeConfig(self.prompt_tokens, self.new_tokens, self.num_draft_tokens)


def calibrate(
    spec: SelfSpecModel, held_out: Mapping[str, Blocks], config: MeasureConfig
) -> tuple[list[float], dict[str, list[Bin]]]:
    """Fit the calibrators of every head on one half of the held-out drafts.

    Returns:
        On the other half: of each head the expected calibration error when decoding greedily, and
        the bins of each calibrator, by the exit's name and the way of decoding.
    """
    measured = [
        HeldOutDrafts(
            spec.engine.decoder, spec.heads, blocks, config.depths, config.blocks
        ).measure(with_features=True)
        for blocks in held_out.values()
    ]
    errors: list[float] = []
    bins: dict[str, list[Bin]] = {}
    for number, head in enumerate(spec.heads):
        drafts = [domain[number] for domain in measured]
        quality = {mode: _calibrate(head, mode, drafts) for mode in ("greedy", "sampled")}
        errors.append(quality["greedy"].ece_after)
        for mode, found in quality.items():
            bins[f"{head.kind}, exit {head.exit_layer}, {mode}"] = found.reliability
    return errors, bins


def _calibrate(head: ExitHead, mode: str, drafts: list[Drafts]) -> Calibration:
    features = torch.cat([d.features for d in drafts])
    accepted = torch.cat([d.agreed if mode == "greedy" else d.accepted for d in drafts])
    # Neighbours are alike: every other draft would leak into the fit, so halves alternate in runs.
    held = (torch.arange(len(features)) // 64) % 2 == 1
    where = next(head.parameters(), torch.empty(0)).device
    fitted = fit_calibrator(features[~held], accepted[~held])
    head.calibrators[mode] = fitted.to(where)
    return calibration(fitted.cpu(), features[held], accepted[held])


def measure(
    spec: SelfSpecModel, blocks: Blocks, config: MeasureConfig, errors: Sequence[float]
) -> list[ExitFigures]:
    """Figures of every head on one domain; `errors` are those of their calibrators."""
    decoder = spec.engine.decoder
    drafts = HeldOutDrafts(decoder, spec.heads, blocks, config.depths, config.blocks).measure()
    prompts = take_prompts(blocks, config.prompts, config.prompt_tokens) if config.prompts else []
    figures: list[ExitFigures] = []
    for head, drafted, error in zip(spec.heads, drafts, errors, strict=True):
        lengths = accepted_lengths(spec, head, prompts, config.decoding) if prompts else {}
        figures.append(
            ExitFigures(
                kind=head.kind,
                exit_layer=head.exit_layer,
                agreement=drafted.agreement,
                alpha=drafted.alpha,
                accepted_length=lengths,
                predicted_speedup=_predicted(spec, head, drafted, prompts, config),
                ece=error,
            )
        )
    return figures


def _predicted(
    spec: SelfSpecModel, head: ExitHead, drafted: Drafts, prompts: list, config: MeasureConfig
) -> float | None:
    """The best speedup over plain decoding that rates and the times of real rounds predict."""
    if not prompts or not config.timed_drafts:
        return None
    tokens = min(config.new_tokens, 32)
    plain = round_seconds(spec, DraftConfig(drafter="none"), prompts[0], tokens)
    return max(
        expected_tokens(drafted.agreement, k)
        * plain
        / round_seconds(spec, draft_of(head, k), prompts[0], tokens)
        for k in config.timed_drafts
    )
