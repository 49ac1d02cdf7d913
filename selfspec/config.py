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

# Values by name that are only read: arguments of a call, options of `generate` or of a head.
Options = Mapping[str, Any]

# An object that is read from JSON or YAML, or written there.
JsonObject = dict[str, Any]

# How layers are computed: in the fastest way that needs no compiler; by transformers' own code;
# the same without decorators and checks for hooks; with packed weights for a CPU in half precision;
# by `torch.compile`; as CUDA graphs.
Kernels = Literal["auto", "eager", "direct", "prepacked", "compiled", "graphs"]

# Dtype of the KV cache: that of the layers, or int8.
KVCacheDtype = Literal["auto", "int8"]

# Bits of the copies of weights that passes which draft may read.
Precision = Literal["int8", "int4"]

# Default numbers of drafts: of the `optimal` schedule (the most), of copies, of single drafters.
LONGEST, LONGEST_COPY = 12, 40
_LENGTHS = {"prompt_lookup": LONGEST_COPY, "auto": LONGEST}
_SINKS = 4  # first keys that a window keeps, as StreamingLLM does


class StrictConfig(BaseModel):
    """A frozen config that rejects unknown keys and names the nearest known one."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _name_the_nearest_key(cls, data: object) -> object:
        if isinstance(data, Mapping):
            for key in data:
                if key not in cls.model_fields:
                    where = f"key of {cls.__name__}"
                    raise ValueError(unknown_name(where, str(key), list(cls.model_fields)))
        return data


def unknown_name(what: str, name: str, known: Sequence[str]) -> str:
    """The error message for an unknown name, with the nearest known one."""
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"unknown {what}: {name!r}; {hint}known: {', '.join(known) or 'none'}"


# Ends the message for an unknown name where users can register names of their own.
OWN_NAME = "; if it is your own, import the module that registers it"


class TreeConfig(StrictConfig):
    """The shape of the `tree` drafter's trees.

    Attributes:
        nodes: drafts of a tree.
    """

    nodes: int = Field(default=16, ge=1)


class LookupConfig(StrictConfig):
    """How `prompt_lookup`, `cascade` and `auto` find earlier occurrences.

    Attributes:
        index: `"suffix"` finds the longest match of any length, in amortised constant time per
            token; `"ngram"` tries to match the last `longest` tokens, then fewer.
        shortest: minimum length of a match in tokens.
        longest: maximum length of a match in tokens, for `"ngram"`.
        confident: minimum length of a match for which `cascade` copies instead of drafting with
            its exit head.
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
        window: W, number of guesses that are refined in parallel.
        ngram: N, length of the n-grams in tokens.
        guesses: G, the most n-grams that a round verifies.
        pool: number of first tokens for which n-grams are kept, at most `guesses` each.
    """

    window: int = Field(default=8, ge=1)
    ngram: int = Field(default=4, ge=2)
    guesses: int = Field(default=8, ge=1)
    pool: int = Field(default=4096, ge=1)


class SkipConfig(StrictConfig):
    """The sublayers that the `skip_sublayers` drafter skips.

    Attributes:
        attention: layers whose attention is skipped, from 0.
        mlp: layers whose MLP is skipped.
        search: `"clasp"` chooses whole layers while generating; `"none"` skips those named in
            `attention` and `mlp`; `None` searches if none are named there.
        layers: number of layers that `"clasp"` skips; `None` takes half.
        every: number of tokens between two searches.
    """

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()
    search: Literal["none", "clasp"] | None = None
    layers: int | None = Field(default=None, ge=1)
    every: int = Field(default=64, ge=1)

    @property
    def searches(self) -> bool:
        """Whether layers are chosen while generating."""
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
                f"layers={self.layers} is the number of layers that search='clasp' skips; with "
                "attention and mlp, or search='none', leave it out"
            )
        return self


class DraftConfig(StrictConfig):
    """How tokens are drafted, and how many.

    Attributes:
        drafter: name of the drafter; `"none"` is plain decoding.
        exit_layer: number of layers below the exit: 4 runs layers 0 to 3. `None` takes the exit of
            the first fitted head (of the kind `head`, if given), or a quarter of the layers if
            there is none.
        head: kind of the exit head; `None` takes the one fitted at `exit_layer`, or `"shared"` if
            there is none.
        num_draft_tokens: the most tokens drafted in a round (γ in Leviathan et al. 2023); for
            `cascade` this limits its exit head, for `tree` the levels. `None` takes the default of
            drafter and schedule (`most_tokens`); `prompt_lookup` then copies as many tokens as its
            match is long, from 10 to 40.
        schedule: when a chain ends, for `early_exit`, `skip_sublayers`, `cascade` and `two_model`.
            `"fixed"`: after `num_draft_tokens`. `"confidence"`: once the head's probability of its
            draft is below `confidence` in every row. `"optimal"`: once another draft is expected
            to cost more time than it saves.
        confidence: threshold in (0, 1) of the schedule `"confidence"`.
        draft_model: folder or id of the smaller model of `two_model`.
        precision: what the weights are rounded to that drafting reads, in a copy that is made when
            it is first needed; `None` reads the model's own.
        lm_head_precision: the same of the model's LM head; `None` takes `precision`.
        window: drafts attend to this number of the most recent keys, and to the first ones
            (StreamingLLM, Xiao et al. 2024); `None` for all keys.
        sinks: the number of these first keys.
        approximate: where `precision` and `window` apply. `"head"`: in the LM head and in a head's
            own layer. `"all"`: also in the layers that draft, after which verification starts at
            layer 0. `None`: in all if `exit_layer` is the depth of the model, if `window` is given,
            and in a smaller model; else in the head.
        tree: the shape of trees.
        lookup: how `prompt_lookup`, `cascade` and `auto` find earlier occurrences.
        lookahead: the branches of `lookahead`.
        skip: the sublayers that `skip_sublayers` skips.
        rule: the acceptance rule of sampled drafts. `"block"` and `"token"` are lossless; trees
            use recursive rejection sampling with either. `"coupled"` is lossless, and a seed gives
            the same output with every drafter and with none. `"typical_lossy"` changes the output's
            distribution, and is for chains only.
    """

    # The defaults are valid; validating all sections again takes time in every call.
    model_config = ConfigDict(validate_default=False)

    drafter: str = "early_exit"
    exit_layer: int | None = Field(default=None, ge=0)
    head: str | None = None
    num_draft_tokens: int | None = None
    schedule: Literal["fixed", "confidence", "optimal"] = "fixed"
    confidence: float = Field(default=0.4, gt=0, lt=1)
    draft_model: str | None = None
    precision: Precision | None = None
    lm_head_precision: Precision | None = None
    window: int | None = Field(default=None, ge=1)
    sinks: int = Field(default=_SINKS, ge=0)
    approximate: Literal["head", "all"] | None = None
    tree: TreeConfig = TreeConfig()
    lookup: LookupConfig = LookupConfig()
    lookahead: LookaheadConfig = LookaheadConfig()
    skip: SkipConfig = SkipConfig()
    rule: Literal["block", "token", "coupled", "typical_lossy"] = "block"

    @property
    def most_tokens(self) -> int:
        """The most tokens drafted in a round; for `cascade`, by its exit head."""
        if self.num_draft_tokens is not None:
            return self.num_draft_tokens
        return LONGEST if self.schedule == "optimal" else _LENGTHS.get(self.drafter, 4)

    @property
    def approximates(self) -> bool:
        """Whether drafting does something otherwise than the model."""
        return bool(self.precision or self.lm_head_precision or self.window)

    def approximates_layers(self, whole: bool) -> bool:
        """Whether layers are approximate, too; `whole` if all of a model's draft."""
        if self.approximate is None:
            return self.window is not None or (whole and self.approximates)
        return self.approximate == "all"

    @property
    def approximated(self) -> tuple[object, ...]:
        """What tells approximate drafts from one another; empty for exact ones."""
        chosen = self.precision, self.lm_head_precision, self.window, self.approximate
        return chosen if self.approximates else ()

    @model_validator(mode="before")
    @classmethod
    def _read_a_name(cls, data: object) -> object:
        return {"drafter": data} if isinstance(data, str) else data

    @model_validator(mode="before")
    @classmethod
    def _name_what_replaced_a_key(cls, data: object) -> object:
        if isinstance(data, Mapping) and "times" in data:
            raise ValueError(
                f"times={data['times']!r} is gone: times are always measured, and a seed gives "
                "one output whatever drafts with rule='coupled'"
            )
        return data

    @model_validator(mode="after")
    def _drafts_are_wanted(self) -> Self:
        if self.num_draft_tokens is not None and self.num_draft_tokens < 1:
            raise ValueError(
                f"num_draft_tokens must be at least 1, got {self.num_draft_tokens}; "
                "to decode without drafts use drafter='none'"
            )
        return self

    @model_validator(mode="after")
    def _something_is_approximated(self) -> Self:
        if self.approximate is not None and not self.approximates:
            raise ValueError(
                f"approximate={self.approximate!r} says where precision and window apply; set one "
                "of them, or leave it out"
            )
        if self.sinks != _SINKS and self.window is None:
            raise ValueError(
                f"sinks={self.sinks} is a number of keys that drafts see beside those in window; "
                "set window, or leave it out"
            )
        return self

    @classmethod
    def of(cls, draft: DraftConfig | Options | str | None) -> DraftConfig:
        """A config from the values that `generate(draft=...)` takes."""
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


def parse(config: type[ConfigT], data: Mapping[str, object], source: str) -> ConfigT:
    """Validate `data`; errors become one `ValueError` whose lines name `source` and the key."""
    try:
        return config.model_validate(dict(data))
    except ValidationError as error:
        raise ValueError("\n".join(_error_lines(error, source))) from None


def _error_lines(error: ValidationError, source: str) -> Iterator[str]:
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        yield f"{source}: {key + ': ' if key else ''}{message}{given_value(item)}"


def given_value(item: Mapping[str, object]) -> str:
    """The end of the message of one of pydantic's errors; our own messages name the value."""
    return "" if item["type"] in ("missing", "value_error") else f", got {item['input']!r:.80}"


def load_config(
    config: type[ConfigT], path: str | Path | None, overrides: Sequence[str] = ()
) -> ConfigT:
    """Read a YAML file and apply `section.field=value` overrides (values are YAML).

    Raises:
        FileNotFoundError: there is no file at `path`.
        ValueError: the file is not a YAML mapping, an override has no `=`, or a key is unknown.
    """
    return parse(config, read_config(path, overrides), str(path or "overrides"))


def read_config(path: str | Path | None, overrides: Sequence[str] = ()) -> JsonObject:
    """Read a YAML file and overrides without validation; raises as `load_config` does."""
    data: Any = {}
    if path is not None:
        file = Path(path)
        if not file.is_file():
            raise FileNotFoundError(f"no config file at {file}; give the path of a YAML file")
        data = _read_yaml(read_text(file), str(path)) or {}
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a YAML mapping, got {type(data).__name__}")
    for override in overrides:
        _override(data, override)
    return data


def _override(data: JsonObject, override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise ValueError(f"an override reads section.field=value, got {override!r}")
    *sections, field = names = key.split(".")
    entry = next((index for index, name in enumerate(names) if name.isdigit()), 0)
    if entry:
        whole = ".".join(names[:entry])
        raise ValueError(
            f"override {override!r}: an entry of a list cannot be set alone; give the whole list "
            f"as YAML, such as {whole}='[{{key: value}}]'"
        )
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise ValueError(f"override {override!r}: {section!r} is a value, not a section")
    data[field] = _read_yaml(value, f"override {override!r}")


def read_text(file: Path) -> str:
    """The text of a file in UTF-8, without a byte order mark.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text (byte {error.start})") from None


def _read_yaml(text: str, source: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ValueError(f"{source} is not valid YAML{where}") from None
