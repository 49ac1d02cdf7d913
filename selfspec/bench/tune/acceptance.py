"""How often drafts would be kept, teacher-forced over texts that the target itself has written.

Legend: n = tokens written behind a prompt; a draft of depth d is the d-th of its round, from 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfspec.bench.tune.config import TuneConfig
from selfspec.bench.tune.texts import in_batches, padded
from selfspec.decoder import Decoder
from selfspec.heads import ExitHead
from selfspec.heads.teacher_forcing import draft_states, target_states
from selfspec.model import SelfSpecModel
from selfspec.schedule.profile import ExitRates

_ROWS = 8  # prompts that are written on at once


class Written(NamedTuple):
    """A prompt and what the target wrote behind it.

    Attributes:
        tokens: all of it.
        start: tokens of the prompt.
    """

    tokens: list[int]
    start: int


def write_on(spec: SelfSpecModel, prompts: Sequence[Tensor], config: TuneConfig) -> list[Written]:
    """What the target makes of prompts by plain decoding, greedily or sampled."""
    written: list[Written] = []
    source = torch.Generator(spec.engine.decoder.device).manual_seed(config.seed)
    for batch in in_batches(prompts, min(_ROWS, len(prompts))):
        tokens, mask = padded(batch, spec.engine.decoder.device)
        options = generate_options(config)
        spec.generate(tokens, attention_mask=mask, draft="none", generator=source, **options)
        assert spec.last_trace is not None
        for row, prompt in enumerate(batch):
            more = spec.last_trace.tokens(row)
            written.append(Written([*prompt.tolist(), *more], len(prompt)))
    return written[: len(prompts)]


def generate_options(config: TuneConfig) -> dict[str, Any]:
    """Options of transformers' `generate`: from the whole distribution where it is sampled."""
    options: dict[str, Any] = {"do_sample": False}
    if config.temperature:
        whole = {"top_k": 0, "top_p": 1.0}
        options = {"do_sample": True, "temperature": config.temperature, **whole}
    return {"max_new_tokens": config.new_tokens, "pad_token_id": 0, **options}


@torch.no_grad()
def measure_rates(
    decoder: Decoder, head: ExitHead, texts: Sequence[Written], config: TuneConfig
) -> ExitRates:
    """How often drafts of a head are kept, by depth, where those before them were.

    A round may begin at any token of a text. Its d-th draft is reached if the ones before it are
    what the target wrote, so the rates account for tokens that are hard, or easy, one after the
    other, as rates by depth alone would not.

    Args:
        decoder: the target.
        head: what drafts.
        texts: the target's own.
        config: depths and temperature.
    """
    depths = min(config.depths, max(len(text.tokens) - text.start for text in texts))
    reached: list[list[Tensor]] = [[], []]
    for text in texts:
        if len(text.tokens) - text.start >= depths:
            for found, kept in zip(
                reached, _kept(decoder, head, text, depths, config.temperature or 1.0), strict=True
            ):
                found.append(reach(kept))
    agreement, alpha = (conditional(torch.cat(found, dim=1)) for found in reached)
    return ExitRates(kind=head.kind, exit_layer=head.exit_layer, agreement=agreement, alpha=alpha)


def _kept(
    decoder: Decoder, head: ExitHead, text: Written, depths: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """`[depths, n]` each: whether the top token is the target's, and Σ min(p, q)."""
    tokens = torch.tensor([text.tokens], device=decoder.device)
    reading = target_states(decoder, tokens, None, head.input_layers)
    behind = slice(text.start - 1, len(text.tokens) - 1)  # where the written tokens are said
    target = decoder.unembed(reading.normed[:, behind])[0].float()
    target_probs = (target / temperature).softmax(-1)
    agreed: list[Tensor] = []
    overlap: list[Tensor] = []
    unrolled = 1 if decoder.counts_keys else depths
    for state in draft_states(decoder, head, reading, unrolled):
        logits = head.expand_logits(head.logits(decoder, state[:, behind]), decoder)[0].float()
        agreed.append((logits.argmax(-1) == target.argmax(-1)).double())
        probs = (logits / temperature).softmax(-1)
        overlap.append(torch.minimum(probs, target_probs).sum(-1).double())
    # A head that is not unrolled says the same at every depth.
    repeat = depths // len(agreed)
    return torch.stack(agreed * repeat), torch.stack(overlap * repeat)


def reach(kept: Tensor) -> Tensor:
    """`[depths, starts]` how likely each draft of a round stands, from each token it may begin at.

    Args:
        kept: `[depths, n]` how likely the draft of each token is kept at each depth.
    """
    depths, count = kept.shape
    starts = count - depths + 1
    along = [kept[depth, depth : depth + starts] for depth in range(depths)]
    return torch.stack(along).cumprod(0)


def conditional(reached: Tensor) -> list[float]:
    """By depth, how likely a draft stands where those before it do, of `[depths, starts]`."""
    means = [1.0, *reached.mean(1).tolist()]
    return [after / before if before else 0.0 for before, after in itertools.pairwise(means)]
