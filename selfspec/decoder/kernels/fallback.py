"""Kernels that fall back to the layers themselves, with a warning."""

from __future__ import annotations

import warnings


class FallbackKernel:
    """Runs layers with special kernels, and falls back to the layers if that fails.

    Args:
        name: the model's name, for the warning.

    Attributes:
        manner: what it does with layers, for the warning.
        problem: why it has fallen back; `None` while it has not.
    """

    manner: str

    def __init__(self, name: str):
        self._name = name
        self.problem: str | None = None

    def give_up(self, problem: str) -> None:
        """Fall back to the layers themselves from now on, with a warning."""
        self.problem = problem
        warnings.warn(
            f"the layers of {self._name} are not {self.manner} ({problem}); they run as they are, "
            "with the same output: leave kernels out to get no warning",
            stacklevel=2,
        )


def summarize(error: Exception) -> str:
    """An error in one line; the compiler's own error, if torch has wrapped it."""
    inner = getattr(error, "inner_exception", None) or error
    return f"{type(inner).__name__}: {str(inner).strip().partition(chr(10))[0]}"
