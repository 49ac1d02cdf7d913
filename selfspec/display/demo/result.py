"""Plain decoding and self-speculation side by side."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers.generation.streamers import BaseStreamer

from selfspec.display.demo.exits import ExitAgreement, exit_agreements
from selfspec.display.demo.timing import interleaved, rate, ratio
from selfspec.display.demo.writer import WARM_UP_TOKENS, Run, Writer, load_prompts
from selfspec.schedule.stats import Stats


class Divergence(NamedTuple):
    """Where two texts part, and by how little.

    Attributes:
        position: index of the first token that differs.
        plain: what the model's own `generate` wrote there.
        speculative: what selfspec wrote there.
        margin: the difference of their two logits in one full pass.
    """

    position: int
    plain: str
    speculative: str
    margin: float


def first_divergence(writer: Writer, plain: list[int], other: list[int]) -> Divergence | None:
    """The first difference of two continuations of the writer's prompt, `None` if there is none."""
    if plain == other:
        return None
    pairs = zip(plain, other, strict=False)
    shorter = min(len(plain), len(other))
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    prompt = writer.inputs["input_ids"]
    prefix = torch.cat([prompt, prompt.new_tensor([plain[:position]])], dim=1)
    with torch.inference_mode():
        logits = writer.spec.model(prefix).logits[0, -1].float()
    # Behind the end of the shorter text there is nothing to compare.
    tokens = [text[position] if position < len(text) else None for text in (plain, other)]
    words = ["" if token is None else str(writer.tokenizer.decode([token])) for token in tokens]
    a, b = (float("-inf") if token is None else float(logits[token]) for token in tokens)
    return Divergence(position, *words, margin=abs(a - b))


def verdict(count: int, equal: bool | None, exact: bool, divergence: Divergence | None) -> str:
    """What two texts say about exactness, in a line.

    Args:
        count: tokens of the model's own text.
        equal: whether the texts are equal; `None` for sampled ones.
        exact: whether they had to be.
        divergence: where they part, if they do.
    """
    if equal is None:
        return "sampled text differs from run to run; its distribution is the target's own"
    if divergence is None:
        return f"both texts are equal, all {count} tokens"
    wrote = (
        f"the texts part at token {divergence.position}: plain {divergence.plain!r}, "
        f"self-speculation {divergence.speculative!r}, their logits {divergence.margin:.4f} apart"
    )
    if exact:
        return f"NOT EQUAL: {wrote}"
    return f"{wrote}; half precision rounds passes of different width differently, float32 is exact"


@dataclass(frozen=True)
class DemoResult:
    """What a demo found.

    Attributes:
        text: the continuation.
        equal: whether both ways wrote the same tokens; `None` for sampled text, where only the
            distribution is the same.
        exact: whether they had to.
        divergence: where they part, if they do.
        plain: runs of the model's own `generate`.
        speculative: runs of selfspec's.
        exits: how well every exit guesses the passages in the package, the best first.
    """

    text: str
    equal: bool | None
    exact: bool
    divergence: Divergence | None
    plain: list[Run]
    speculative: list[Run]
    exits: list[ExitAgreement]

    @property
    def stats(self) -> Stats:
        """Counters and clocks of the median speculative run."""
        ordered = sorted(self.speculative, key=lambda run: run.rate)
        stats = ordered[len(ordered) // 2].stats
        assert stats is not None
        return stats

    def figures(self) -> dict[str, float]:
        """What the table shows."""
        split = {f"time_{part}": share for part, share in self.stats.time_split.items()}
        return {
            "plain_tokens_per_second": rate(self.plain),
            "tokens_per_second": rate(self.speculative),
            "speedup": ratio(self.speculative, self.plain),
            "acceptance_rate": self.stats.acceptance_rate,
            "first_draft_acceptance": next(iter(self.stats.acceptance_by_position), 0.0),
            "mean_accepted_length": self.stats.mean_accepted_length,
            **split,
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "text": self.text,
            "equal": self.equal,
            "divergence": self.divergence and self.divergence._asdict(),
            **self.figures(),
            "exits": [each._asdict() for each in self.exits],
            "repeats": len(self.plain),
            "stats": self.stats.to_dict(),
        }


def run_demo(
    writer: Writer,
    streamer: BaseStreamer | None = None,
    while_timing: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> DemoResult:
    """Write with self-speculation, streamed; then time both ways and compare what they wrote.

    Args:
        writer: the prompt and the options.
        streamer: shows the text.
        while_timing: entered while both ways are timed, which shows nothing by itself.
    """
    options = writer.options
    writer.plain(WARM_UP_TOKENS)
    writer.speculative(options.draft, WARM_UP_TOKENS)
    streamed = writer.speculative(options.draft, streamer=streamer)
    ways = {"plain": writer.plain, "speculative": lambda: writer.speculative(options.draft)}
    with while_timing():
        runs = interleaved(ways, options.repeats)
    divergence = None
    if not options.temperature:
        divergence = first_divergence(writer, runs["plain"][0].tokens, streamed.tokens)
    return DemoResult(
        text=str(writer.tokenizer.decode(streamed.tokens, skip_special_tokens=True)),
        equal=None if options.temperature else divergence is None,
        exact=writer.exact,
        divergence=divergence,
        plain=runs["plain"],
        speculative=runs["speculative"],
        exits=exit_agreements(writer.spec, writer.tokenizer, [p.text for p in load_prompts()]),
    )
