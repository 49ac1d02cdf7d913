"""A file is told by its content: the same records from every kind, and refusals of all others."""

import bz2
import gzip
import importlib.util
import io
import json
import lzma
import pickle
import sys
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from selfspec.records import Record, read_records, sound_fields

ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-32"]
LAYOUTS = ["lines", "lines of Windows", "array", "indented array"]


def _zstd():
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


PACKERS = {"none": bytes, "gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}
if zstd := _zstd():
    PACKERS["zstd"] = zstd.compress

characters = st.characters(exclude_categories=["Cs"])
values = st.one_of(st.none(), st.booleans(), st.integers(), st.text(characters, max_size=20))
records = st.lists(
    st.dictionaries(st.text(characters, max_size=5), values, min_size=1, max_size=3),
    min_size=1,
    max_size=5,
)
within = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def as_json(fields, layout, ascii_only):
    """The text of records in a layout."""
    lines = [json.dumps(each, ensure_ascii=ascii_only) for each in fields]
    if layout == "lines":
        return "\n".join(lines)
    if layout == "lines of Windows":
        return "\r\n\r\n".join(lines) + "\r\n"
    return json.dumps(fields, ensure_ascii=ascii_only, indent=2 if "indented" in layout else None)


def read(path, content, form="auto"):
    path.write_bytes(content)
    return list(read_records(path, form))


# Read


@within
@given(
    fields=records,
    layout=st.sampled_from(LAYOUTS),
    encoding=st.sampled_from(ENCODINGS),
    packer=st.sampled_from(sorted(PACKERS)),
    ascii_only=st.booleans(),
    name=st.sampled_from(["a.jsonl", "a.json", "a.ndjson", "A.JSONL", "a.txt", "a", "a.gz"]),
)
def test_records_are_the_same_from_every_layout_encoding_and_compression(
    tmp_path, fields, layout, encoding, packer, ascii_only, name
):
    content = PACKERS[packer](as_json(fields, layout, ascii_only).encode(encoding))
    found = read(tmp_path / name, content)
    assert [record.fields for record in found] == fields
    assert not any(record.fault for record in found)


@within
@given(
    text=st.text(st.sampled_from("abc ,.;\n{}[]\"':é☃\u2028"), min_size=1),
    encoding=st.sampled_from(ENCODINGS),
    packer=st.sampled_from(sorted(PACKERS)),
)
@example(text="the sea, the sky\nthe oak, the ash\n", encoding="utf-8", packer="none")
@example(text="{}\n", encoding="utf-8", packer="none")
@example(text="[Illustration]\n\nI.\n", encoding="utf-8", packer="none")
@example(text="import os\nimport re\n", encoding="utf-8", packer="none")
def test_plain_text_is_one_record_as_it_stands(tmp_path, text, encoding, packer):
    assume(text.strip())
    path = tmp_path / "a.jsonl"
    content = PACKERS[packer](text.encode(encoding))
    assert read(path, content, "text") == [Record(str(path), {"text": text})]
    assume(text.lstrip()[0] not in '{["' and not {",", ";"} & set(text.split("\n")[0]))
    assert read(path, content) == [Record(str(path), {"text": text})]


def test_no_text_is_no_record(tmp_path):
    for content in (b"", b"\n \n", gzip.compress(b"")):
        assert read(tmp_path / "a.txt", content) == []


def test_prose_with_a_comma_in_every_line_is_no_table(tmp_path):
    text = "the east train ran on; then the rain began, and an open boat ran in there.\n" * 4
    assert [record.fields for record in read(tmp_path / "a.txt", text.encode())] == [{"text": text}]


@pytest.mark.skipif(not importlib.util.find_spec("pyarrow"), reason="pyarrow is not installed")
@given(fields=records)
@within
def test_parquet_gives_the_fields_that_are_not_null(tmp_path, fields):
    import pyarrow
    from pyarrow.parquet import write_table

    as_text = [{f"f{key}": str(v) for key, v in each.items() if v is not None} for each in fields]
    names = sorted({name for each in as_text for name in each} | {"one"})
    columns = {name: [each.get(name) for each in as_text] for name in names}
    write_table(pyarrow.table(columns), tmp_path / "a")
    assert [record.fields for record in read_records(tmp_path / "a")] == as_text
    rows = [record.place for record in read_records(tmp_path / "a")]
    assert rows == [f"{tmp_path / 'a'}, row {n}" for n in range(1, len(fields) + 1)]


def test_large_elements_of_an_array_come_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("selfspec.records._CHUNK", 7)
    fields = [
        {"text": 'a "quoted" \\ [word], {another}' * n, "more": [n, {"x": "]"}]} for n in (1, 9)
    ]
    found = read(tmp_path / "a.json", json.dumps(fields, indent=1).encode())
    assert [record.fields for record in found] == fields
    assert [record.place.rpartition(", ")[2] for record in found] == ["line 2", "line 11"]


def test_memory_does_not_grow_with_the_file(tmp_path):
    line = json.dumps({"text": "the sea " * 100}) + "\n"
    for name, start, between, end in (("a", "", "", ""), ("b", "[", ",", "{}]")):
        path = tmp_path / name
        path.write_text(start + (line + between) * 10_000 + end)
        tracemalloc.start()
        count = sum(1 for _ in read_records(path))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert count >= 10_000 and peak < path.stat().st_size / 2


# Damaged records

DAMAGE = ["plain words", '{"text": }', '{"text": "a"} {', '{"text": nul}', "7", '["a"]', "null"]
DAMAGE += ['{"text": "\\ud83d"}', "{'text': 'a'}", '{"text": "a",}', '{"text": "a\0"}', "\0" * 9]


@within
@given(
    count=st.integers(2, 6), data=st.data(), damage=st.sampled_from([*DAMAGE, '{"text": "\udce9"}'])
)
def test_a_bad_line_costs_itself_and_is_named(tmp_path, count, data, damage):
    bad = data.draw(st.integers(1, count - 1))
    lines = [json.dumps({"text": str(n)}) for n in range(count)]
    lines[bad] = damage
    found = read(tmp_path / "a", "\n".join(lines).encode(errors="surrogateescape"))
    assert [bool(record.fault) for record in found] == [n == bad for n in range(count)]
    assert found[bad].place == f"{tmp_path / 'a'}, line {bad + 1}"
    assert all(r.fields == {"text": str(n)} for n, r in enumerate(found) if n != bad)
    with pytest.raises(ValueError, match=rf"a, line {bad + 1}: \w") as caught:
        list(sound_fields(tmp_path / "a"))
    assert "\n" not in str(caught.value)


@within
@given(count=st.integers(2, 6), data=st.data(), damage=st.sampled_from(DAMAGE))
def test_a_bad_element_costs_itself_and_is_named(tmp_path, count, data, damage):
    assume("} {" not in damage)  # which no bracket closes
    bad = data.draw(st.integers(1, count - 1))
    elements = [json.dumps({"text": str(n)}) for n in range(count)]
    elements[bad] = damage
    found = read(tmp_path / "a", f"[{','.join(elements)}]".encode())
    assert [bool(record.fault) for record in found] == [n == bad for n in range(count)]
    assert f"record {bad + 1}, line 1" in found[bad].place


@pytest.mark.parametrize("first", ["null", "1", "-2.5e3", "true", "null, 7"])
def test_an_array_of_objects_may_begin_with_something_else(tmp_path, first):
    found = read(tmp_path / "a", f'[{first}, {{"text": "0"}}, {{"text": "1"}}]'.encode())
    bad = first.count(",") + 1
    assert [bool(record.fault) for record in found] == [True] * bad + [False] * 2


@pytest.mark.parametrize("content", ['[{"a": 1}, {"b": 2', '[{"a": "b'])
def test_an_array_without_an_end_is_refused(tmp_path, content):
    with pytest.raises(ValueError, match="is a JSON array without an end"):
        read(tmp_path / "a.json", content.encode())


def test_arrays_in_lines_are_refused(tmp_path):
    with pytest.raises(ValueError, match="goes on behind the end of its JSON array"):
        read(tmp_path / "a.json", b'[{"role": "user"}]\n[{"role": "user"}]\n')
    nested = json.dumps([[{"role": "user"}], [{"role": "user"}]])
    faults = [record.fault for record in read(tmp_path / "a.json", nested.encode())]
    assert len(faults) == 2 and all("not a JSON object: '[{" in fault for fault in faults)


@within
@given(packer=st.sampled_from(sorted(PACKERS)), share=st.floats(0.2, 0.95))
def test_what_is_cut_off_is_refused(tmp_path, packer, share):
    assume(packer != "none")
    lines = "".join(json.dumps({"n": n, "hash": hash(str(n))}) + "\n" for n in range(300))
    whole = PACKERS[packer](lines.encode())
    with pytest.raises(ValueError, match="damaged or cut off") as caught:
        read(tmp_path / "a.jsonl", whole[: int(share * len(whole))])
    assert str(tmp_path / "a.jsonl") in str(caught.value)


# Refused


def _zip():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", "the sea")
    return file.getvalue()


def _tar():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    return file.getvalue()


STRANGERS = {
    "a zip archive": _zip(),
    "a tar archive": _tar(),
    "a PDF": b"%PDF-1.7\n%\xe2\xe3",
    "a picture": b"\x89PNG\r\n\x1a\n\0\0",
    "an SQLite database": b"SQLite format 3\0",
    "an Arrow file": b"ARROW1\0\0",
    "a pickle": pickle.dumps({"a": 1}),
    "a file in LZ4": b"\x04\x22\x4d\x18 words",
    "an Avro file": b"Obj\x01\x04\x14avro.codec",
    "an ORC file": b"ORC\x08\x03\x10",
    "an RTF document": rb"{\rtf1\ansi words}",
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "binary data": b"a\0\0b" * 9,
    "UTF-16 without": "the sea".encode("utf-16-le"),
    "an 8-bit encoding such as Latin-1": "un café déjà fermé".encode("latin-1"),
    "one JSON object over several lines": b'{\n "data": [\n  1\n ]\n}\n',
    "dicts of Python": b"{'text': 'one'}\n{'text': 'two'}\n",
    "JSON strings, not objects": b'"the \\"sea\\""\n"on it"\n',
    r"a table \(CSV\)": b"prompt,completion\nHi.,Hello.\n",
}


@pytest.mark.parametrize("packer", sorted(PACKERS))
@pytest.mark.parametrize("looks", STRANGERS)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_other_files_are_refused_by_what_they_look_like(tmp_path, looks, packer, name):
    with pytest.raises(ValueError, match=rf"{name} .*{looks}") as caught:
        read(tmp_path / name, PACKERS[packer](STRANGERS[looks]))
    assert "\n" not in str(caught.value)


def test_binary_data_behind_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match="looks like binary data"):
        read(tmp_path / "a.md", b"the sea\n" * 9 + b"\0")
    for tail, looks in ((b"\0", "binary data"), (b"\xff\x01", "not UTF-8 text")):
        with pytest.raises(ValueError, match=looks):
            read(tmp_path / "a.md", b"the sea\n" * 9000 + tail)


def test_text_with_quoted_lines_is_text(tmp_path):
    text = '"The sea."\n"On it?" she said.\nAnd left.\n"At 5" or "6"\n'
    assert read(tmp_path / "a.txt", text.encode())[0].fields == {"text": text}
    strings = '"The sea."\n"On it."\n'
    assert read(tmp_path / "a.txt", strings.encode(), "text")[0].fields == {"text": strings}


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_tables_are_refused_unless_they_are_said_to_be_text(tmp_path, separator):
    text = f"prompt{separator}answer_1\n" + f'"one, two{separator} three"{separator}4\n' * 3
    with pytest.raises(ValueError, match=r"a table \(CSV\); `format: text` reads it as text"):
        read(tmp_path / "a.txt", text.encode())
    assert read(tmp_path / "a.txt", text.encode(), "text")[0].fields == {"text": text}
    with pytest.raises(ValueError, match="a table"):
        read(tmp_path / "a.CSV", b"the sea")


def test_a_byte_order_mark_is_taken_at_its_word(tmp_path):
    with pytest.raises(ValueError, match="not UTF-8 text, nor UTF-16"):
        read(tmp_path / "a.txt", b"\xff\xfe\xfa")


@pytest.mark.parametrize(
    ("content", "names", "package"),
    [
        (b"PAR1" + b"x" * 40 + b"PAR1", ["pyarrow"], r"selfspec\[train\]"),
        (b"\x28\xb5\x2f\xfd", ["compression", "backports"], r"backports\.zstd"),
    ],
)
def test_a_package_that_is_not_there_is_named(tmp_path, monkeypatch, content, names, package):
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"pip install '?{package}"):
        read(tmp_path / "a", content)


@pytest.mark.skipif(not importlib.util.find_spec("pyarrow"), reason="pyarrow is not installed")
def test_a_damaged_parquet_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a is a damaged parquet file") as caught:
        read(tmp_path / "a", b"PAR1" + bytes(range(128, 256)) * 4 + b"PAR1")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_keeps_its_own_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        list(read_records(Path(tmp_path / "none")))
