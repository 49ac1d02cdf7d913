"""The demo: one prompt continued by the model's own `generate` and by selfspec, and their timing.

Figures are medians of interleaved runs after a warm-up, on the wall clock of whole calls.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from pydantic import Field
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from selfspec import DEMO_MODEL
from selfspec.apps.chat_templates import encode_turns, first_turn
from selfspec.apps.display.divergence import Divergence, first_divergence
from selfspec.apps.display.plots import read_exits
from selfspec.config import DraftConfig, JsonObject, Options, StrictConfig
from selfspec.heads import head_class
from selfspec.model import SelfSpecModel
from selfspec.sampling import COUPLED
from selfspec.sampling.coupled_noise import Noise
from selfspec.schedule.stats import Stats

WARM_UP_TOKENS = 8

Domain = Literal["prose", "code", "maths", "chat"]


class DemoPrompt(NamedTuple):
    """The beginning of a text that the demo target was not trained on, or a user's message."""

    domain: Domain
    source: str
    text: str


def load_prompts(domain: Domain | None = None) -> list[DemoPrompt]:
    """The prompts in the package, of one domain or of all."""
    entries = json.loads((DEMO_MODEL.parent / "prompts.json").read_text(encoding="utf-8"))
    prompts = [DemoPrompt(**entry) for entry in entries]
    return [prompt for prompt in prompts if domain in (None, prompt.domain)]


class DemoOptions(StrictConfig):
    """Settings of a demo."""

    draft: DraftConfig = DraftConfig()
    max_new_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=0.0, ge=0)  # 0 decodes greedily
    no_repeat_ngram_size: int = Field(default=0, ge=0)  # of no such n-gram twice; 0 allows it
    seed: int = 0
    repeats: int = Field(default=3, ge=1)  # timed runs of each method

    @property
    def coupled(self) -> bool:
        """Whether a seed gives the same tokens with and without drafts."""
        return self.temperature > 0 and self.draft.rule == COUPLED

    @property
    def generation(self) -> Options:
        """Options of transformers' `generate`, the same for both methods."""
        options: dict[str, object] = {"do_sample": self.temperature > 0}
        if self.temperature > 0:  # from the whole distribution, whatever the checkpoint asks for
            options |= {"temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        if self.no_repeat_ngram_size:
            options["no_repeat_ngram_size"] = self.no_repeat_ngram_size
        return options


class Run(NamedTuple):
    """One timed call: its tokens, its wall time, and the stats if selfspec generated."""

    tokens: list[int]
    seconds: float
    stats: Stats | None = None

    @property
    def rate(self) -> float:
        """Tokens per second of the whole call."""
        return len(self.tokens) / self.seconds


class CoupledChoice(LogitsProcessor):
    """Adds the noise of `rule="coupled"`, so that the model's greedy `generate` samples by it.

    `width` is the number of tokens of the prompt.
    """

    def __init__(self, temperature: float, width: int, device: torch.device, seed: int):
        self.warper = TemperatureLogitsWarper(temperature)
        self.noise = Noise([width], device, torch.Generator(device).manual_seed(seed))
        self.length = width  # tokens before the first noise that is kept

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `[1, vocab]`, the largest of which is the sampled token."""
        length, vocab = input_ids.shape[1], scores.shape[1]
        # The noise of positions that were skipped is drawn, too: what follows depends on it.
        noise = self.noise.ahead([0], {0: self.length}, length - self.length + 1, vocab)[:, -1]
        self.length = length
        return self.warper(input_ids, scores.float()) + noise  # pyright: ignore


class Comparison:
    """Continues one prompt with the model's own `generate` or with selfspec's.

    The prompt is text, its tokens `[1, width]`, or with `chat` a message for the chat template.
    """

    def __init__(
        self,
        spec: SelfSpecModel,
        tokenizer: PreTrainedTokenizerBase,
        prompt: str | Tensor,
        options: DemoOptions,
        chat: bool = False,
    ):
        self.spec, self.tokenizer, self.options = spec, tokenizer, options
        ids = _encoded(tokenizer, prompt, chat) if isinstance(prompt, str) else prompt
        self.prompt = prompt if isinstance(prompt, str) else str(tokenizer.decode(ids[0]))
        ids = ids.to(spec.decoder.device)
        self.inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    @property
    def comparable(self) -> bool:
        """Whether both methods generate the same tokens, but for rounding."""
        return not self.options.temperature or self.options.coupled

    @property
    def exact(self) -> bool:
        """Whether both methods must generate the same tokens.

        Passes of different width round differently. In float32 that is too little to change a
        choice, in half precision it is not.
        """
        wide = self.spec.decoder.dtype in (torch.float32, torch.float64)
        return wide and self.comparable

    @property
    def own_options(self) -> Options:
        """Options with which the model's own `generate` chooses as selfspec's does."""
        options = self.options
        if not options.coupled:
            return options.generation
        ids = self.inputs["input_ids"]
        choice = CoupledChoice(options.temperature, ids.shape[1], ids.device, options.seed)
        greedy = options.model_copy(update={"temperature": 0.0}).generation
        return {**greedy, "logits_processor": LogitsProcessorList([choice])}

    def plain(
        self,
        max_new_tokens: int | None = None,
        streamer: BaseStreamer | None = None,
        stop: StoppingCriteria | None = None,
    ) -> Run:
        """The model's own `generate`."""
        generate: Any = self.spec.model.generate
        with torch.random.fork_rng():
            torch.manual_seed(self.options.seed)
            write = partial(generate, **self.own_options, streamer=streamer)
            return self._timed(write, max_new_tokens, stop)

    def speculative(
        self,
        draft: DraftConfig | None,
        max_new_tokens: int | None = None,
        streamer: BaseStreamer | None = None,
        stop: StoppingCriteria | None = None,
    ) -> Run:
        """Selfspec's `generate`; without a draft, with its default."""
        more: Options = {**self.options.generation, "streamer": streamer}
        generator = torch.Generator(self.spec.decoder.device).manual_seed(self.options.seed)
        write = partial(self.spec.generate, draft=draft, generator=generator, **more)
        return self._timed(write, max_new_tokens, stop)._replace(stats=self.spec.last_stats)

    def _timed(
        self,
        write: Callable[..., Any],
        max_new_tokens: int | None,
        stop: StoppingCriteria | None,
    ) -> Run:
        count = max_new_tokens or self.options.max_new_tokens
        criteria = StoppingCriteriaList([] if stop is None else [stop])
        start = time.perf_counter()
        output = write(**self.inputs, max_new_tokens=count, stopping_criteria=criteria)
        tokens = output[0, self.inputs["input_ids"].shape[1] :].tolist()  # waits for the device
        return Run(tokens, time.perf_counter() - start)

    def divergence(self, plain: list[int], other: list[int]) -> Divergence | None:
        """The first difference of two continuations of the prompt; `None` if they are equal."""
        ids, mask = self.inputs.values()
        return first_divergence(self.spec, ids, mask, self.own_options, plain, other)


def _encoded(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool) -> Tensor:
    if not chat:
        return tokenizer(prompt, return_tensors="pt")["input_ids"]  # pyright: ignore
    return torch.tensor([encode_turns(tokenizer, first_turn(prompt, None))])


RunT = TypeVar("RunT")


def interleaved(methods: Mapping[str, Callable[[], RunT]], repeats: int) -> dict[str, list[RunT]]:
    """Run each method `repeats` times in turn.

    Every second turn is in reverse order, so that drift affects all alike.
    """
    runs: dict[str, list[RunT]] = {name: [] for name in methods}
    for turn in range(repeats):
        for name in list(methods)[:: -1 if turn % 2 else 1]:
            runs[name].append(methods[name]())
    return runs


def rate(runs: Sequence[Run]) -> float:
    """Median tokens per second."""
    return median(run.rate for run in runs)


def ratio(runs: Sequence[Run], base: Sequence[Run]) -> float:
    """Ratio of the median speeds."""
    return rate(runs) / rate(base)


class ExitAgreement(NamedTuple):
    """How often an exit head predicts the target's own token.

    It is measured on given text, so that loops of greedy decoding do not raise it.
    """

    head: str  # its kind
    exit_layer: int  # layers below the exit
    share: float  # of the tokens of the texts


def exit_agreements(
    spec: SelfSpecModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> list[ExitAgreement]:
    """Compare every head of `spec`, and the head that needs no fitting at the same exits."""
    if not texts:
        return []
    decoder, heads = spec.decoder, list(spec.engine.heads)
    shared, fitted = head_class("shared"), {(h.kind, h.exit_layer) for h in heads}
    exits = sorted({head.exit_layer for head in heads} - {0}) or [max(1, decoder.depth // 4)]
    heads += [shared.build(decoder, e) for e in exits if (shared.kind, e) not in fitted]
    agrees: list[Tensor] = []
    for text in texts:
        tokens = tokenizer(text, return_tensors="pt").input_ids[:, : decoder.max_positions]
        with torch.inference_mode():
            ids = read_exits(decoder, tokens.to(decoder.device), heads)[0]
        agrees.append(ids[:-1] == ids[-1])
    shares = torch.cat(agrees, dim=1).double().mean(1).tolist()
    found = [
        ExitAgreement(head.kind, head.exit_layer, share)
        for head, share in zip(heads, shares, strict=True)
    ]
    return sorted(found, key=lambda each: -each.share)


def verdict(writer: Comparison, count: int, divergence: Divergence | None) -> str:
    """The comparison of both outputs in a line; the model's own has `count` tokens."""
    if not writer.comparable:
        return "sampled text differs from run to run; its distribution is the target's own"
    if divergence is None:
        return f"both outputs are equal, all {count} tokens"
    wrote = f"the outputs differ at {divergence.describe(writer.tokenizer)}"
    if writer.exact:
        return f"NOT EQUAL: {wrote}"
    return f"{wrote}; half precision rounds passes of different width differently, float32 is exact"


@dataclass(frozen=True)
class DemoResult:
    """Results of a demo."""

    prompt: str
    text: str  # the continuation
    equal: bool | None  # whether both wrote the same tokens; `None` if sampled, unless coupled
    exact: bool  # whether they must
    divergence: Divergence | None  # their first difference
    plain: list[Run]  # runs of the model's own `generate`
    undrafted: list[Run]  # runs of selfspec's without drafts, on the same kernels
    speculative: list[Run]  # runs of selfspec's with drafts

    @property
    def stats(self) -> Stats:
        """Counters and clocks of the median speculative run."""
        ordered = sorted(self.speculative, key=lambda run: run.rate)
        stats = ordered[len(ordered) // 2].stats
        assert stats is not None
        return stats

    def figures(self) -> dict[str, float]:
        """The figures of the table."""
        split = {f"time_{part}": share for part, share in self.stats.time_split.items()}
        return {
            "plain_tokens_per_second": rate(self.plain),
            "tokens_per_second": rate(self.speculative),
            "speedup": ratio(self.speculative, self.plain),
            "drafting_speedup": ratio(self.speculative, self.undrafted),
            "acceptance_rate": self.stats.acceptance_rate,
            "first_draft_acceptance": next(iter(self.stats.acceptance_by_position), 0.0),
            "mean_accepted_length": self.stats.mean_accepted_length,
            **split,
        }

    def to_dict(self) -> JsonObject:
        """Everything, as plain values."""
        return {
            "prompt": self.prompt,
            "text": self.text,
            "equal": self.equal,
            "divergence": self.divergence and self.divergence._asdict(),
            **self.figures(),
            "repeats": len(self.plain),
            "stats": self.stats.to_dict(),
        }


def run_demo(
    writer: Comparison,
    streamer: BaseStreamer | None = None,
    while_timing: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> DemoResult:
    """Generate with self-speculation, streamed; then time all methods and compare the outputs.

    The methods are the model's own `generate`, and selfspec's without and with drafts. They are
    timed in the context that `while_timing` makes.
    """
    options = writer.options
    undrafted = DraftConfig(drafter="none", rule=options.draft.rule)
    writer.plain(WARM_UP_TOKENS)
    writer.speculative(options.draft, WARM_UP_TOKENS)
    streamed = writer.speculative(options.draft, streamer=streamer)
    methods = {
        "plain": writer.plain,
        "undrafted": lambda: writer.speculative(undrafted),
        "speculative": lambda: writer.speculative(options.draft),
    }
    with while_timing():
        runs = interleaved(methods, options.repeats)
    divergence = None
    if writer.comparable:
        divergence = writer.divergence(runs["plain"][0].tokens, streamed.tokens)
    return DemoResult(
        prompt=writer.prompt,
        text=str(writer.tokenizer.decode(streamed.tokens, skip_special_tokens=True)),
        equal=divergence is None if writer.comparable else None,
        exact=writer.exact,
        divergence=divergence,
        **runs,
    )
