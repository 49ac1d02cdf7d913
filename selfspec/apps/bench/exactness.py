"""Tests that a draft does not change the output.

Greedy outputs must be equal token for token, unless rounding explains a difference
(`first_divergence`). The distribution test draws short continuations from few candidates, so that
the exact probability of every continuation under plain decoding can be computed, and compares
counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.apps.bench.config import MethodConfig
from selfspec.apps.bench.prompts import Batch
from selfspec.apps.bench.run import make_method
from selfspec.apps.chat_templates import stop_ids
from selfspec.apps.display.divergence import Divergence, first_divergence, next_scores
from selfspec.config import DraftConfig, JsonObject, Options
from selfspec.model import SelfSpecModel
from selfspec.schedule.stats import Stats

_ROWS = 64  # continuations that are sampled or scored in one call
# In half precision, passes of different width or kernels may swap two nearly equal candidates.
# Continuations with a candidate that lies within so many roundings of one that is left out do not
# count, and this share of all may be impossible under plain decoding.
_ROUNDINGS, _SWAPPED = 4, 0.05


class Sampling(NamedTuple):
    """Settings of the distribution test.

    Attributes:
        samples: continuations per prompt.
        candidates: candidates of each step (top-k).
        horizon: tokens of a continuation.
        temperature: sampling temperature.
        level: probability that a correct drafter fails, over all prompts.
    """

    samples: int = 2048
    candidates: int = 3
    horizon: int = 4
    temperature: float = 1.0
    level: float = 1e-3

    def options(self, stops: Sequence[int]) -> Options:
        """Options of `generate`; no token ends a continuation early."""
        options = {"do_sample": True, "temperature": self.temperature, "top_k": self.candidates}
        endless = {"suppress_tokens": list(stops)} if stops else {}
        return {**options, "top_p": 1.0, "pad_token_id": 0, **endless}


@dataclass(frozen=True)
class CheckResult:
    """Results of a check.

    Attributes:
        texts: greedy outputs compared.
        divergences: where they diverge from the model's own, by number of the prompt.
        wide: whether the weights are float32 or wider.
        p_values: the least p-value of each prompt, corrected for the number of tests; empty if
            nothing was sampled.
        level: the test fails if a p-value is below this over the number of prompts.
        acceptance_rate: acceptance rate of the sampled drafts.
    """

    texts: int
    divergences: dict[int, Divergence]
    wide: bool
    p_values: list[float]
    level: float
    acceptance_rate: float | None

    @property
    def equal(self) -> bool:
        """Whether greedy outputs are equal, up to rounding."""
        return not self.wide or all(found.rounding for found in self.divergences.values())

    @property
    def distributed(self) -> bool | None:
        """Whether samples follow the target's distribution; `None` if there are none."""
        if not self.p_values:
            return None
        return min(self.p_values) >= self.level / len(self.p_values)

    @property
    def passed(self) -> bool:
        """Whether the check passed."""
        return self.equal and self.distributed is not False

    def to_dict(self) -> JsonObject:
        """Everything, as plain values."""
        divergences = {str(number): each._asdict() for number, each in self.divergences.items()}
        verdicts = {"equal": self.equal, "distributed": self.distributed, "passed": self.passed}
        return {**asdict(self), "divergences": divergences, **verdicts}


def check_exactness(
    spec: SelfSpecModel,
    draft: DraftConfig,
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> CheckResult:
    """Compare the output with a draft to that of the model's own `generate`.

    Args:
        spec: the target, with its heads.
        draft: how to draft.
        prompts: `[1, width]` each.
        max_new_tokens: tokens of a greedy output.
        sampling: settings of the distribution test; `None` skips it.
        seed: seeds the samples.

    Raises:
        ValueError: the model cannot make such drafts.
    """
    divergences = _greedy(spec, draft, prompts, max_new_tokens)
    found = [
        _distribution(spec, draft, prompt[:, :16], sampling, seed + number)
        for number, prompt in enumerate(prompts)
        if sampling is not None
    ]
    rates = [rate for _, rate in found]
    return CheckResult(
        texts=len(prompts),
        divergences=divergences,
        wide=_is_wide(spec),
        p_values=[p for p, _ in found],
        level=sampling.level if sampling else 0.0,
        acceptance_rate=sum(rates) / len(rates) if rates else None,
    )


def _is_wide(spec: SelfSpecModel) -> bool:
    return spec.decoder.dtype.itemsize >= 4


def _greedy(
    spec: SelfSpecModel, draft: DraftConfig, prompts: Sequence[Tensor], max_new_tokens: int
) -> dict[int, Divergence]:
    options = {"do_sample": False, "max_new_tokens": max_new_tokens, "pad_token_id": 0}
    plain = make_method(spec, MethodConfig(name="plain", peer="plain"))
    ours = make_method(spec, MethodConfig(name="draft", draft=draft))
    found: dict[int, Divergence] = {}
    for number, prompt in enumerate(prompts):
        batch = Batch.of(prompt)
        texts = [write(batch, options, 0).texts[0] for write in (plain, ours)]
        divergence = first_divergence(spec, *batch, options, *texts)
        if divergence is not None:
            found[number] = divergence
    return found


def _distribution(
    spec: SelfSpecModel, draft: DraftConfig, prompt: Tensor, sampling: Sampling, seed: int
) -> tuple[float, float]:
    """The least p-value times the number of tests, and the acceptance rate."""
    options = sampling.options(stop_ids(spec))
    wide = _is_wide(spec)
    margin = 0.0 if wide else _ROUNDINGS * torch.finfo(spec.decoder.dtype).eps
    expected = exact_probabilities(spec, prompt, options, sampling.horizon, margin)
    drawn, rate = _draws(spec, draft, prompt, options, sampling, seed)
    p_values = [
        # For every length: faults of the first drafts show best in few cells.
        _p_value(drawn, expected, length, 0.0 if wide else _SWAPPED)
        for length in range(1, sampling.horizon + 1)
    ]
    return min(1.0, min(p_values) * len(p_values)), rate


def exact_probabilities(
    spec: SelfSpecModel, prompt: Tensor, options: Options, horizon: int, margin: float = 0.0
) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of `horizon` tokens under plain decoding.

    The options of `generate` have a `top_k` that leaves few candidates. Continuations are left out
    if one of their candidates is nearer than `margin`, a share of the best score, to one beyond
    `top_k`.
    """
    most = options["top_k"]
    wider = {**options, "top_k": most + 1}
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(horizon):
        words = list(joint)
        if not words:
            break
        behind = torch.tensor(words, dtype=torch.long, device=prompt.device).view(len(words), -1)
        texts = torch.cat([prompt.expand(len(words), -1), behind], dim=1)
        parts = texts.split(_ROWS)
        scores = [next_scores(spec, part, torch.ones_like(part), wider) for part in parts]
        probs, sure = _candidates(torch.cat(scores).double(), most, margin)
        joint = {
            (*word, int(token)): joint[word] * float(row[token])
            for word, row, safe in zip(words, probs, sure, strict=True)
            for token in safe.nonzero()[:, 0]
        }
    return joint


def _candidates(scores: Tensor, most: int, margin: float) -> tuple[Tensor, Tensor]:
    """`[rows, vocab]` probabilities of the best `most` tokens, and which of these are sure to be.

    Those are sure that are further from the tokens left out than `margin`, a share of the best.
    """
    best = scores.topk(min(most + 1, scores.shape[-1])).values
    kept = scores >= best[:, :most].min(-1, keepdim=True).values
    beyond = scores.masked_fill(kept, -torch.inf).amax(-1, keepdim=True)
    sure = kept & scores.isfinite() & (scores - beyond >= margin * best[:, :1].abs())
    return scores.masked_fill(~kept, -torch.inf).softmax(-1), sure


def _draws(
    spec: SelfSpecModel,
    draft: DraftConfig,
    prompt: Tensor,
    options: Options,
    sampling: Sampling,
    seed: int,
) -> tuple[list[tuple[int, ...]], float]:
    """Continuations sampled with drafts, and their acceptance rate."""
    generator = torch.Generator(prompt.device).manual_seed(seed)
    drawn: list[tuple[int, ...]] = []
    total = Stats()
    while len(drawn) < sampling.samples:
        texts = spec.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=sampling.horizon,
            num_return_sequences=_ROWS,
            generator=generator,
            draft=draft,
            **options,
        )
        assert isinstance(texts, Tensor) and spec.last_stats is not None
        drawn += map(tuple, texts[:, prompt.shape[1] :].tolist())
        total += spec.last_stats
    return drawn, total.acceptance_rate


def _p_value(
    drawn: Sequence[tuple[int, ...]],
    joint: dict[tuple[int, ...], float],
    length: int,
    swapped: float,
) -> float:
    """Chi-square test of the first `length` tokens; rare continuations share one cell.

    Up to the share `swapped` of continuations may be impossible under plain decoding, beside those
    that `joint` leaves out.
    """
    probs: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for word, chance in joint.items():
        probs[word[:length]] += chance
    counts = Counter(word[:length] for word in drawn if word[:length] in probs)
    total, samples, found = sum(probs.values()), len(drawn), counts.total()
    left_out = max(0.0, 1 - total)
    luck = 4 * (left_out * total * samples) ** 0.5
    if samples - found > (left_out + swapped + 1e-9) * samples + luck:
        return 0.0
    cells = [(float(counts[word]), chance / total * found) for word, chance in probs.items()]
    rare = [cell for cell in cells if cell[1] < 5]
    together = (sum(count for count, _ in rare), sum(mean for _, mean in rare))
    cells = [together, *(cell for cell in cells if cell[1] >= 5)]
    return chi_square([cell for cell in cells if cell[1] > 0])


def chi_square(cells: Sequence[tuple[float, float]]) -> float:
    """The p-value of Pearson's chi-square test of `cells`, the count and expectation of each."""
    if len(cells) < 2:
        return 1.0
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    half = torch.tensor([len(cells) - 1, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(*half))
