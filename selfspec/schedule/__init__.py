"""How long to draft, which strategy to choose, profiles of a device, statistics of a call."""

from __future__ import annotations

from selfspec.schedule.round_model import RoundModel, RoundTimer, Work
from selfspec.schedule.stopping import (
    ConfidenceStop,
    OptimalStop,
    Schedule,
    make_schedule,
    uncalibrated,
)

__all__ = [
    "ConfidenceStop",
    "OptimalStop",
    "RoundModel",
    "RoundTimer",
    "Schedule",
    "Work",
    "make_schedule",
    "uncalibrated",
]
