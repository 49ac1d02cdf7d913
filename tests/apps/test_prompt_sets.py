"""Prompt sets: what each reader makes of its file, and one line for a file that is none."""

import json

import pytest
from conftest import VOCAB
from transformers import AutoTokenizer

from selfspec import DEMO_MODEL
from selfspec.apps.bench.config import PromptSetConfig
from selfspec.apps.bench.prompts import clean_prose, read_prompts


@pytest.fixture(scope="module")
def words():
    """The tokenizer of the model in the package."""
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


def jsonl(path, *records):
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return str(path)


def texts(tokenizer, **fields):
    prompts = read_prompts(PromptSetConfig(name="set", **fields), tokenizer)
    return [tokenizer.decode(prompt, skip_special_tokens=True) for prompt in prompts]


TWO_TURNS = {"question_id": 1, "category": "writing", "turns": ["say a", "then b"]}


@pytest.mark.parametrize(
    ("reader", "record", "text"),
    [
        ("gsm8k", {"question": "1+1?", "answer": "2 #### 2"}, "Question: 1+1?\nAnswer:"),
        ("humaneval", {"task_id": "HumanEval/0", "prompt": "def f():\n"}, "def f():\n"),
        ("mbpp", {"text": "add", "code": "x", "task_id": 11}, '"""add"""\n'),
        ("mt_bench", TWO_TURNS, "say a"),
        ("spec_bench", TWO_TURNS, "say a"),
    ],
)
def test_a_question_stands_as_its_benchmark_asks_it(words, tmp_path, reader, record, text):
    path = jsonl(tmp_path / "questions.jsonl", record)
    assert texts(words, reader=reader, path=path, count=1) == [text]


def test_random_prompts_are_the_same_in_every_run(words):
    config = PromptSetConfig(name="r", reader="random", count=5, prompt_tokens=(3, 11))
    first, again = (read_prompts(config, words) for _ in range(2))
    assert first == again and [len(prompt) for prompt in first] == [3, 5, 7, 9, 11]
    drawn = {token for prompt in first for token in prompt}
    assert drawn <= set(words.get_vocab().values()) - set(words.all_special_ids)
    assert len(drawn) > 10


@pytest.mark.parametrize("reader", ["text", "gsm8k", "humaneval", "mbpp", "mt_bench"])
def test_the_package_has_samples(words, reader):
    found = texts(words, reader=reader, count=5)
    assert len(set(found)) == 5
    assert all(len(text) > 30 for text in found)


def test_only_mbpps_test_split_is_asked(words, tmp_path):
    rows = [{"text": f"number {n}", "task_id": n} for n in (1, 10, 11, 510, 511, 900)]
    found = texts(words, reader="mbpp", path=jsonl(tmp_path / "mbpp.jsonl", *rows), count=0)
    assert found == ['"""number 11"""\n', '"""number 510"""\n']


def test_questions_of_other_lengths_are_left_out(words, tmp_path):
    rows = [{"prompt": "a " * n} for n in (1, 30, 4, 50, 6, 90)]
    path = jsonl(tmp_path / "q.jsonl", *rows)
    config = PromptSetConfig(
        name="q", reader="humaneval", path=path, count=0, prompt_tokens=(25, 70)
    )
    assert [len(prompt) for prompt in read_prompts(config, words)] == [
        len(words("a " * n).input_ids) for n in (30, 50)
    ]
    with pytest.raises(ValueError, match="has 2 prompts of the wanted length, 3 were asked for"):
        read_prompts(config.model_copy(update={"count": 3}), words)


def test_a_chat_set_goes_through_the_tokenizers_template(words, tmp_path):
    path = jsonl(tmp_path / "q.jsonl", TWO_TURNS)
    fields = {"reader": "mt_bench", "path": path, "count": 1, "chat": True}
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        texts(words, **fields)
    words.chat_template = "[{{ messages[0].content }}]"
    try:
        assert texts(words, **fields) == ["[say a]"]
    finally:
        words.chat_template = None


def test_chats_keep_their_turns_and_are_lists_of_messages(words, tmp_path):
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"))]
    fields = {"reader": "chat", "path": jsonl(tmp_path / "c.jsonl", {"messages": turns})}
    words.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    try:
        assert texts(words, count=1, **fields) == ["[a][b]"]
        fields["path"] = jsonl(tmp_path / "no.jsonl", {"text": "a"})
        with pytest.raises(ValueError, match="a record with a list of messages, and one has text"):
            texts(words, count=1, **fields)
    finally:
        words.chat_template = None


def test_passages_begin_with_a_line_and_have_the_wanted_lengths(words, tmp_path):
    lines = [f"line {n} of the book, which goes on for a while." for n in range(200)]
    for book in "ab":
        (tmp_path / f"{book}.txt").write_text("\n".join(f"{book} {line}" for line in lines))
    config = PromptSetConfig(
        name="books", path=str(tmp_path / "*.txt"), count=6, prompt_tokens=(10, 40)
    )
    prompts = read_prompts(config, words)
    assert [len(prompt) for prompt in prompts] == [10, 16, 22, 28, 34, 40]
    written = [words.decode(prompt, skip_special_tokens=True) for prompt in prompts]
    assert [text[:6] for text in written] == ["a line", "b line"] * 3
    assert len(set(written)) == 6


def test_the_standard_library_is_at_hand_as_code(words):
    config = PromptSetConfig(name="code", path="{stdlib}/json/*.py", count=2, prompt_tokens=32)
    assert [len(prompt) for prompt in read_prompts(config, words)] == [32, 32]


def test_prose_is_cleaned_on_request(words, tmp_path):
    assert clean_prose("“One”\ntwo\n\n\n‘three’ ") == "\"One\" two\n'three'"  # noqa: RUF001
    (tmp_path / "a.txt").write_text("\ufeff" + "“One”\n two \n" * 40)
    found = texts(words, path=str(tmp_path / "a.txt"), count=1, prompt_tokens=12, clean="prose")
    assert found[0].startswith('"One" two "One"')


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"reader": "spec_bench"}, "spec_bench is not in the package"),
        ({"reader": "chat"}, "chats need the path of a file with messages"),
        ({"reader": "random", "path": "a.txt"}, "they need a count, and take no path"),
        ({"reader": "random", "count": 0}, "they need a count, and take no path"),
        ({"prompt_tokens": (9, 4)}, "prompt_tokens must be a length or"),
        ({"prompt_tokens": 0}, "prompt_tokens must be a length or"),
        ({"chat": True}, "passages of text have neither"),
        ({"tokens": 4}, "did you mean 'prompt_tokens'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_set_that_cannot_be_is_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        PromptSetConfig(name="set", **fields)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{cut off", "line 1: not a JSON object"),
        ("[1, 2]\n", "line 1: not a JSON object"),
        ('\n{"answer": "2"}\n', "no such field .*question.*it has answer"),
        ("", "has 0 prompts"),
    ],
)
def test_a_file_that_is_no_set_is_one_clear_line(words, tmp_path, content, says):
    path = tmp_path / "gsm8k.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=says) as caught:
        texts(words, reader="gsm8k", path=str(path))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(words, tmp_path):
    for reader in ("text", "gsm8k"):
        with pytest.raises(FileNotFoundError, match=r"no .* file at .*none\.x, which 'set' reads"):
            texts(words, reader=reader, path=str(tmp_path / "none.x"))
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ValueError, match="not UTF-8 text"):
        texts(words, path=str(tmp_path / "bytes.txt"))


def test_what_the_model_has_no_room_for_is_left_out_or_refused(words):
    config = PromptSetConfig(name="q", reader="mt_bench", count=0)
    assert max(map(len, read_prompts(config, words, longest=40))) <= 40
    passages = PromptSetConfig(name="p", count=2, prompt_tokens=50)
    with pytest.raises(ValueError, match="the model leaves 40 beside max_new_tokens"):
        read_prompts(passages, words, longest=40)


def test_a_tokenizer_with_few_words_will_do(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("the cat on the mat\n" * 20)
    config = PromptSetConfig(name="p", path=str(tmp_path / "a.txt"), count=2, prompt_tokens=(4, 6))
    prompts = read_prompts(config, tokenizer)
    assert [len(prompt) for prompt in prompts] == [4, 6]
    assert all(token < VOCAB for prompt in prompts for token in prompt)
