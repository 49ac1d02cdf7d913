"""Text sources: files, JSON lines, chats, and data sets by name."""

from __future__ import annotations

import glob
import re
import sysconfig
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from string import Formatter
from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator
from transformers import PreTrainedTokenizerBase
from typing_extensions import Self

from selfspec.bench.prompts import clean_prose, json_lines, render_chat
from selfspec.config import StrictConfig

Record = dict[str, Any]


class SourceConfig(StrictConfig):
    """One source of documents.

    Attributes:
        files: paths or globs; `{stdlib}` stands for the running Python's standard library.
        exclude: globs of paths to leave out.
        dataset: a name for `datasets.load_dataset`, instead of files.
        subset: configuration name of the data set.
        split: split of the data set.
        format: `text` takes a file as one document, `jsonl` a line, `chat` the `messages` of a
            line, with loss on the assistant's replies only; `auto` goes by the file's ending and
            the first record.
        template: a record's text, its fields in braces.
        where: per field, the lowest and the highest allowed value.
        clean: `prose` makes quotes straight and puts every paragraph on one line.
        max_characters: the most characters of a document; 0 reads all.
        weight: the source's share of the mixture, in tokens, before normalisation.
    """

    files: list[str] = Field(default_factory=list)
    exclude: list[str] = Field(default_factory=list)
    dataset: str | None = None
    subset: str | None = None
    split: str = "train"
    format: Literal["auto", "text", "jsonl", "chat"] = "auto"
    template: str = "{text}"
    where: dict[str, tuple[float, float]] = Field(default_factory=dict)
    clean: Literal["none", "prose"] = "none"
    max_characters: int = Field(default=0, ge=0)
    weight: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if bool(self.files) == (self.dataset is not None):
            raise ValueError("a source has either `files` or a `dataset`; give one of the two")
        return self

    @field_validator("template")
    @classmethod
    def _names_fields(cls, template: str) -> str:
        for _, name, _, conversion in Formatter().parse(template):
            if name is not None and (conversion or not re.fullmatch(r"\w[^.\[]*", name)):
                raise ValueError(f"a template has field names in braces, got {template!r}")
        return template

    @property
    def name(self) -> str:
        """The name in messages."""
        return self.dataset or ", ".join(self.files)


class Document(NamedTuple):
    """One text as tokens.

    Attributes:
        tokens: token ids.
        trained: per token, whether it is a training target.
    """

    tokens: list[int]
    trained: list[bool]


def read_texts(source: SourceConfig) -> Iterator[str]:
    """The cleaned documents of a plain-text source.

    Raises:
        FileNotFoundError: nothing matches `files`.
        ImportError: `datasets` is not installed.
        ValueError: a line is no JSON object, or `template` or `where` name a field that is not
            there.
    """
    limit = source.max_characters or None
    for record in _records(source):
        text = _fill(source, record)
        yield (clean_prose(text) if source.clean == "prose" else text)[:limit]


def read_chats(source: SourceConfig) -> Iterator[list[dict[str, Any]]]:
    """The messages of each chat of a source.

    Raises:
        FileNotFoundError: nothing matches `files`.
        ImportError: `datasets` is not installed.
        ValueError: a record is no chat.
    """
    for record in _records(source):
        yield _messages(record)


def tokenize(source: SourceConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[Document]:
    """The documents of a source as tokens, each between the tokenizer's BOS and EOS, if any.

    Chats are rendered with their template.

    Raises:
        FileNotFoundError: nothing matches `files`.
        ImportError: `datasets` is not installed.
        ValueError: a record is not what `format`, `template` or `where` expect.
    """
    if is_chat(source):
        for record in _records(source):
            yield chat_document(record, tokenizer)
        return
    for text in read_texts(source):
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        tokens = start + ids + end
        yield Document(tokens, [True] * len(tokens))


def chat_document(record: Record, tokenizer: PreTrainedTokenizerBase) -> Document:
    """A chat through the tokenizer's template, the assistant's replies marked as trained.

    Raises:
        ValueError: the record is no chat, or the template is missing or rewrites earlier turns.
    """
    messages = _messages(record)
    text, replies = "", []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render_chat(tokenizer, messages[:index], reply_next=True)
        whole = render_chat(tokenizer, messages[: index + 1], reply_next=False)
        if not (whole.startswith(prompt) and prompt.startswith(text)):
            raise ValueError(
                "the chat template rewrites earlier turns, so replies cannot be told from prompts; "
                "give one record per reply"
            )
        replies.append((len(prompt), len(whole)))
        text = whole
    # Replies are found by characters: a token may span the end of a prompt.
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = [start for start, _ in encoded.offset_mapping]
    trained = [any(first <= start < last for first, last in replies) for start in starts]
    return Document(encoded.input_ids, trained)


def _messages(record: Record) -> list[dict[str, Any]]:
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"a chat record has a list `messages`, got fields {sorted(record)}")
    for message in messages:
        if not isinstance(message, dict) or "role" not in message:
            raise ValueError(f"a chat message has a `role` and a `content`, got {message!r}")
    return messages


def is_chat(source: SourceConfig) -> bool:
    """Whether a source's records are chats."""
    if source.format != "auto":
        return source.format == "chat"
    return "messages" in next(_records(source), {})


def _records(source: SourceConfig) -> Iterator[Record]:
    for record in _dataset_records(source) if source.dataset else _file_records(source):
        if all(_lies_within(source, record, *limits) for limits in source.where.items()):
            yield record


def _lies_within(
    source: SourceConfig, record: Record, field: str, limits: tuple[float, float]
) -> bool:
    if field not in record:
        raise ValueError(f"`where` of {source.name} names {field!r}, a record has {sorted(record)}")
    if not isinstance(record[field], int | float):
        raise ValueError(
            f"`where` of {source.name} compares numbers, {field!r} of a record is {record[field]!r}"
        )
    return limits[0] <= record[field] <= limits[1]


def _dataset_records(source: SourceConfig) -> Iterator[Record]:
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError("a `dataset` source needs: pip install 'selfspec[train]'") from None
    yield from load_dataset(source.dataset, source.subset, split=source.split)


def _file_records(source: SourceConfig) -> Iterator[Record]:
    for path in find_files(source):
        text = path.read_text(encoding="utf-8", errors="replace")
        is_lines = source.format in ("jsonl", "chat") or (
            source.format == "auto" and path.suffix in (".jsonl", ".json")
        )
        yield from json_lines(path, text) if is_lines else [{"text": text}]


def find_files(source: SourceConfig) -> list[Path]:
    """The files of a source, sorted.

    Raises:
        FileNotFoundError: a pattern matches nothing, or all that matches is excluded.
    """
    stdlib = sysconfig.get_paths()["stdlib"]
    found: set[str] = set()
    for pattern in source.files:
        expanded = str(Path(pattern.replace("{stdlib}", stdlib)).expanduser())
        matches = [p for p in glob.glob(expanded, recursive=True) if Path(p).is_file()]  # noqa: PTH207
        if not matches:
            raise FileNotFoundError(f"no file matches {expanded}; `files` takes paths and globs")
        found.update(matches)
    excluded = [pattern.replace("{stdlib}", stdlib) for pattern in source.exclude]
    kept = [Path(p) for p in sorted(found) if not any(fnmatch(p, glob_) for glob_ in excluded)]
    if not kept:
        raise FileNotFoundError(f"`exclude` leaves none of the files that {source.name} matches")
    return kept


def _fill(source: SourceConfig, record: Record) -> str:
    try:
        return source.template.format_map(record)
    except KeyError as error:
        raise ValueError(
            f"the template of {source.name} names {error}, a record has "
            f"{sorted(record)}; `template` takes field names in braces"
        ) from None
