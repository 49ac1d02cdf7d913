"""Methods compared on one target in one run: what `selfspec bench` measures, `check` tests.

Every method writes every prompt, in turn, under one clock; calls are kept one by one, so that a
benchmark goes on where it was stopped.
"""

from selfspec.bench.config import (
    BenchConfig,
    MethodConfig,
    PromptSetConfig,
    SettingConfig,
)
from selfspec.bench.equality import Divergence, first_divergence
from selfspec.bench.exactness import CheckResult, Sampling, check_exactness
from selfspec.bench.plots import write_plots
from selfspec.bench.prompts import read_prompts
from selfspec.bench.report import NOTES, Report
from selfspec.bench.runner import Bench, Progress
from selfspec.bench.runs import RunFile
from selfspec.bench.summary import Row, summarise

__all__ = [
    "NOTES",
    "Bench",
    "BenchConfig",
    "CheckResult",
    "Divergence",
    "MethodConfig",
    "Progress",
    "PromptSetConfig",
    "Report",
    "Row",
    "RunFile",
    "Sampling",
    "SettingConfig",
    "check_exactness",
    "first_divergence",
    "read_prompts",
    "summarise",
    "write_plots",
]
