"""What rates and times predict: tokens of a round, and speed over plain decoding."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence


def expected_tokens(alphas: Sequence[float], num_draft_tokens: int) -> float:
    """Tokens that a round of k drafts emits: 1 + Σ_{i≤k} Π_{j≤i} α_j.

    Args:
        alphas: acceptance rate of each draft, given that those before it stand; drafts deeper than
            the last are taken to have its rate.
        num_draft_tokens: k.

    Raises:
        ValueError: there are no rates, or k is negative.
    """
    if not alphas or num_draft_tokens < 0:
        raise ValueError(
            "expected_tokens needs a rate and num_draft_tokens of at least 0, "
            f"got {len(alphas)} rates and {num_draft_tokens}"
        )
    deeper = itertools.chain(alphas, itertools.repeat(alphas[-1]))
    stand = itertools.accumulate(itertools.islice(deeper, num_draft_tokens), lambda a, b: a * b)
    return 1 + sum(stand)


def predict_speedup(
    alphas: Sequence[float],
    num_draft_tokens: int,
    shallow_seconds: float,
    verify_seconds: float,
    plain_seconds: float,
) -> float:
    """Speed of self-speculation over plain decoding (Leviathan et al. 2023, theorem 3.8).

    With one α for all depths, a verification as long as a plain step and a draft token of c of it,
    this is S = (1 - α^{k+1}) / ((1 - α)(kc + 1)).

    Args:
        alphas: acceptance rate by draft depth.
        num_draft_tokens: k, drafted in every round.
        shallow_seconds: of drafting one token.
        verify_seconds: of the rest of a round, the verification of all k drafts.
        plain_seconds: of one token of plain decoding.

    Raises:
        ValueError: there are no rates, or k is negative.
    """
    seconds = num_draft_tokens * shallow_seconds + verify_seconds
    return expected_tokens(alphas, num_draft_tokens) * plain_seconds / seconds


def interpolated(measured: Mapping[int, float], width: int) -> float:
    """Seconds of a pass of any width, on the line through the two measured ones next to it.

    Args:
        measured: seconds by width.
        width: beyond the measured ones the last line goes on, but never below what was measured.

    Raises:
        ValueError: nothing was measured.
    """
    if not measured:
        raise ValueError("interpolated needs a measured width, got none")
    widths = sorted(measured)
    if width in measured or len(widths) == 1:
        return measured.get(width, measured[widths[0]])
    if width < widths[0]:
        return measured[widths[0]]
    above = next((place for place, w in enumerate(widths) if w > width), len(widths) - 1)
    low, high = widths[above - 1], widths[above]
    slope = (measured[high] - measured[low]) / (high - low)
    found = measured[low] + slope * (width - low)
    return found if width < high else max(found, measured[high])
