"""One prompt, written on by the model's own `generate` and by selfspec's, with the same options."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from selfspec import DEMO_MODEL
from selfspec.config import DraftConfig, StrictConfig
from selfspec.model import SelfSpecModel
from selfspec.schedule.stats import Stats

WARM_UP_TOKENS = 8


Domain = Literal["prose", "code", "maths"]


class DemoPrompt(NamedTuple):
    """The beginning of a text that the demo target has never seen."""

    domain: Domain
    source: str
    text: str


def load_prompts(domain: Domain | None = None) -> list[DemoPrompt]:
    """The prompts in the package, of one domain or of all."""
    entries = json.loads((DEMO_MODEL.parent / "prompts.json").read_text(encoding="utf-8"))
    prompts = [DemoPrompt(**entry) for entry in entries]
    return [prompt for prompt in prompts if domain in (None, prompt.domain)]


class DemoOptions(StrictConfig):
    """What a demo writes, and how often it is timed.

    Attributes:
        draft: how self-speculation drafts.
        max_new_tokens: tokens to write.
        temperature: 0 decodes greedily.
        no_repeat_ngram_size: no n-gram of this size is written twice; 0 allows it.
        seed: seeds sampling.
        repeats: timed runs of each way.
    """

    draft: DraftConfig = DraftConfig()
    max_new_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    no_repeat_ngram_size: int = Field(default=0, ge=0)
    seed: int = 0
    repeats: int = Field(default=3, ge=1)

    @property
    def generation(self) -> dict[str, Any]:
        """The options of transformers' `generate`, the same for every way."""
        options: dict[str, Any] = {"do_sample": self.temperature > 0}
        if self.temperature > 0:
            options["temperature"] = self.temperature
        if self.no_repeat_ngram_size:
            options["no_repeat_ngram_size"] = self.no_repeat_ngram_size
        return options


class Run(NamedTuple):
    """One timed call: the tokens it wrote, its wall time, and the counters if it was ours."""

    tokens: list[int]
    seconds: float
    stats: Stats | None = None

    @property
    def rate(self) -> float:
        """Tokens per second of the whole call."""
        return len(self.tokens) / self.seconds


class Writer:
    """Writes one prompt on, by the model's own `generate` or by selfspec's.

    Args:
        spec: the target.
        tokenizer: its tokenizer.
        prompt: the text to go on from.
        options: the same for both.
    """

    def __init__(
        self,
        spec: SelfSpecModel,
        tokenizer: PreTrainedTokenizerBase,
        prompt: str,
        options: DemoOptions,
    ):
        self.spec, self.tokenizer, self.options = spec, tokenizer, options
        self.prompt = prompt
        inputs = tokenizer(prompt, return_tensors="pt").to(spec.engine.decoder.device)
        self.inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}

    @property
    def exact(self) -> bool:
        """Whether both ways must write the same tokens.

        A pass over one token and a pass over several round differently; in float32 that is too
        little to change a greedy choice, in half precision it is not.
        """
        wide = self.spec.engine.decoder.dtype in (torch.float32, torch.float64)
        return wide and not self.options.temperature

    def plain(
        self,
        max_new_tokens: int | None = None,
        streamer: BaseStreamer | None = None,
        stop: StoppingCriteria | None = None,
    ) -> Run:
        """The model's own `generate`."""

        def write(options: dict[str, Any]) -> Any:
            with torch.random.fork_rng():
                torch.manual_seed(self.options.seed)
                return self.spec.model.generate(  # pyright: ignore
                    **self.inputs, **options, streamer=streamer
                )

        return self._timed(write, max_new_tokens, stop)

    def speculative(
        self,
        draft: DraftConfig,
        max_new_tokens: int | None = None,
        streamer: BaseStreamer | None = None,
        stop: StoppingCriteria | None = None,
    ) -> Run:
        """Selfspec's `generate`."""
        generator = torch.Generator(self.spec.engine.decoder.device).manual_seed(self.options.seed)

        def write(options: dict[str, Any]) -> Any:
            more = {"draft": draft, "generator": generator, "streamer": streamer}
            return self.spec.generate(**self.inputs, **options, **more)

        return self._timed(write, max_new_tokens, stop)._replace(stats=self.spec.last_stats)

    def _timed(
        self,
        write: Callable[[dict[str, Any]], Tensor],
        max_new_tokens: int | None,
        stop: StoppingCriteria | None,
    ) -> Run:
        count = max_new_tokens or self.options.max_new_tokens
        criteria = StoppingCriteriaList([] if stop is None else [stop])
        options = {"max_new_tokens": count, "stopping_criteria": criteria}
        start = time.perf_counter()
        output = write({**self.options.generation, **options})
        tokens = output[0, self.inputs["input_ids"].shape[1] :].tolist()  # waits for the device
        return Run(tokens, time.perf_counter() - start)
