"""Text sources: files and data sets as documents, without the records that cannot be used."""

from __future__ import annotations

import glob
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Any, Literal, TypeVar

from pydantic import Field, field_validator, model_validator
from rich.console import Console
from transformers import PreTrainedTokenizerBase
from typing_extensions import Self

from selfspec.apps.bench.prompts import clean_prose
from selfspec.apps.chat_templates import check_template
from selfspec.config import StrictConfig
from selfspec.records import Form, Record, read_records, without_nulls

from ..loop.parallel import processes
from .chats import BadRecord, Document, chat_documents, is_chat_record, is_word, read_chat

ItemT = TypeVar("ItemT")

_DEFAULT_TEMPLATE = "{text}"


class SourceConfig(StrictConfig):
    """One source of documents.

    Attributes:
        files: paths or globs; `{stdlib}` stands for the running Python's standard library. The
            content of a file tells what it is; a folder that `datasets` saved counts as a file.
        exclude: globs of paths to leave out.
        dataset: a name for `datasets.load_dataset`, instead of files.
        subset: configuration name of the data set.
        split: split of the data set.
        format: `text` takes a file as one document, `jsonl` a record, `chat` the chat in a record,
            with loss on the assistant's replies only; `auto` goes by each file's content and each
            record's fields, unless there is a template.
        template: a record's text, its fields in braces.
        where: per field, the lowest and the highest allowed value.
        clean: `prose` makes quotes straight and puts every paragraph on one line.
        max_bad_share: the share of the records that may be bad and are skipped; more stop the run.
        max_characters: the most characters of a document; 0 reads all.
        weight: the source's share of the mixture, in tokens, before normalisation.
    """

    files: list[str] = Field(default_factory=list)
    exclude: list[str] = Field(default_factory=list)
    dataset: str | None = None
    subset: str | None = None
    split: str = "train"
    format: Literal["auto", "text", "jsonl", "chat"] = "auto"
    template: str = _DEFAULT_TEMPLATE
    where: dict[str, tuple[float, float]] = Field(default_factory=dict)
    clean: Literal["none", "prose"] = "none"
    max_bad_share: float = Field(default=0.01, ge=0, le=1)
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


def read_texts(source: SourceConfig, silent: bool = False) -> Iterator[str]:
    """The cleaned documents of a plain-text source.

    Args:
        source: the source.
        silent: do not print what was skipped.

    Raises:
        FileNotFoundError: nothing matches `files`.
        ImportError: a package that reads this kind of source is not installed.
        ValueError: a file cannot be read, or more than `max_bad_share` of its records.
    """
    yield from use_records(source, lambda fields: [_text(source, fields)], silent)


def tokenize(
    source: SourceConfig, tokenizer: PreTrainedTokenizerBase, silent: bool = False
) -> Iterator[Document]:
    """The documents of a source as tokens, each between the tokenizer's BOS and EOS, if any.

    Chats are rendered with their template.

    Args:
        source: the source.
        tokenizer: the target's.
        silent: do not print what was skipped.

    Raises:
        FileNotFoundError: nothing matches `files`.
        ImportError: a package that reads this kind of source is not installed.
        ValueError: a file cannot be read, or more than `max_bad_share` of its records; or the
            tokenizer has no template for chats.
    """
    documents = partial(_documents, source, tokenizer)
    yield from use_records(source, documents, silent, unused="have no reply to train on")


def _documents(
    source: SourceConfig, tokenizer: PreTrainedTokenizerBase, fields: Mapping[str, Any]
) -> list[Document]:
    if _holds_chat(source, fields):
        check_template(tokenizer)
        return chat_documents(read_chat(fields), tokenizer)
    ids = tokenizer(_text(source, fields), add_special_tokens=False, verbose=False).input_ids
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    tokens = start + ids + end
    return [Document(tokens, [True] * len(tokens))]


def is_chat(source: SourceConfig) -> bool:
    """Whether the first sound record of a source is a chat."""
    first = next((record.fields for record in _records(source) if not record.fault), None)
    return first is not None and _holds_chat(source, first)


def _holds_chat(source: SourceConfig, fields: Mapping[str, Any]) -> bool:
    if source.format != "auto":
        return source.format == "chat"
    return source.template == _DEFAULT_TEMPLATE and is_chat_record(fields)


# Records that cannot be used


def use_records(
    source: SourceConfig,
    use: Callable[[Mapping[str, Any]], Sequence[ItemT]],
    silent: bool = False,
    unused: str = "",
) -> Iterator[ItemT]:
    """What `use` makes of each record. Bad records are skipped, and summed up at the end.

    Args:
        source: the source.
        use: raises `BadRecord` for a bad record.
        silent: do not print what was skipped.
        unused: why a record may give nothing without being bad.

    Raises:
        ValueError: more than `max_bad_share` of the records are bad.
    """
    read = empty = 0
    bad: list[str] = []
    for record in _records(source):
        read += 1
        try:
            items = use(record.fields) if _is_wanted(source, record) else None
        except BadRecord as error:
            bad.append(" ".join(f"{record.place}: {error}".split()))
            continue
        empty += items is not None and not items
        yield from items or ()
    if len(bad) > source.max_bad_share * read:
        raise ValueError(
            f"{len(bad)} of the {read} records of {source.name} cannot be used, more than "
            f"max_bad_share ({source.max_bad_share:g}) allows: {'; '.join(bad[:_NAMED])}"
        )
    if not silent:
        _sum_up(source, read, bad, empty, unused)


_NAMED, _PRINTED = 3, 100  # bad records in an error, and in a summary


def _sum_up(source: SourceConfig, read: int, bad: Sequence[str], empty: int, unused: str) -> None:
    console = Console(highlight=False, quiet=not processes().is_main_process)
    say = partial(console.print, markup=False, soft_wrap=True)
    for fault in bad[:_PRINTED]:
        say(f"skipped {fault}")
    if len(bad) > _PRINTED:
        say(f"skipped {len(bad) - _PRINTED:,} more")
    if bad:
        say(f"{source.name}: skipped {len(bad):,} bad records of {read:,}")
    if empty:
        say(f"{source.name}: {empty:,} of {read:,} records {unused}")


def _is_wanted(source: SourceConfig, record: Record) -> bool:
    """Whether a record is within the limits of `where`.

    Raises:
        BadRecord: it is not a record, or not one of a known kind.
    """
    if record.fault:
        raise BadRecord(record.fault)
    return all(_lies_within(source, record.fields, *limits) for limits in source.where.items())


def _lies_within(
    source: SourceConfig, fields: Mapping[str, Any], field: str, limits: tuple[float, float]
) -> bool:
    if field not in fields:
        raise BadRecord(f"`where` of {source.name} names {field!r}, a record has {sorted(fields)}")
    value = fields[field]
    if not isinstance(value, int | float):
        raise BadRecord(
            f"`where` of {source.name} compares numbers, {field!r} of a record is {value!r:.60}"
        )
    return limits[0] <= value <= limits[1]


def _text(source: SourceConfig, fields: Mapping[str, Any]) -> str:
    text = _fill(source, fields)
    return (clean_prose(text) if source.clean == "prose" else text)[: source.max_characters or None]


def _fill(source: SourceConfig, fields: Mapping[str, Any]) -> str:
    """A record's text.

    Raises:
        BadRecord: a field is absent or null, or neither a string nor a number.
    """
    named = {name for _, name, _, _ in Formatter().parse(source.template) if name is not None}
    for name in sorted(named):
        if name not in fields:
            raise BadRecord(
                f"the template of {source.name} names {name!r}, a record has {sorted(fields)}; "
                "`template` takes field names in braces"
            )
        if not is_word(fields[name]):
            value = "null" if fields[name] is None else f"a {type(fields[name]).__name__}"
            raise BadRecord(f"the field {name!r} is {value}, where a string or number is expected")
    try:
        return source.template.format_map(fields)
    except ValueError as error:
        raise BadRecord(f"the template {source.template!r} does not fit it ({error})") from None


# Where records are


def _records(source: SourceConfig) -> Iterator[Record]:
    if source.dataset and _is_saved_dataset(Path(source.dataset)):
        yield from _saved_rows(Path(source.dataset), source.split)
        return
    if source.dataset:
        rows = _datasets().load_dataset(source.dataset, source.subset, split=source.split)
        yield from _rows(source.dataset, rows)
        return
    form: Form = "records" if source.format in ("jsonl", "chat") else source.format
    for path in find_files(source):
        if path.is_dir():
            yield from _saved_rows(path, source.split)
        else:
            yield from read_records(path, form)


def _rows(name: str, rows: Iterable[Any]) -> Iterator[Record]:
    for number, row in enumerate(rows, 1):
        yield Record(f"{name}, row {number}", without_nulls(dict(row)))


def _saved_rows(folder: Path, split: str) -> Iterator[Record]:
    """The rows of a folder that `datasets` saved: a data set, or one of several splits."""
    load = _datasets().load_from_disk
    row = "its first row"
    try:
        found = load(str(folder))
        splits = sorted(found) if isinstance(found, dict) else []
        if not splits or split in splits:
            for record in _rows(str(folder), found[split] if splits else found):
                yield record
                row = f"what is behind {record.place.rpartition(', ')[2]}"
            return
    except Exception as error:  # every library below has its own errors for a damaged file
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"{folder} is a damaged data set: {row} cannot be read ({text})"
        ) from error
    raise ValueError(f"{folder} has the splits {splits}, not `split` {split!r}")


def _datasets() -> Any:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError("a data set needs: pip install 'selfspec[train]'") from None
    return datasets


def _is_saved_dataset(path: Path) -> bool:
    """Whether a path is a folder that `save_to_disk` of `datasets` wrote."""
    written = {"dataset_dict.json"}, {"dataset_info.json", "state.json"}
    return any(all((path / name).is_file() for name in names) for names in written)


def find_files(source: SourceConfig) -> list[Path]:
    """The files of a source, and folders that `datasets` saved, sorted.

    Raises:
        FileNotFoundError: a pattern matches nothing, or all that matches is excluded.
    """
    stdlib = sysconfig.get_paths()["stdlib"]
    found: set[str] = set()
    for pattern in source.files:
        expanded = Path(pattern.replace("{stdlib}", stdlib)).expanduser()
        paths = [Path(p) for p in glob.glob(str(expanded), recursive=True)]  # noqa: PTH207
        if expanded.exists():  # names may have brackets, which are no pattern then
            paths = [expanded]
        matches = [str(path) for path in paths if path.is_file() or _is_saved_dataset(path)]
        if not matches:
            raise FileNotFoundError(_no_match(expanded))
        found.update(matches)
    excluded = [pattern.replace("{stdlib}", stdlib) for pattern in source.exclude]
    folders = {path for path in found if Path(path).is_dir()}
    kept = [
        Path(path)
        for path in sorted(found)
        if not any(fnmatch(path, pattern) for pattern in excluded)
        and folders.isdisjoint(map(str, Path(path).parents))
    ]
    if not kept:
        raise FileNotFoundError(f"`exclude` leaves none of the files that {source.name} matches")
    return kept


def _no_match(pattern: Path) -> str:
    if pattern.is_dir():
        return (
            f"{pattern} is a folder, and not one that `save_to_disk` of `datasets` wrote; "
            f"`files` takes the files in it, as {pattern / '*'} or {pattern / '**' / '*'}"
        )
    return f"no file matches {pattern}; `files` takes paths and globs"
