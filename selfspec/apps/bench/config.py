"""Config of a benchmark: target, prompt sets, decoding modes, methods."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator
from typing_extensions import Self

from selfspec.config import (
    JsonObject,
    Kernels,
    KVCacheDtype,
    Options,
    StrictConfig,
    load_config,
    unknown_name,
)
from selfspec.drafters import CheckedDraft, EarlyExit, ExitTree

Reader = Literal["text", "random", "chat", "gsm8k", "humaneval", "mbpp", "mt_bench", "spec_bench"]
Peer = Literal[
    "plain",
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
    "assistant_model",
    "use_mtp",
    "static_cache",
    "continuous_batching",
]

Acceptance = Annotated[float, Field(gt=0, lt=1)]
_ACCEPTANCE = (0.7,)

PLAIN = "plain"
_ASSISTANT = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
)
# Options of each peer. The first is the option of transformers' `generate` that selects it, if any.
PEER_OPTIONS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "assistant_early_exit": ("assistant_early_exit", *_ASSISTANT),
    "prompt_lookup_num_tokens": ("prompt_lookup_num_tokens", "max_matching_ngram_size"),
    "assistant_model": ("assistant_model", *_ASSISTANT),
    "use_mtp": ("use_mtp",),
    "static_cache": (),
    "continuous_batching": (),
}


class PromptSetConfig(StrictConfig):
    """One set of prompts.

    Attributes:
        name: its name in reports.
        reader: how its file is read. `random` reads none and draws unpredictable tokens. `chat`
            reads records with `messages`, put into the tokenizer's chat template.
        path: the file. For `text`, a file or a glob, in which `{stdlib}` is the running Python's
            standard library. `None` takes the sample in the package.
        count: number of prompts, taken at even distances from all there are; 0 takes all questions,
            or a passage of every text.
        prompt_tokens: a length, or the minimum and the maximum. `text` and `random` prompts are cut
            to lengths between the two; questions of other lengths are left out. `None`: 64 to 128
            for `text` and `random`, any length for questions.
        template: how a question is written, with the record's fields in braces; `None` takes the
            reader's own template.
        chat: whether the question is put into the tokenizer's chat template, as the user's turn.
        clean: `prose` makes quotes straight and puts every paragraph on one line.
    """

    name: str
    reader: Reader = "text"
    path: str | None = None
    count: int = Field(default=8, ge=0)
    prompt_tokens: int | tuple[int, int] | None = None
    template: str | None = None
    chat: bool = False
    clean: Literal["none", "prose"] = "none"

    @model_validator(mode="after")
    def _lengths_are_in_order(self) -> Self:
        shortest, longest = self.lengths or (1, 1)
        if not 1 <= shortest <= longest:
            raise ValueError(
                f"prompt_tokens must be a length or [shortest, longest], got {self.prompt_tokens}"
            )
        if self.reader == "spec_bench" and self.path is None:
            raise ValueError("spec_bench is not in the package; give the path of question.jsonl")
        if self.reader in ("text", "random") and (self.chat or self.template):
            raise ValueError("chat and template are for questions; passages of text have neither")
        if self.reader == "chat" and (self.path is None or self.template or self.clean != "none"):
            raise ValueError("chats need the path of a file with messages, which stay as they are")
        if self.reader == "random" and (self.path is not None or not self.count):
            raise ValueError("random prompts are drawn: they need a count, and take no path")
        return self

    @property
    def lengths(self) -> tuple[int, int] | None:
        """The shortest and the longest prompt; `None` where any length will do."""
        if self.prompt_tokens is None:
            return (64, 128) if self.reader in ("text", "random") else None
        if isinstance(self.prompt_tokens, int):
            return self.prompt_tokens, self.prompt_tokens
        return self.prompt_tokens


class MethodConfig(StrictConfig):
    """A method of generation: selfspec with a draft, or a method of transformers (`peer`).

    With neither it is selfspec's `generate` with its default draft, that of the profile if there is
    one.

    Attributes:
        name: its name in reports.
        draft: how selfspec drafts.
        head_options: options of the untrained head of the draft, for benchmarks of a shape.
        acceptance: planted acceptance: if all drafts before it are right, a draft is right with
            this probability, whatever the head predicts. For greedy `early_exit` and `tree`.
        peer: a method of transformers. `plain` is the model's own `generate`, `static_cache` the
            same with a static cache, for which transformers compiles the model on a GPU;
            `continuous_batching` is its `generate_batch`. The others are its own speculation,
            named by the option that enables it.
        options: options of the peer, as transformers names them; `assistant_model` is a folder or
            an id.
        source: where the settings were published.
    """

    name: str
    draft: CheckedDraft | None = None
    head_options: JsonObject = Field(default_factory=dict)
    acceptance: Acceptance | None = None
    peer: Peer | None = None
    options: JsonObject = Field(default_factory=dict)
    source: str = ""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.draft is not None and self.peer is not None:
            raise ValueError(f"method {self.name!r} has a `draft` or a `peer`, not both")
        if self.acceptance is not None and (
            self.draft is None or self.draft.drafter not in (EarlyExit.name, ExitTree.name)
        ):
            raise ValueError(
                f"method {self.name!r} plants acceptance; it needs a `draft` by "
                f"{EarlyExit.name} or {ExitTree.name}"
            )
        known = PEER_OPTIONS[self.peer] if self.peer else ()
        for option in self.options:
            if option not in known:
                raise ValueError(unknown_name(f"option of {self.name!r}", option, known))
        if self.peer == "assistant_model" and "assistant_model" not in self.options:
            raise ValueError(
                f"method {self.name!r} needs options.assistant_model, the folder of a small model"
            )
        return self


class ModeConfig(StrictConfig):
    """A decoding mode, the same for all methods.

    Attributes:
        name: its name in reports.
        temperature: sampling temperature; 0 decodes greedily.
        top_k: sample from so many of the most likely tokens; 0 samples from all.
        top_p: sample from the smallest set of tokens with at least this probability.
        repetition_penalty: as in transformers; 1 is none.
        no_repeat_ngram_size: as in transformers; 0 is none.
        min_new_tokens: as in transformers; 0 is none.
    """

    name: str
    temperature: float = Field(default=0.0, ge=0)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0)
    no_repeat_ngram_size: int = Field(default=0, ge=0)
    min_new_tokens: int = Field(default=0, ge=0)

    @property
    def greedy(self) -> bool:
        """Whether the mode decodes greedily."""
        return self.temperature == 0

    @property
    def generation(self) -> Options:
        """Options of transformers' `generate`, whatever the checkpoint's own say."""
        options: dict[str, object] = {"do_sample": not self.greedy}
        if not self.greedy:
            options |= {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        prefix = {"repetition_penalty", "no_repeat_ngram_size", "min_new_tokens"}
        return {**options, **self.model_dump(include=prefix)}


# Modes that a config may name. Small models repeat themselves under greedy decoding, which favours
# every drafter; with a penalty they do so less.
_MODES = {
    "greedy": ModeConfig(name="greedy"),
    "sampled": ModeConfig(name="sampled", temperature=1.0),
    "penalised": ModeConfig(name="penalised", repetition_penalty=1.2),
}
_METHODS = (
    MethodConfig(name="selfspec"),
    MethodConfig(name="HF assistant_early_exit", peer="assistant_early_exit"),
    MethodConfig(name="HF prompt lookup", peer="prompt_lookup_num_tokens"),
)


class BenchConfig(StrictConfig):
    """A benchmark.

    Attributes:
        target: folder or Hugging Face id of the model; `None` is the small one in the package.
        shape: instead of a target, a published size with random weights: a name such as
            Llama-3.2-1B, or the path of a transformers config.json. Prompts, methods, batch sizes
            and dtype have defaults that depend on the device and its memory.
        acceptance: acceptance rates that are planted in the drafts of a shape's default methods.
        heads: folder of exit heads; `None` takes those beside the model.
        profile: a profile made by `selfspec tune`; `None` takes the one beside the heads or the
            model, or in the user's cache.
        dtype: dtype of the weights; `auto` is the checkpoint's own, float32 for the model in the
            package.
        device: where to run; `None` takes a GPU if there is one.
        kernels: how selfspec's methods compute layers; methods of transformers run as they are.
        kv_cache_dtype: dtype of the KV cache. With `int8`, methods of transformers round keys and
            values in the same way, without saving memory.
        threads: number of CPU threads; `None` does not change it.
        prompts: the prompt sets.
        methods: the methods that are compared. An entry may be the path of a YAML file with one
            method, or a glob of such files. The model's own `generate` is always the first.
        modes: the decoding modes; methods are compared within each. An entry may be a name:
            `greedy`, `sampled` (temperature 1), `penalised` (greedy, repetition penalty 1.2).
        batch_sizes: numbers of prompts per call; methods are compared within each. If prompts do
            not fill the last batch, the first ones are repeated in it.
        prefill_chunk_size: prompt tokens per pass of selfspec's prefill; `None` for one pass.
        max_new_tokens: the most tokens of an output.
        repeats: timed runs of every method on every prompt.
        warm_up: tokens that every method generates untimed before each prompt set, mode and batch
            size; peak memory is that of this call, on the longest prompts.
        seed: seeds sampling and the bootstrap.
    """

    target: str | None = None
    shape: str | None = None
    acceptance: tuple[Acceptance, ...] = Field(default=_ACCEPTANCE, min_length=1)
    heads: str | None = None
    profile: Path | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str | None = None
    kernels: Kernels = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"
    threads: int | None = Field(default=None, ge=1)
    prompts: tuple[PromptSetConfig, ...] = (PromptSetConfig(name="passages", count=4),)
    methods: tuple[MethodConfig, ...] = _METHODS
    modes: tuple[ModeConfig, ...] = tuple(_MODES.values())
    batch_sizes: tuple[PositiveInt, ...] = Field(default=(1,), min_length=1)
    prefill_chunk_size: PositiveInt | None = None
    max_new_tokens: int = Field(default=128, ge=2)
    repeats: int = Field(default=1, ge=1)
    warm_up: int = Field(default=16, ge=2)
    seed: int = 0

    @field_validator("methods", mode="before")
    @classmethod
    def _read_files(cls, methods: object) -> list[object]:
        if not isinstance(methods, Sequence) or isinstance(methods, str):
            raise ValueError("methods is a list of methods, or of paths of YAML files")
        found: list[object] = []
        for method in methods:
            paths = sorted(glob.glob(method)) if isinstance(method, str) else ()  # noqa: PTH207
            if isinstance(method, str) and not paths:
                raise ValueError(f"no method file at {method}; give the path of a YAML file")
            found += [load_config(MethodConfig, Path(path)) for path in paths] or [method]
        return found

    @field_validator("modes", mode="before")
    @classmethod
    def _take_named(cls, modes: object) -> list[object]:
        if not isinstance(modes, Sequence) or isinstance(modes, str):
            raise ValueError("modes is a list of modes, or of their names")
        for name in modes:
            if isinstance(name, str) and name not in _MODES:
                raise ValueError(unknown_name("mode", name, list(_MODES)))
        return [_MODES[mode] if isinstance(mode, str) else mode for mode in modes]

    @field_validator("methods")
    @classmethod
    def _plain_comes_first(cls, methods: tuple[MethodConfig, ...]) -> tuple[MethodConfig, ...]:
        others = tuple(method for method in methods if method.peer != "plain")
        return (MethodConfig(name=PLAIN, peer="plain"), *others)

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        for what in ("prompts", "methods", "modes"):
            names = [entry.name for entry in getattr(self, what)]
            if not names:
                raise ValueError(f"{what} is empty; there has to be one")
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f"{what}: two are named {name!r}; give each its own name")
        if self.shape is not None and (self.target or self.heads or self.profile):
            raise ValueError(
                "a shape has random weights and its own heads; leave target, heads and profile out"
            )
        if len(set(self.batch_sizes)) < len(self.batch_sizes):
            raise ValueError(f"batch_sizes has a size twice: {list(self.batch_sizes)}")
        return self

    @model_validator(mode="after")
    def _only_a_shape_has_untrained_heads(self) -> Self:
        if self.shape is not None:
            return self
        if self.acceptance != _ACCEPTANCE:
            raise ValueError(
                f"acceptance={list(self.acceptance)} is planted in the default methods of a shape; "
                "give a shape, or a method its own acceptance"
            )
        for method in self.methods:
            if method.head_options:
                raise ValueError(
                    f"head_options of method {method.name!r} are for the untrained heads of a "
                    "shape; give a shape, or leave them out"
                )
        return self

    @model_validator(mode="after")
    def _acceptance_is_planted_in_greedy_drafts(self) -> Self:
        planted = [method.name for method in self.methods if method.acceptance is not None]
        sampled = [mode.name for mode in self.modes if not mode.greedy]
        # A shape's default mode is greedy, and not yet filled in.
        chosen = self.shape is None or "modes" in self.model_fields_set
        if planted and sampled and chosen:
            raise ValueError(
                f"method {planted[0]!r} plants acceptance in greedy drafts, and mode "
                f"{sampled[0]!r} samples; set modes=[greedy], or leave the acceptance out"
            )
        return self
