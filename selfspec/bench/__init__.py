"""Methods compared on one target in one run: what `selfspec bench` measures, `check` tests.

Every method writes every prompt, in turn, under one clock; calls are kept one by one, so that a
benchmark goes on where it was stopped.
"""

from selfspec.bench.config import (
    BenchConfig,
    MethodConfig,
    ModeConfig,
    PromptSetConfig,
)
from selfspec.bench.equality import Divergence, first_divergence
from selfspec.bench.exactness import CheckResult, Sampling, check_exactness
from selfspec.bench.limit import Limits, check_limits, measure_limits
from selfspec.bench.memory import MemoryReport, measure_memory
from selfspec.bench.plots import write_plots
from selfspec.bench.prompts import read_prompts
from selfspec.bench.report import Findings, Report, write_findings
from selfspec.bench.runner import Bench, Progress
from selfspec.bench.runs import RunFile
from selfspec.bench.scaling import Scaling, measure_scaling
from selfspec.bench.summary import Row, summarise

__all__ = [
    "Bench",
    "BenchConfig",
    "CheckResult",
    "Divergence",
    "Findings",
    "Limits",
    "MemoryReport",
    "MethodConfig",
    "ModeConfig",
    "Progress",
    "PromptSetConfig",
    "Report",
    "Row",
    "RunFile",
    "Sampling",
    "Scaling",
    "check_exactness",
    "check_limits",
    "first_divergence",
    "measure_limits",
    "measure_memory",
    "measure_scaling",
    "read_prompts",
    "summarise",
    "write_findings",
    "write_plots",
]
