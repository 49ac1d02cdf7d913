"""Records of text files. The content tells what a file is, not its name."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

Form = Literal["auto", "text", "records"]

READABLE = "plain text, JSON lines, a JSON array or parquet; or these in gzip, zstd, xz or bzip2"
_HEAD = 2**16  # bytes by which a file is told
_CHUNK = 2**18  # characters of a JSON array that are read at a time


class Record(NamedTuple):
    """One record of a file.

    Attributes:
        place: the file, and the line or row in it.
        fields: its fields. A file of plain text is one record with the field `text`, if it has any.
        fault: why it is not a record; empty if it is one.
    """

    place: str
    fields: dict[str, Any]
    fault: str = ""


def read_records(path: Path, form: Form = "auto") -> Iterator[Record]:
    """The records of a file, read as they are asked for.

    Args:
        path: plain text in UTF-8 or as its byte order mark says, JSON lines, an array of JSON
            objects, or parquet; possibly compressed.
        form: `text` takes any text as one record, `records` takes text for JSON; `auto` decides.

    Raises:
        ImportError: a package that reads this kind of file is not installed.
        OSError: the file cannot be opened.
        ValueError: it is of another kind, or damaged. A single damaged record is not raised; it has
            a `fault`.
    """
    with path.open("rb") as packed:
        try:
            with _unpacked(packed) as file:
                yield from _records(path, file, form)
        except (ValueError, ImportError):
            raise
        except Exception as error:  # every library has its own errors for a damaged file
            raise ValueError(
                f"{path} cannot be read to its end ({error}); it is damaged or cut off"
            ) from error


def sound_fields(path: Path, form: Form = "auto") -> Iterator[dict[str, Any]]:
    """The fields of a file's records; raises as `read_records`, and ValueError for a bad record."""
    for record in read_records(path, form):
        if record.fault:
            raise ValueError(f"{record.place}: {record.fault}")
        yield record.fields


def _records(path: Path, file: IO[bytes], form: Form) -> Iterator[Record]:
    head = _head(file)
    if head.startswith(b"PAR1") and form != "text":
        yield from _parquet_rows(path, file)
        return
    _refuse_binary(path, head)
    encoding = next((name for mark, name in _MARKS if head.startswith(mark)), "utf-8")
    start = codecs.getincrementaldecoder(encoding)(errors="replace").decode(head)
    kind = _kind(path, start, form)
    if kind == "text":
        text = _text(path, file, encoding, head)
        if text.strip():
            yield Record(str(path), {"text": text})
        return
    # A byte that is not UTF-8 spoils its record only.
    errors = "surrogateescape" if encoding.startswith("utf-8") else "strict"
    try:
        with io.TextIOWrapper(file, encoding, errors, newline="\n") as stream:
            yield from (_lines if kind == "lines" else _elements)(path, stream)
    except UnicodeDecodeError as error:
        raise _no_text(path, error, head) from None


# Compression

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # begins with the mark of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def _open_zstd(file: IO[bytes]) -> Any:
    try:
        from compression import zstd  # pyright: ignore[reportMissingImports]  # Python 3.14
    except ImportError:
        try:
            from backports import zstd  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
        except ImportError:
            raise ImportError("a file in zstd needs: pip install backports.zstd") from None
    return zstd.open(file)


_PACKERS: dict[bytes, Callable[[IO[bytes]], Any]] = {
    rb"\x1f\x8b\x08": gzip.open,
    rb"BZh[1-9]1AY&SY": bz2.open,
    rb"\xfd7zXZ\x00": lzma.open,
    rb"\x28\xb5\x2f\xfd": _open_zstd,
}


@contextmanager
def _unpacked(file: IO[bytes]) -> Iterator[IO[bytes]]:
    with ExitStack() as stack:
        while opener := _packer(_head(file)):
            file = stack.enter_context(opener(file))
        yield file


def _packer(head: bytes) -> Callable[[IO[bytes]], Any] | None:
    return next((opener for magic, opener in _PACKERS.items() if re.match(magic, head)), None)


def _head(file: IO[bytes]) -> bytes:
    head = file.read(_HEAD)
    file.seek(0)
    return head


# What a file is

_STRANGERS = {
    rb"PAR1": "a parquet file",
    rb"PK\x03\x04": "a zip archive, as documents and checkpoints are, too",
    rb"%PDF": "a PDF",
    rb"\x89PNG|\xff\xd8\xff|GIF8": "a picture",
    rb"SQLite format 3": "an SQLite database",
    rb"ARROW1|\xff\xff\xff\xff": "an Arrow file; give the whole folder of the data set",
    rb"\x80[\x02-\x05]": "a pickle",
    rb"\x04\x22\x4d\x18": "a file in LZ4",
    rb"Obj\x01": "an Avro file",
    rb"ORC[\x00-\x1f]": "an ORC file",
    rb"\{\\rtf": "an RTF document",
    rb"(?s:.{257}ustar)": "a tar archive",
    rb"version https://git-lfs": "a pointer of Git LFS; `git lfs pull` fetches the file",
}


def _refuse_binary(path: Path, head: bytes) -> None:
    looks = next((words for magic, words in _STRANGERS.items() if re.match(magic, head)), None)
    if looks is None and not head.startswith(tuple(mark for mark, _ in _MARKS)):
        looks = _binary(head)
    if looks:
        raise _refusal(path, looks)


def _binary(head: bytes) -> str | None:
    """Words for data with NUL bytes, which no text in UTF-8 has; in JSON they spoil a record."""
    if b"\0" not in head:
        return None
    start = head.decode(errors="replace")
    if _ARRAY.match(start) or _is_json_lines(start):
        return None
    in_turn = (b"\0" in head[::2]) != (b"\0" in head[1::2])
    if in_turn and 4 * head.count(0) > len(head):
        return "UTF-16 without a byte order mark"
    return "binary data"


def _refusal(path: Path, looks: str) -> ValueError:
    return ValueError(f"{path} looks like {looks}; what can be read is {READABLE}")


_OBJECT = re.compile(r'\s*\{\s*"')
_STRING = re.compile(r'\s*"(?:[^"\\]|\\.)+"\s*$')
_PYTHON_DICT = re.compile(r"\s*\{\s*'")
_ARRAY = re.compile(  # of objects, or of strings, or empty; other elements may come first
    r'\s*\[\s*((?:[\w.+-]+\s*,\s*)*(?:\[\s*)*\{\s*["}]|"(?:[^"\\]|\\.)*"\s*[,\]]|\]\s*$)', re.DOTALL
)
_HEADING = re.compile(r'"?[\w.-]+"?(?:([,;\t])"?[\w.-]+"?)+')
_AS_TEXT = "; `format: text` reads it as text"


def _kind(path: Path, start: str, form: Form) -> Literal["text", "lines", "array"]:
    if form == "text":
        return "text"
    if _ARRAY.match(start):
        return "array"
    if form == "records" or _is_json_lines(start):
        return "lines"
    if _OBJECT.match(start):
        raise _refusal(path, "one JSON object over several lines" + _AS_TEXT)
    if _most_lines_are(_PYTHON_DICT, start):
        raise _refusal(path, "dicts of Python, not JSON" + _AS_TEXT)
    if start.lstrip().startswith('"') and _most_lines_are(_STRING, start):
        raise _refusal(path, "JSON strings, not objects, one a line" + _AS_TEXT)
    if _is_table(path, start):
        raise _refusal(path, "a table (CSV)" + _AS_TEXT)
    return "text"


def _is_json_lines(start: str) -> bool:
    """Whether the first line, or more than half of the lines, are JSON objects."""
    first = next((line for line in start.split("\n") if line.strip()), "")
    return _most_lines_are(_OBJECT, start) or bool(_parsed("", first).fields)


def _most_lines_are(form: re.Pattern[str], start: str) -> bool:
    lines = [line for line in start.split("\n") if line.strip()]
    return 2 * sum(bool(form.match(line)) for line in lines) > len(lines)


def _is_table(path: Path, start: str) -> bool:
    """Whether a file is named as a table, or rows follow a heading of as many names."""
    if {".csv", ".tsv"} & {suffix.lower() for suffix in path.suffixes}:
        return True
    heading, _, rest = start.partition("\n")
    found = _HEADING.fullmatch(heading.rstrip("\r"))
    if found is None:
        return False
    lines = rest.splitlines()[:-1] if len(start) >= _HEAD else rest.splitlines()
    rows = [row for row in csv.reader(lines, delimiter=found[1]) if row]
    width = len(heading.split(found[1]))
    return bool(rows) and all(len(row) == width for row in rows)


# Plain text


def _text(path: Path, file: IO[bytes], encoding: str, head: bytes) -> str:
    try:
        with io.TextIOWrapper(file, encoding) as stream:
            text = stream.read()
    except UnicodeDecodeError as error:
        raise _no_text(path, error, head) from None
    if "\0" in text:
        raise _refusal(path, "binary data")
    return text


def _no_text(path: Path, error: UnicodeDecodeError, head: bytes) -> ValueError:
    if not error.encoding.startswith("utf-8"):
        said = error.encoding.upper()
        return ValueError(f"{path} is not UTF-8 text, nor {said}, as its first bytes say ({error})")
    control = re.search(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]", head)
    looks = "binary data" if control else "text in an 8-bit encoding such as Latin-1"
    return ValueError(
        f"{path} is not UTF-8 text (byte {error.start} is 0x{error.object[error.start]:02x}); it "
        f"looks like {looks}; convert it, or leave it out"
    )


# JSON

_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


def _lines(path: Path, stream: IO[str]) -> Iterator[Record]:
    # The stream's lines end at line feeds only: JSON strings may hold other separators, as U+2028.
    for number, line in enumerate(stream, 1):
        if line.strip():
            yield _parsed(f"{path}, line {number}", line)


def _parsed(place: str, text: str) -> Record:
    """The record in the text of a JSON object."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return Record(place, {}, "bytes that are not UTF-8")
    try:
        fields = json.loads(text)
        if _HALF_PAIR.search(text):
            json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return Record(place, {}, "half of a surrogate pair, which is not a character")
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return Record(place, {}, f"not a JSON object: {text.strip()[:60]!r}")
    return Record(place, fields)


_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|["\[\]{},]', re.DOTALL)


def _elements(path: Path, stream: IO[str]) -> Iterator[Record]:
    """The elements of a JSON array, told apart by brackets: a bad one spoils no other."""
    line, number = 1, 0
    for element in _split(path, stream):
        before = element[: len(element) - len(element.lstrip())]
        if element.strip():
            number += 1
            place = f"{path}, record {number}, line {line + before.count(chr(10))}"
            yield _parsed(place, element)
        line += element.count("\n")


def _split(path: Path, stream: IO[str]) -> Iterator[str]:
    """The text between the commas of the outermost array, white space included."""
    text = stream.read(_CHUNK)
    at = text.index("[") + 1
    text = text.replace("[", " ", 1)
    start, depth, ended = 0, 1, False
    while not ended:
        found = _TOKEN.search(text, at)
        if found is None or found[0] == '"':  # the rest of a string is still to be read
            more = stream.read(_CHUNK)
            if not more:
                break
            text, at = text[start:] + more, (found.start() if found else len(text)) - start
            start = 0
            continue
        at = found.end()
        depth += (found[0] in "[{") - (found[0] in "]}")
        ended = depth == 0
        if ended or (found[0] == "," and depth == 1):
            yield text[start : found.start()]
            start = at
    if not ended:
        raise ValueError(f"{path} is a JSON array without an end; it is damaged or cut off")
    if (text[start:] + stream.read(_CHUNK)).strip():
        raise ValueError(
            f"{path} goes on behind the end of its JSON array; JSON lines have one object a line"
        )


# Parquet


def _parquet_rows(path: Path, file: IO[bytes]) -> Iterator[Record]:
    try:
        from pyarrow import ArrowException  # pyright: ignore[reportMissingImports]
        from pyarrow.parquet import ParquetFile  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError("a parquet file needs: pip install 'selfspec[train]'") from None
    number = 0
    try:
        for batch in ParquetFile(file).iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield Record(f"{path}, row {number}", without_nulls(row))
    except (ArrowException, UnicodeDecodeError) as error:
        text = " ".join(str(error).split())
        raise ValueError(f"{path} is a damaged parquet file, behind row {number}: {text}") from None


def without_nulls(value: object) -> Any:
    """A row of Arrow without its nulls, which stand for absent fields, too."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value
