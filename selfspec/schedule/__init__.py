"""How long to draft."""

from __future__ import annotations

from selfspec.config import DraftConfig
from selfspec.heads import AcceptanceEstimator, Calibrator
from selfspec.schedule.base import ConfidenceStop, Schedule
from selfspec.schedule.optimal import OptimalStop
from selfspec.schedule.pace import Pace


def make_schedule(config: DraftConfig, pace: Pace | None = None) -> Schedule:
    """The schedule that a config names; `pace` is what is known from earlier calls."""
    if config.schedule == "confidence":
        return ConfidenceStop(config.confidence)
    if config.schedule == "optimal":
        return OptimalStop(pace or Pace())
    return Schedule()


def plain_judge() -> AcceptanceEstimator:
    """What to go by where nothing was calibrated."""
    return Calibrator().estimator()


__all__ = ["ConfidenceStop", "OptimalStop", "Schedule", "make_schedule", "plain_judge"]
