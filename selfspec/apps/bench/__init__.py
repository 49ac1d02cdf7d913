"""Measuring: `selfspec bench` compares methods, `check` tests exactness, `tune` finds a draft.

Every method generates from every prompt in turn, in one process. Calls are stored one by one, so a
benchmark that was stopped can be resumed.
"""

from selfspec.apps.bench.exactness import CheckResult, Sampling, check_exactness

__all__ = ["CheckResult", "Sampling", "check_exactness"]
