"""Measuring: `selfspec bench` compares methods, `check` tests exactness, `tune` finds a draft.

Every method generates from every prompt in turn, in one process. Calls are stored one by one, so a
benchmark that was stopped can be resumed.
"""

from selfspec.apps.bench.config import BenchConfig, MethodConfig, ModeConfig, PromptSetConfig
from selfspec.apps.bench.exactness import (
    CheckResult,
    Divergence,
    Sampling,
    check_exactness,
    first_divergence,
)
from selfspec.apps.bench.plots import write_plots
from selfspec.apps.bench.prompts import read_prompts
from selfspec.apps.bench.results import Report, Row, summarise
from selfspec.apps.bench.run import Bench, RunFile

__all__ = [
    "Bench",
    "BenchConfig",
    "CheckResult",
    "Divergence",
    "MethodConfig",
    "ModeConfig",
    "PromptSetConfig",
    "Report",
    "Row",
    "RunFile",
    "Sampling",
    "check_exactness",
    "first_divergence",
    "read_prompts",
    "summarise",
    "write_plots",
]
