"""Kernels that fall back to the layers themselves, with a warning."""

from __future__ import annotations

import warnings


class StandIn:
    """Runs layers in a way of its own until something turns up that it cannot do.

    Args:
        name: the model's, for the warning.

    Attributes:
        manner: how layers run by it, for the warning.
        problem: why layers run as they are from now on; `None` while they do not.
    """

    manner: str

    def __init__(self, name: str):
        self._name = name
        self.problem: str | None = None

    def give_up(self, problem: str) -> None:
        """Run layers as they are from now on, and say why."""
        self.problem = problem
        warnings.warn(
            f"the layers of {self._name} are not {self.manner} ({problem}); they run as they are, "
            "with the same output: leave kernels out to get no warning",
            stacklevel=2,
        )


def told(error: Exception) -> str:
    """What went wrong, in a line: the compiler's own error, where torch has wrapped it."""
    inner = getattr(error, "inner_exception", None) or error
    return f"{type(inner).__name__}: {str(inner).strip().partition(chr(10))[0]}"
