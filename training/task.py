"""What a task is to the loop: a module whose forward is a loss, and figures on held-out text."""

from __future__ import annotations

from torch import Tensor, nn

from training.data import Batch


class Task(nn.Module):
    """What is trained: a module whose forward is the loss of a batch.

    Randomness has to be a function of seed and step, or come from torch's global generator, which
    the loop seeds anew every step. The
    loop puts the task into training mode for a step and into evaluation mode for `evaluate`; a task
    with a frozen part that must stay as it is overrides `train`.

    Attributes:
        name: what displays call it.
        better: the metric of `evaluate` that early stopping looks at; lower is better.
    """

    name: str = "training"
    better: str = "loss"

    def forward(self, batch: Batch, step: int, progress: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss, and metrics, each summed over the batch's terms.

        Args:
            batch: packed blocks.
            step: number of the optimizer step.
            progress: share of the run that is done, in [0, 1).
        """
        raise NotImplementedError

    def terms(self, batch: Batch) -> Tensor:
        """Number of terms that the loss of a batch sums over."""
        return (batch.targets != -100).sum()

    def evaluate(self) -> dict[str, float]:
        """Figures on held-out text. Every process computes them; the first one's are reported."""
        return {}
