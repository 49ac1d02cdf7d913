"""How long to draft, which strategy to choose, profiles of a device, statistics of a call."""

from __future__ import annotations

from selfspec.schedule.rounds import MEMORY, Rounds, Way
from selfspec.schedule.stopping import (
    ConfidenceStop,
    OptimalStop,
    Schedule,
    make_schedule,
    uncalibrated,
)

__all__ = [
    "MEMORY",
    "ConfidenceStop",
    "OptimalStop",
    "Rounds",
    "Schedule",
    "Way",
    "make_schedule",
    "uncalibrated",
]
