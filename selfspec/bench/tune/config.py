"""Config of `selfspec tune`."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from selfspec.config import StrictConfig


class TuneConfig(StrictConfig):
    """What is measured, predicted and run.

    Attributes:
        batch: rows that are written at once.
        temperature: of sampling; 0 decodes greedily.
        exits: exits at which the untrained `shared` head is tried beside the fitted ones; `None`
            takes an eighth, a quarter and half of the layers, and those of the fitted heads.
        lengths: drafts of a round that are predicted.
        widths: tokens of the passes that are timed; other widths lie on lines between them.
        depths: drafts after one another whose acceptance is measured.
        prompt_tokens: tokens of a prompt, at most.
        prompts: prompts, at most; every second one is kept for validation.
        new_tokens: tokens written after each.
        turns: how often each pass is timed, beside a warm-up.
        best: predictions that are validated.
        nodes: sizes of the trees that are validated.
        repeats: how often each way is validated.
        seed: seeds sampling.
    """

    batch: int = Field(default=1, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    exits: tuple[PositiveInt, ...] | None = None
    lengths: tuple[PositiveInt, ...] = Field(default=(1, 2, 3, 4, 5, 6, 8, 10, 12), min_length=1)
    widths: tuple[PositiveInt, ...] = (1, 2, 3, 5, 9, 17)
    depths: int = Field(default=6, ge=1)
    prompt_tokens: int = Field(default=64, ge=1)
    prompts: int = Field(default=8, ge=1)
    new_tokens: int = Field(default=64, ge=2)
    turns: int = Field(default=9, ge=1)
    best: int = Field(default=5, ge=1)
    nodes: tuple[PositiveInt, ...] = (8, 16)
    repeats: int = Field(default=2, ge=1)
    seed: int = 0
