"""Fits calibrators on held-out drafts, and measures their probabilities."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.heads.calibrator import Calibrator

FEWEST = 32
_RIDGE = 1.0  # relative to the summed loss: negligible, but keeps separable data finite
_STEPS = 200  # of L-BFGS


class Bin(NamedTuple):
    """Drafts with nearly the same predicted probability.

    Attributes:
        confidence: the mean prediction.
        observed: the share that was accepted.
        drafts: how many there are.
    """

    confidence: float
    observed: float
    drafts: int


def fit_calibrator(features: Tensor, accepted: Tensor) -> Calibrator:
    """Fit a calibrator by logistic regression.

    One accepted and one rejected draft at the mean features are added (Laplace's rule), so that
    probabilities are below 1 and above 0 even if all drafts were accepted, or none.

    Args:
        features: `[n, 4]` of `Calibrator.features`.
        accepted: `[n]` 1 or 0, or the expected acceptance min(1, p / q) in between.

    Raises:
        ValueError: too few positions, shapes that do not fit, or values out of range.
    """
    _check(features, accepted)
    features, accepted = features.double(), accepted.double()
    mean, std = features.mean(0), features.std(0)
    # A constant feature, such as the depth of one-token drafts, becomes 0.
    std = std.where(std > 1e-6, 1)
    ones = features.new_ones(len(features), 1)
    rows = torch.cat([(features - mean) / std, ones], dim=1)
    mean_row = torch.cat([torch.zeros_like(mean), ones[0]]).expand(2, -1)
    solution = _logistic_regression(
        torch.cat([rows, mean_row]), torch.cat([accepted, accepted.new_tensor([0, 1])])
    )
    calibrator = Calibrator()
    lowest, highest = features.aminmax(dim=0)
    state = {"mean": mean, "std": std, "lowest": lowest, "highest": highest}
    calibrator.load_state_dict(state | {"weight": solution[:4], "bias": solution[4]})
    return calibrator.to(features.device)


def _check(features: Tensor, accepted: Tensor) -> None:
    if features.ndim != 2 or features.shape[1] != 4 or accepted.shape != features.shape[:1]:
        raise ValueError(
            "features must be [n, 4] and accepted [n], "
            f"got {tuple(features.shape)} and {tuple(accepted.shape)}"
        )
    if len(features) < FEWEST:
        raise ValueError(
            f"a calibrator needs at least {FEWEST} drafted positions, got {len(features)}; "
            "give more held-out text"
        )
    if not features.isfinite().all():
        raise ValueError("features must be finite; make them by Calibrator.features")
    if not ((accepted >= 0) & (accepted <= 1)).all():
        low, high = accepted.aminmax()
        raise ValueError(f"accepted must lie in [0, 1], got {low:.3g} to {high:.3g}")


@torch.inference_mode(False)
@torch.enable_grad()
def _logistic_regression(rows: Tensor, labels: Tensor) -> Tensor:
    """Weights of least logistic loss, with ridge, for `rows` `[n, 5]`; the last is the bias."""
    rows, labels = rows.clone(), labels.clone()  # they may be of inference mode
    ridge = rows.new_tensor([_RIDGE] * 4 + [0.0])
    solution = rows.new_zeros(5).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [solution], max_iter=_STEPS, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        logits = rows @ solution
        losses = torch.nn.functional.softplus(logits) - labels * logits
        loss = losses.sum() + (ridge * solution**2).sum() / 2
        loss.backward()
        return loss

    optimizer.step(closure)  # pyright: ignore[reportArgumentType]
    return solution.detach()


def expected_calibration_error(predicted: Tensor, accepted: Tensor, bins: int = 15) -> float:
    """Mean distance of confidence and outcome over equally wide bins (Naeini et al. 2015).

    Args:
        predicted: `[n]` probabilities.
        accepted: `[n]` outcomes, or their expectations, in [0, 1].
        bins: how many.

    Raises:
        ValueError: there are no positions, or the shapes differ.
    """
    filled = reliability(predicted, accepted, bins)
    return sum(b.drafts * abs(b.confidence - b.observed) for b in filled) / len(predicted)


def reliability(predicted: Tensor, accepted: Tensor, bins: int = 15) -> list[Bin]:
    """The equally wide bins of [0, 1] that hold any of the `[n]` predictions, in order.

    Raises:
        ValueError: there are no positions, or the shapes differ.
    """
    if predicted.ndim != 1 or predicted.shape != accepted.shape or not len(predicted):
        raise ValueError(
            "predicted and accepted must both be [n] with n at least 1, "
            f"got {tuple(predicted.shape)} and {tuple(accepted.shape)}"
        )
    predicted, accepted = predicted.double(), accepted.double()
    place = (predicted * bins).long().clamp(0, bins - 1)
    counts = place.bincount(minlength=bins)
    confidence = place.bincount(predicted, minlength=bins) / counts
    observed = place.bincount(accepted, minlength=bins) / counts
    every = zip(confidence.tolist(), observed.tolist(), counts.tolist(), strict=True)
    return [Bin(*values) for values in every if values[-1]]
