"""Strict configuration: pydantic models, YAML files, `section.field=value` overrides."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

ConfigT = TypeVar("ConfigT", bound="StrictConfig")

# What computes the layers in passes: transformers' own code; the same with linear maps in the
# layout of oneDNN; `torch.compile`; CUDA graphs.
Kernels = Literal["eager", "prepacked", "compiled", "graphs"]

# What keys and values are kept in: the dtype that layers compute in, or 8 bits a number.
KVCacheDtype = Literal["auto", "int8"]

# Drafts of a round where none are asked for: what a schedule may go up to, and what others take.
_LONGEST = 12
_LENGTHS = {"prompt_lookup": 40}


class StrictConfig(BaseModel):
    """A frozen config that rejects unknown keys and names the nearest known one."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _name_the_nearest_key(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for key in data:
                if key not in cls.model_fields:
                    where = f"key of {cls.__name__}"
                    raise ValueError(unknown_name(where, str(key), list(cls.model_fields)))
        return data


def unknown_name(what: str, name: str, known: Sequence[str]) -> str:
    """The message for a name that is not among `known`, with the nearest that is."""
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"unknown {what}: {name!r}; {hint}known: {', '.join(known)}"


class TreeConfig(StrictConfig):
    """The shape of the trees that the `tree` drafter grows.

    Attributes:
        nodes: drafts of a tree, all levels together.
    """

    nodes: int = Field(default=16, ge=1)


class LookupConfig(StrictConfig):
    """How `prompt_lookup`, `cascade` and `auto` find what came before.

    Attributes:
        index: `"suffix"` finds the longest match of any length in constant time per token;
            `"ngram"` matches the last `longest` tokens, then fewer.
        shortest: tokens of the shortest match that is followed.
        longest: tokens of the longest match that `"ngram"` tries.
        confident: tokens of the shortest match that `cascade` prefers to its exit, and from which
            on `auto` takes a text to repeat itself.
    """

    index: Literal["suffix", "ngram"] = "suffix"
    shortest: int = Field(default=2, ge=1)
    longest: int = Field(default=4, ge=1)
    confident: int = Field(default=4, ge=1)

    @model_validator(mode="after")
    def _some_ngram_is_matched(self) -> Self:
        if self.index == "ngram" and self.shortest > self.longest:
            raise ValueError(
                f"shortest={self.shortest} is more than longest={self.longest}, so that no n-gram "
                "would be matched; raise longest, or take index='suffix', which has no limit"
            )
        return self


class LookaheadConfig(StrictConfig):
    """The two branches of the `lookahead` drafter (Fu et al. 2024).

    Attributes:
        window: W, guesses ahead that are refined in parallel.
        ngram: N, tokens of the n-grams that the window yields.
        guesses: G, the most n-grams that a round verifies.
        pool: tokens of each row for which n-grams are kept, `guesses` of each.
    """

    window: int = Field(default=8, ge=1)
    ngram: int = Field(default=4, ge=2)
    guesses: int = Field(default=8, ge=1)
    pool: int = Field(default=4096, ge=1)


class SkipConfig(StrictConfig):
    """The sublayers that the `layer_skip` drafter leaves out.

    Attributes:
        attention: layers whose attention is left out, from 0.
        mlp: layers whose MLP is left out.
        search: `"clasp"` chooses whole layers anew as the text goes on, `"none"` keeps the above;
            `None` searches where none are named.
        layers: how many layers `"clasp"` leaves out; `None` takes half.
        every: tokens between two searches.
    """

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()
    search: Literal["none", "clasp"] | None = None
    layers: int | None = Field(default=None, ge=1)
    every: int = Field(default=64, ge=1)

    @property
    def searches(self) -> bool:
        """Whether layers are chosen as the text goes on."""
        return self.search == "clasp" or (self.search is None and not self._names_some)

    @property
    def _names_some(self) -> bool:
        return bool(self.attention or self.mlp)

    @model_validator(mode="after")
    def _one_way_to_choose(self) -> Self:
        if self.searches and self._names_some:
            raise ValueError(
                "search='clasp' chooses the layers itself; leave attention and mlp empty, "
                "or set search='none'"
            )
        if self.layers is not None and not self.searches:
            raise ValueError(
                f"layers={self.layers} is how many layers search='clasp' leaves out; with "
                "attention and mlp, or search='none', leave it out"
            )
        return self


class DraftConfig(StrictConfig):
    """How drafts are made and how long they are.

    Attributes:
        drafter: the strategy's name; `"none"` switches drafting off (plain decoding).
        exit_layer: number of layers below the exit: 4 runs layers 0-3. `None` takes the exit of
            the first fitted head, or a quarter of the layers when there is none.
        head: kind of the exit head, or `None` for the one fitted at `exit_layer` (`"shared"`
            when there is none).
        num_draft_tokens: the most tokens drafted in a round, one after the other (γ in Leviathan
            et al. 2023); of a cascade, by its exit. `None` takes what suits the drafter and the
            schedule (`most_tokens`); a lookup then copies as many as its match is long, from 10
            to 40.
        schedule: `"fixed"` drafts that many each round; `"confidence"` stops a round's draft once
            the draft's own probability of its token falls below `confidence` in every row;
            `"optimal"` stops once another draft is not worth its measured time. For drafters that
            make chains one by one: `early_exit`, `layer_skip`, `cascade` and `two_model`.
        confidence: threshold in (0, 1) of the confidence schedule.
        draft_model: of `two_model`, the folder or id of the smaller model.
        tree: the shape of trees.
        lookup: how `prompt_lookup` and `cascade` find what came before.
        lookahead: the branches of `lookahead`.
        skip: what `layer_skip` leaves out.
        rule: how sampled drafts are verified: chains by `"block"`, `"token"`, or `"typical_lossy"`,
            which changes the output's distribution; `"coupled"`, for trees, too: a seed gives the
            text that it gives without drafts.
    """

    drafter: str = "early_exit"
    exit_layer: int | None = Field(default=None, ge=0)
    head: str | None = None
    num_draft_tokens: int | None = None
    schedule: Literal["fixed", "confidence", "optimal"] = "fixed"
    confidence: float = Field(default=0.4, gt=0, lt=1)
    draft_model: str | None = None
    tree: TreeConfig = TreeConfig()
    lookup: LookupConfig = LookupConfig()
    lookahead: LookaheadConfig = LookaheadConfig()
    skip: SkipConfig = SkipConfig()
    rule: Literal["block", "token", "coupled", "typical_lossy"] = "block"

    @property
    def most_tokens(self) -> int:
        """The most tokens drafted in a round, one after the other; of a cascade, by its exit."""
        if self.num_draft_tokens is not None:
            return self.num_draft_tokens
        return _LONGEST if self.schedule == "optimal" else _LENGTHS.get(self.drafter, 4)

    @model_validator(mode="after")
    def _drafts_are_wanted(self) -> Self:
        if self.num_draft_tokens is not None and self.num_draft_tokens < 1:
            raise ValueError(
                f"num_draft_tokens must be at least 1, got {self.num_draft_tokens}; "
                "to decode without drafts use drafter='none'"
            )
        return self

    @classmethod
    def of(cls, draft: DraftConfig | Mapping[str, Any] | str | None) -> DraftConfig:
        """Read what `generate(draft=...)` takes: a config, a dict, a drafter's name or nothing."""
        if draft is None:
            return cls()
        if isinstance(draft, cls):
            return draft
        if isinstance(draft, str):
            return cls(drafter=draft)
        if isinstance(draft, Mapping):
            return parse(cls, draft, "draft")
        raise TypeError(
            f"draft must be a DraftConfig, a dict or a drafter's name, got {type(draft).__name__}"
        )


def parse(config: type[ConfigT], data: Mapping[str, Any], source: str) -> ConfigT:
    """Validate `data`; errors come as one `ValueError` whose lines name `source` and the key."""
    try:
        return config.model_validate(dict(data))
    except ValidationError as error:
        raise ValueError("\n".join(_error_lines(error, source))) from None


def _error_lines(error: ValidationError, source: str) -> Iterator[str]:
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        yield f"{source}: {place + ': ' if place else ''}{message}"


def load_config(
    config: type[ConfigT], path: str | Path | None, overrides: Sequence[str] = ()
) -> ConfigT:
    """Read a YAML file and apply `section.field=value` overrides (values are YAML).

    Raises:
        FileNotFoundError: there is no file at `path`.
        ValueError: the file is not a YAML mapping, an override has no `=`, or a key is unknown.
    """
    data: Any = {}
    if path is not None:
        file = Path(path)
        if not file.is_file():
            raise FileNotFoundError(f"no config file at {file}; give the path of a YAML file")
        data = _read_yaml(_read_text(file), str(path)) or {}
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a YAML mapping, got {type(data).__name__}")
    for override in overrides:
        _override(data, override)
    return parse(config, data, str(path) if path is not None else "overrides")


def _override(data: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise ValueError(f"an override reads section.field=value, got {override!r}")
    *sections, field = key.split(".")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise ValueError(f"override {override!r}: {section!r} is a value, not a section")
    data[field] = _read_yaml(value, f"override {override!r}")


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no UTF-8 text (byte {error.start})") from None


def _read_yaml(text: str, source: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        where = f" (line {place.line + 1}, column {place.column + 1})" if place else ""
        raise ValueError(f"{source} is no valid YAML{where}") from None
