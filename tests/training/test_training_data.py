"""Text becomes blocks: every kind of source, no leak between documents, errors that say where."""

import gzip
import importlib.util
import json
import sys
import types

import pytest
import torch
from conftest import VOCAB, tiny_llama
from transformers import AutoModelForCausalLM, GPT2Config

from selfspec.apps.bench.prompts import clean_prose
from training import evaluate
from training.data import Document, Mixture, SourceConfig, collate, pack, read_texts, tokenize
from training.data.chats import BadRecord, chat_documents, read_chat
from training.data.sources import find_files
from training.language.task import HeldOut, LanguageModelling, held_out_windows, model_inputs
from training.loop.loop import LoopConfig

TEMPLATE = (
    "{% for m in messages %}({{ m.role }}) {{ m.content }};\n{% endfor %}"
    "{% if add_generation_prompt %}(assistant) {% endif %}"
)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8", newline="")
    return str(path)


def write_lines(path, *records):
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


def texts(**source):
    return list(read_texts(SourceConfig(**source)))


def chat(*turns):
    """A chat record: user and assistant in turns."""
    roles = ["user", "assistant"]
    return {"messages": [{"role": roles[n % 2], "content": t} for n, t in enumerate(turns)]}


@pytest.fixture
def chatty(tokenizer):
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def chat_document(record, tokenizer):
    (document,) = chat_documents(read_chat(record), tokenizer)
    return document


def learned(document, tokenizer):
    """The text of the trained tokens, runs of them apart."""
    runs, open_run = [], False
    for token, trained in zip(document.tokens, document.trained, strict=True):
        if trained and not open_run:
            runs.append([])
        if trained:
            runs[-1].append(token)
        open_run = trained
    return [tokenizer.decode(run) for run in runs]


# Sources


def test_a_text_file_is_one_document(tmp_path):
    path = write(tmp_path / "a.txt", "one\n\n{two}\n")
    assert texts(files=[path]) == ["one\n\n{two}\n"]
    assert texts(files=[path], template="<{text}>") == ["<one\n\n{two}\n>"]
    assert texts(files=[path], max_characters=5) == ["one\n\n"]


def test_globs_are_sorted_and_each_file_comes_once(tmp_path):
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "d.md"):
        write(tmp_path / name, name)
    patterns = [str(tmp_path / "b.txt"), str(tmp_path / "**" / "*.txt")]
    assert texts(files=patterns) == ["a.txt", "b.txt", "deep/er/c.txt"]
    assert texts(files=patterns, exclude=["*/deep/*"]) == ["a.txt", "b.txt"]


def test_a_name_with_brackets_is_a_name(tmp_path):
    path = write(tmp_path / "part[1].txt", "the sea")
    write(tmp_path / "part1.txt", "the top")
    assert texts(files=[path]) == ["the sea"]
    assert texts(files=[str(tmp_path / "part[0-9].txt")]) == ["the top"]


def test_home_and_the_standard_library_are_known(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "a.txt", "at home")
    assert texts(files=["~/a.txt"]) == ["at home"]
    json_files = {"files": ["{stdlib}/json/*.py"], "exclude": ["{stdlib}/json/__init__.py"]}
    names = {path.name for path in find_files(SourceConfig(**json_files))}
    assert "decoder.py" in names and "__init__.py" not in names


def test_json_lines_go_through_the_template(tmp_path):
    records = [{"q": "why", "a": 1, "n": 5}, {"q": "how", "a": 2, "n": 9}]
    path = write_lines(tmp_path / "a.jsonl", *records)
    both = ["why: 1", "how: 2"]
    assert texts(files=[path], template="{q}: {a}") == both
    assert texts(files=[path], template="{q}: {a}", where={"n": (6, 9)}) == both[1:]
    assert texts(files=[path], template="{q}: {a}", where={"n": (5, 9), "a": (0, 1)}) == both[:1]
    as_text = write(tmp_path / "b.txt", "{}\n")
    assert texts(files=[as_text]) == ["{}\n"]
    with pytest.raises(ValueError, match="names 'text'"):
        texts(files=[as_text], format="jsonl")


def test_only_newlines_end_a_json_line(tmp_path):
    text = "a\u2028b\u0085c\x0bd"
    line = json.dumps({"text": text[:-2]}, ensure_ascii=False) + "\r\n\n"
    path = write(tmp_path / "a.jsonl", line + '{"text": "e"}')
    assert texts(files=[path]) == [text[:-2], "e"]


def test_prose_is_folded():
    text = "\u201cIt\u2019s\nlate,\u201d he  said.\n\n\n  And\tleft. \n \n"
    assert clean_prose(text) == '"It\'s late," he said.\nAnd left.'


def test_prose_is_cleaned_before_it_is_cut(tmp_path):
    path = write(tmp_path / "a.txt", "a   b\nc\n\nd")
    assert texts(files=[path], clean="prose", max_characters=6) == ["a b c\n"]


def test_documents_stand_between_the_tokenizers_ends(tmp_path, tokenizer):
    source = SourceConfig(files=[write(tmp_path / "a.txt", "the ox")])
    (plain,) = tokenize(source, tokenizer)
    assert tokenizer.decode(plain.tokens) == "the ox" and all(plain.trained)
    tokenizer.bos_token, tokenizer.eos_token = "A", "B"
    (ended,) = tokenize(source, tokenizer)
    ends = [tokenizer.bos_token_id, *plain.tokens, tokenizer.eos_token_id]
    assert ended.tokens == ends and all(ended.trained)


def test_a_source_has_one_origin():
    for origin in ({}, {"files": ["a"], "dataset": "b"}):
        with pytest.raises(ValueError, match="either `files` or a `dataset`"):
            SourceConfig(**origin)


# Data sets by name


def test_a_data_set_by_name(monkeypatch):
    asked = []

    def load_dataset(name, subset, split):
        asked.append((name, subset, split))
        return iter([{"q": "one"}, {"q": "two"}])

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # pyright: ignore
    monkeypatch.setitem(sys.modules, "datasets", module)
    source = {"dataset": "some/set", "subset": "main", "split": "test", "template": "{q}!"}
    assert texts(**source) == ["one!", "two!"]
    assert asked == [("some/set", "main", "test")]


def test_a_data_set_needs_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"needs: pip install 'selfspec\[train\]'"):
        texts(dataset="some/set")


def test_a_folder_that_datasets_saved_is_a_file(tmp_path, monkeypatch):
    asked = []

    def load_from_disk(folder):
        asked.append(folder)
        rows = [{"text": "one", "more": None}, {"text": None}]
        return {"train": rows, "test": rows[:1]} if folder.endswith("several") else rows

    module = types.ModuleType("datasets")
    module.load_from_disk = load_from_disk  # pyright: ignore
    monkeypatch.setitem(sys.modules, "datasets", module)
    write(tmp_path / "several" / "dataset_dict.json", "{}")
    for name in ("single", "several/train"):
        write(tmp_path / name / "state.json", "{}")
        write(tmp_path / name / "dataset_info.json", "{}")
    for name in ("single", "several"):
        folder = str(tmp_path / name)
        for origin in ({"files": [folder]}, {"dataset": folder}):
            assert texts(**origin, max_bad_share=0.5) == ["one"]
            with pytest.raises(ValueError, match=f"{name}, row 2: .*'text'"):
                texts(**origin)
    assert texts(files=[str(tmp_path / "several")], split="test") == ["one"]
    everything = SourceConfig(files=[str(tmp_path / "**" / "*")])
    assert [path.name for path in find_files(everything)] == ["several", "single"]
    with pytest.raises(ValueError, match=r"has the splits \['test', 'train'\], not `split` 'dev'"):
        texts(files=[str(tmp_path / "several")], split="dev")
    assert set(asked) == {str(tmp_path / "single"), str(tmp_path / "several")}


@pytest.mark.skipif(not importlib.util.find_spec("datasets"), reason="datasets is not installed")
def test_a_data_set_of_the_library_itself(tmp_path):
    write_lines(tmp_path / "train.jsonl", {"text": "one"}, {"text": "two"})
    assert texts(dataset=str(tmp_path)) == ["one", "two"]
    import datasets

    saved = datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}])
    saved.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": saved, "test": saved.select([1])}).save_to_disk(tmp_path / "all")
    for name in ("saved", "all", "all/train"):
        for origin in ({"files": [str(tmp_path / name)]}, {"dataset": str(tmp_path / name)}):
            assert texts(**origin) == ["one", "two"]
    assert texts(files=[str(tmp_path / "all")], split="test") == ["two"]


def _cut(folder):
    (arrow,) = folder.glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:300])


def _lost(folder):
    next(folder.glob("*.arrow")).unlink()


def _garbled(folder):
    (folder / "state.json").write_text("{")


@pytest.mark.skipif(not importlib.util.find_spec("datasets"), reason="datasets is not installed")
@pytest.mark.parametrize("damage", [_cut, _lost, _garbled])
def test_a_damaged_data_set_is_named(tmp_path, damage):
    import datasets

    datasets.Dataset.from_list([{"text": "one"}]).save_to_disk(tmp_path / "saved")
    damage(tmp_path / "saved")
    with pytest.raises(ValueError, match="saved is a damaged data set: its first row") as caught:
        texts(files=[str(tmp_path / "saved")])
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not importlib.util.find_spec("datasets"), reason="datasets is not installed")
def test_chats_of_data_sets_have_the_fields_that_are_not_null(tmp_path, chatty):
    """Arrow gives every turn the fields of all, as null."""
    import datasets

    turns = chat("the sea", "the top", "a ban", "on it")["messages"]
    turns[1] |= {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    turns[3]["weight"] = 1
    saved = datasets.Dataset.from_list([{"messages": turns}, chat("the sea", "on it")])
    saved.save_to_disk(tmp_path / "saved")
    saved.to_parquet(tmp_path / "a.parquet")
    for name in ("saved", "a.parquet"):
        found = [*tokenize(SourceConfig(files=[str(tmp_path / name)]), chatty)]
        assert [learned(document, chatty) for document in found] == [
            ["on it;\n"],  # this template does not show calls
            ["on it;\n"],
        ]


# Chats


def test_a_chat_is_rendered_by_the_template_and_only_replies_are_learned(tmp_path, chatty):
    record = chat("the sea", "the top", "a ban", "on it", "and then")
    path = write_lines(tmp_path / "a.jsonl", record, chat("hi"))
    (document,) = tokenize(SourceConfig(files=[path]), chatty)
    whole = chatty.apply_chat_template(record["messages"][:4], tokenize=False)
    assert chatty.decode(document.tokens) == whole
    assert learned(document, chatty) == ["the top;\n", "on it;\n"]


def test_a_token_that_begins_in_the_prompt_is_not_learned(chatty):
    chatty.chat_template = TEMPLATE.replace("(assistant) ", "t").replace("({{ m.role }}) ", "t")
    document = chat_document(chat("on", "he op"), chatty)
    assert chatty.decode(document.tokens) == "ton;\nthe op;\n"
    assert learned(document, chatty) == [" op;\n"]


def test_a_tokenizer_without_a_template_is_refused(tmp_path, tokenizer):
    source = SourceConfig(files=[write_lines(tmp_path / "a.jsonl", chat("a", "b"))])
    with pytest.raises(ValueError, match=r"no chat template .*; set tokenizer\.chat_template"):
        list(tokenize(source, tokenizer))


@pytest.mark.parametrize(
    ("record", "refusal"),
    [
        ({"text": "a"}, r"a list `messages`, got fields \['text'\]"),
        ({"messages": []}, r"a list `messages` of at least one message, got \[\]"),
        ({"messages": ["hi"]}, "a chat message has a `role` and a `content`, got 'hi'"),
        ({"messages": [{"content": "hi"}]}, "a chat message has a `role`"),
    ],
)
def test_a_record_that_is_no_chat_is_refused(chatty, record, refusal):
    with pytest.raises(BadRecord, match=refusal):
        chat_document(record, chatty)


def test_a_chat_without_replies_leaves_nothing_to_learn(tmp_path, chatty):
    path = write_lines(tmp_path / "a.jsonl", chat("the sea"), chat("the top"))
    with pytest.raises(ValueError, match="less than one block"):
        Mixture.read([SourceConfig(files=[path])], chatty, 4, 0)
    document = Document([1, 2, 3, 4], [False] * 4)
    with pytest.raises(ValueError, match="nothing in some text is to be learned"):
        pack([document], 2, "some text")


# Errors of files


def test_a_folder_with_a_state_of_its_own_is_no_data_set(tmp_path):
    write(tmp_path / "state.json", "{}")
    write(tmp_path / "a.txt", "the sea")
    with pytest.raises(FileNotFoundError, match="is a folder"):
        texts(files=[str(tmp_path)])
    assert texts(files=[str(tmp_path / "*.txt")]) == ["the sea"]


def test_a_pattern_without_files_is_named(tmp_path):
    write(tmp_path / "a.txt", "a")
    absent = str(tmp_path / "*.md")
    with pytest.raises(FileNotFoundError, match=r"no file matches .*\*\.md"):
        texts(files=[str(tmp_path / "a.txt"), absent])
    with pytest.raises(FileNotFoundError, match=r"is a folder.* as .*/\* or .*/\*\*/\*"):
        texts(files=[str(tmp_path)])
    with pytest.raises(FileNotFoundError, match="`exclude` leaves none of the files"):
        texts(files=[str(tmp_path / "*")], exclude=["*.txt"])


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        ('{"text": "b"', r"a\.jsonl, line 3: not a JSON object: '\{"),
        ("[1]", r"a\.jsonl, line 3: not a JSON object: '\[1\]'"),
        ("plain words", r"a\.jsonl, line 3: not a JSON object: 'plain words'"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, refusal):
    path = write(tmp_path / "a.jsonl", '{"text": "a"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=refusal):
        texts(files=[path])


def test_a_field_that_is_not_there_is_named(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"question": "a", "id": "x"})
    with pytest.raises(ValueError, match=r"template of .* names 'text', a record has \['id', 'qu"):
        texts(files=[path])
    with pytest.raises(ValueError, match=r"`where` of .* names 'task', a record has \['id', 'qu"):
        texts(files=[path], template="{question}", where={"task": (0, 1)})
    with pytest.raises(
        ValueError, match=r"`where` of .* compares numbers, 'id' of a record is 'x'"
    ):
        texts(files=[path], template="{question}", where={"id": (0, 1)})


@pytest.mark.parametrize("template", ["{text", "{}", "{text.title}", "{text[0]}", "{text!q}"])
def test_a_template_is_checked_before_text_is_read(template):
    with pytest.raises(ValueError, match="template"):
        SourceConfig(files=["a"], template=template)


@pytest.mark.parametrize("content", ["", "the"])
def test_text_shorter_than_a_block_is_refused(tmp_path, tokenizer, content):
    path = write(tmp_path / "a.txt", content)
    count = len(tokenizer(content).input_ids)
    held = rf"a\.txt holds {count} tokens in {min(count, 1)} documents"
    refusal = held + ", less than one block of 8; give more"
    with pytest.raises(ValueError, match=refusal):
        Mixture.read([SourceConfig(files=[path])], tokenizer, 8, 0)


def test_an_empty_data_set_is_refused(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", "\n")
    with pytest.raises(ValueError, match="holds 0 tokens in 0 documents"):
        Mixture.read([SourceConfig(files=[path])], tokenizer, 8, 0)


def test_held_out_text_shorter_than_a_window_is_refused(tmp_path, tokenizer):
    source = SourceConfig(files=[write(tmp_path / "a.txt", "the sea")])
    with pytest.raises(ValueError, match=r"a\.txt does not hold one window of 64 tokens"):
        held_out_windows(source, tokenizer, 64, 1)


# Bad records among good ones


GOOD = {"text": "the sea", "n": 5}
BAD = [
    ({"text": None, "n": 5}, "the field 'text' is null"),
    ({"text": ["the sea"], "n": 5}, "the field 'text' is a list"),
    ({"text": True, "n": 5}, "the field 'text' is a bool"),
    ({"text": float("nan"), "n": 5}, "the field 'text' is a float"),
    ({"n": 5}, "names 'text'"),
    ({"text": "the sea"}, "names 'n'"),
    ({"text": "the sea", "n": None}, "'n' of a record is None"),
    ({"messages": [{"role": "user", "content": None}]}, "`where` of"),
]


@pytest.mark.parametrize(("record", "reason"), BAD)
def test_a_bad_record_is_skipped_and_summed_up(tmp_path, capsys, record, reason):
    path = write_lines(tmp_path / "a.jsonl", *[GOOD] * 60, record, *[GOOD] * 60)
    source = {"files": [path], "where": {"n": (0, 9)}}
    assert texts(**source) == ["the sea"] * 120
    first, total = capsys.readouterr().out.splitlines()
    assert first.startswith(f"skipped {path}, line 61: ") and reason in first
    assert total == f"{path}: skipped 1 bad records of 121"


def test_more_than_a_share_stops_the_run_and_the_share_can_be_set(tmp_path, tokenizer, capsys):
    records = [GOOD] * 97 + [{"text": None}] * 3
    source = {"files": [write_lines(tmp_path / "a.jsonl", *records)]}
    refusal = r"3 of the 100 records of .* cannot be used, more than max_bad_share \(0\.01\) allows"
    for read in (texts, lambda **s: Mixture.read([SourceConfig(**s)], tokenizer, 8, 0)):
        with pytest.raises(ValueError, match=refusal + r": .*a\.jsonl, line 98: ") as caught:
            read(**source)
        assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""
    assert texts(**source, max_bad_share=0.03) == ["the sea"] * 97
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_many_bad_records_are_not_all_printed(tmp_path, capsys):
    records = [{"text": None}] * 150
    path = write_lines(tmp_path / "a.jsonl", *records)
    assert texts(files=[path], max_bad_share=1) == []
    *shown, more, total = capsys.readouterr().out.splitlines()
    assert len(shown) == 100 and more == "skipped 50 more" and "150 bad records" in total


def test_chats_without_a_reply_are_counted_and_stop_nothing(tmp_path, chatty, capsys):
    path = write_lines(tmp_path / "a.jsonl", chat("the sea"), chat("the top", "on it"), chat("hi"))
    (document,) = tokenize(SourceConfig(files=[path]), chatty)
    assert learned(document, chatty) == ["on it;\n"]
    assert f"{path}: 2 of 3 records have no reply to train on" in capsys.readouterr().out


def test_files_of_every_kind_are_one_source(tmp_path, chatty, capsys):
    """Chats and texts, each with a bad record."""
    write(tmp_path / "in" / "a.md", "the sea")
    lines = [json.dumps(record) for record in [GOOD] * 9 + [{"text": None}]]
    write(tmp_path / "in" / "b.txt", "\n".join(lines))
    write(tmp_path / "in" / "c", "[" + ",\n".join(lines) + "]")
    (tmp_path / "in" / "d.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode("utf-16")))
    chats = [json.dumps(record) for record in [chat("on", "it")] * 9 + [{"messages": []}]]
    write(tmp_path / "in" / "e.json", "\n".join(chats))
    source = SourceConfig(files=[str(tmp_path / "in" / "*")], max_bad_share=0.2)
    found = [learned(document, chatty) for document in tokenize(source, chatty)]
    assert found == [["the sea"]] * 28 + [["it;\n"]] * 9
    *skipped, total = capsys.readouterr().out.splitlines()
    places = ["b.txt, line 10", "c, record 10, line 10", "d.jsonl.gz, line 10", "e.json, line 10"]
    assert len(skipped) == 4 and "skipped 4 bad records of 41" in total
    for line, place in zip(skipped, places, strict=True):
        assert line.startswith(f"skipped {tmp_path / 'in' / place}: ")


# Packing


def documents(*lengths, seed=0):
    source = torch.Generator().manual_seed(seed)
    rows = [torch.randint(1, VOCAB, (n,), generator=source).tolist() for n in lengths]
    return [Document(row, [True] * len(row)) for row in rows]


def gpt2(attention):
    shape = {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 32, "vocab_size": VOCAB}
    torch.manual_seed(0)
    config = GPT2Config(**shape, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.double().eval()


def llama(attention):
    return tiny_llama(attn_implementation=attention)


@pytest.mark.parametrize("family", [llama, gpt2])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_document_in_a_block_is_as_if_alone(family, attention):
    model = family(attention)
    assert model.config._attn_implementation == attention
    # Llama's eager attention takes its softmax in float32.
    tolerance = 1e-5 if (family, attention) == (llama, "eager") else 1e-10
    parts = documents(5, 1, 8, 3, 15)
    batch = collate([pack(parts, 16, "text")[n] for n in range(2)])
    with torch.no_grad():
        packed = model(**model_inputs(model, batch)).logits
        for row, (first, last) in [(0, (0, 5)), (0, (5, 6)), (0, (6, 14)), (0, (14, 16))]:
            ids = batch.tokens[row, first:last]
            alone = model(input_ids=ids[None]).logits[0]
            assert torch.allclose(packed[row, first:last], alone, atol=tolerance)
        rest = model(input_ids=batch.tokens[1, 1:][None]).logits[0]
    assert torch.allclose(packed[1, 1:], rest, atol=tolerance)


@pytest.mark.parametrize("family", [llama, gpt2])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_packed_loss_is_the_sum_of_the_documents_losses(family, attention):
    model = family(attention)
    parts = documents(5, 1, 7, 3)
    batch = pack(parts, 16, "text")[0]
    loss, _ = LanguageModelling(model, {})(batch, 0, 0.0)
    alone = 0.0
    for part in parts:
        ids = torch.tensor([part.tokens])
        logits = model(input_ids=ids).logits[0, :-1]
        alone += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
    # Cross-entropy is taken in float32 whatever the model is.
    assert loss.item() == pytest.approx(alone.item(), rel=1e-6)


def test_gradients_do_not_leak_either():
    model = llama("sdpa")
    batch = pack(documents(9, 7), 16, "text")[0]
    embedded = model.get_input_embeddings()(batch.tokens).detach().requires_grad_()
    inputs = model_inputs(model, batch)
    del inputs["input_ids"]
    model(inputs_embeds=embedded, **inputs).logits[0, 9:].sum().backward()
    assert embedded.grad[0, :9].abs().max() == 0 < embedded.grad[0, 9:].abs().min()


def test_positions_and_targets_know_documents():
    first, second = documents(3, 5)
    second = Document(second.tokens, [True, True, False, True, True])
    batch = pack([first, second], 8, "text")[0]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    a, b = first.tokens, second.tokens
    assert batch.targets.tolist() == [[a[1], a[2], -100, b[1], -100, b[3], b[4], -100]]


def test_a_document_across_blocks_goes_on_without_its_start():
    (part,) = documents(8)
    blocks = pack([part], 4, "text")
    assert len(blocks) == 2
    assert [blocks[n].tokens[0].tolist() for n in range(2)] == [part.tokens[:4], part.tokens[4:]]
    assert all(blocks[n].positions.tolist() == [[0, 1, 2, 3]] for n in range(2))
    with pytest.raises(IndexError):
        blocks[2]


def test_a_mixture_reads_its_sources_by_weight(tmp_path, tokenizer):
    often = SourceConfig(files=[write(tmp_path / "a.txt", "a" * 40)], weight=3)
    seldom = SourceConfig(files=[write(tmp_path / "b.txt", "b" * 40)], weight=1)
    data = Mixture.read([often, seldom], tokenizer, 4, LoopConfig().seed)
    letter = tokenizer("a").input_ids[0]
    share = sum(int(data[n].tokens[0, 0]) == letter for n in range(400)) / 400
    assert 0.65 < share < 0.85 and data.tokens == 80


# Held-out windows


def test_windows_have_no_overlap_and_count_their_bytes(tmp_path, tokenizer):
    text = "the sea on it; " * 20
    source = SourceConfig(files=[write(tmp_path / "a.txt", text)])
    ids = tokenizer(text).input_ids
    windows = held_out_windows(source, tokenizer, 8, 3)
    assert windows.tokens.flatten().tolist() == ids[:24]
    predicted = [tokenizer.decode(ids[n + 1 : n + 8]) for n in (0, 8, 16)]
    assert windows.num_bytes == sum(len(text.encode()) for text in predicted)
    assert held_out_windows(source, tokenizer, 8, 99, most=5).tokens.shape[0] <= 5


def test_bits_per_byte_of_a_model_that_knows_nothing(tmp_path, tokenizer):
    model = tiny_llama()
    torch.nn.init.zeros_(model.lm_head.weight)
    source = SourceConfig(files=[write(tmp_path / "a.txt", "the sea on it; " * 20)])
    windows = held_out_windows(source, tokenizer, 8, 3)
    figures = LanguageModelling(model, {"sea": windows}).evaluate()
    expected = 3 * 7 * 6 / windows.num_bytes  # six bits say which of 64 tokens
    assert figures["bpb_sea"] == figures["bits_per_byte"] == pytest.approx(expected)
    assert LanguageModelling(model, {}).evaluate() == {}


def test_evaluate_loads_no_weights_without_text_to_measure_on(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "load_causal_lm", lambda *_, **__: pytest.fail("loaded"))
    short = {"a": {"files": [write(tmp_path / "a.txt", "the sea")]}}
    for sources, message in ({}, "sources is empty"), (short, "does not hold one window"):
        config = evaluate.EvaluateConfig(target=folder, held_out=HeldOut(sources=sources))
        with pytest.raises(ValueError, match=message):
            evaluate.evaluate(config)
