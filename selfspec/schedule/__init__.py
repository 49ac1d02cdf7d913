"""How long to draft and with which strategy, profiles of a device, and what a call did."""

from __future__ import annotations

from selfspec.schedule.round_model import RoundModel, RoundTimer, Work
from selfspec.schedule.stopping import (
    ConfidenceStop,
    OptimalStop,
    Schedule,
    make_schedule,
    plain_judge,
)

__all__ = [
    "ConfidenceStop",
    "OptimalStop",
    "RoundModel",
    "RoundTimer",
    "Schedule",
    "Work",
    "make_schedule",
    "plain_judge",
]
