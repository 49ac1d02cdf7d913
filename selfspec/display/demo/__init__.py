"""Plain decoding and self-speculation side by side on one prompt: what `selfspec demo` measures.

Figures are medians of interleaved runs after a warm-up, on the wall clock of the whole call, so
the machine's drift falls on all ways alike.
"""

from selfspec.display.demo.comparison import Bar, Comparison, compare
from selfspec.display.demo.exits import ExitAgreement, exit_agreements
from selfspec.display.demo.result import DemoResult, Divergence, first_divergence, run_demo, verdict
from selfspec.display.demo.writer import (
    DemoOptions,
    DemoPrompt,
    Domain,
    Run,
    Writer,
    load_prompts,
)

__all__ = [
    "Bar",
    "Comparison",
    "DemoOptions",
    "DemoPrompt",
    "DemoResult",
    "Divergence",
    "Domain",
    "ExitAgreement",
    "Run",
    "Writer",
    "compare",
    "exit_agreements",
    "first_divergence",
    "load_prompts",
    "run_demo",
    "verdict",
]
