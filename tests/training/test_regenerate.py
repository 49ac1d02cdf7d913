"""The target's own continuations: what is written, that nothing is lost, and what is refused."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from conftest import greedy, tiny_llama
from training_tools import start

from selfspec.config import parse
from training import regenerate as script
from training.data import SourceConfig, read_texts, tokenize
from training.data.prompts import PromptConfig, read_prompts
from training.regenerate import RegenerateConfig, regenerate

WORDS = "the east train ran on; then the rain began, and an open boat ran in there.\n"
TEMPLATE = (
    "{% for m in messages %}({{ m.role }}) {{ m.content }};\n{% endfor %}"
    "{% if add_generation_prompt %}(assistant) {% endif %}"
)


def target(tokenizer):
    ends = tokenizer.convert_tokens_to_ids([*".,;:!?0123456789"])
    return tiny_llama(dtype=torch.float32, eos_token_id=ends)


@pytest.fixture
def folder(tmp_path, tokenizer):
    """A target that often ends a text early, and text of three lengths."""
    tokenizer.chat_template = TEMPLATE
    target(tokenizer).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "text.txt").write_text(WORDS * 4)
    return tmp_path


def settings(folder, **changes):
    usual = {
        "output": str(folder / "run"),
        "target": str(folder / "target"),
        "draft": {"exit_layer": 2, "num_draft_tokens": 3},
        "data": [{"files": [str(folder / "text.txt")]}],
        "prompts": {"tokens": 6, "every": 20},
        "new_tokens": 8,
        "batch_size": 3,
    }
    return parse(RegenerateConfig, usual | changes, "test")


def chats(folder, *conversations):
    """A file of chats, and the source that reads it."""
    roles = {"u": "user", "a": "assistant", "s": "system"}
    records = [
        {"messages": [{"role": roles[role], "content": said} for role, said in conversation]}
        for conversation in conversations
    ]
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return {"files": [str(path)]}


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# What is written


def test_greedy_texts_are_the_targets_own(folder, tokenizer):
    written = records(regenerate(settings(folder, temperature=0)))
    model = target(tokenizer)
    prompts = prompts_of(folder, tokenizer)
    assert sorted(record["number"] for record in written) == [*range(len(prompts))]
    ended = set()
    for record in written:
        ids = torch.tensor([prompts[record["number"]].tokens])
        text = greedy(model, ids, max_new_tokens=8)[0]
        ended.add(len(text) < 14)
        assert record["text"] == tokenizer.decode(text, skip_special_tokens=True)
        assert (record["prompt_tokens"], record["new_tokens"]) == (6, len(text) - 6)
        assert record["source"] == str(folder / "text.txt")
    assert ended == {True, False}, "all rows are equally long: the test shows less than it means to"


def prompts_of(folder, tokenizer, **changes):
    config = settings(folder, **changes)
    return read_prompts(config.data, config.prompts, tokenizer, config.seed)


def test_texts_are_a_source_to_fit_on(folder, tokenizer):
    path = regenerate(settings(folder))
    source = SourceConfig(files=[str(path)])
    assert list(read_texts(source)) == [record["text"] for record in records(path)]
    assert all(any(document.trained) for document in tokenize(source, tokenizer))


def test_the_last_reply_of_a_chat_is_written_anew(folder, tokenizer):
    source = chats(
        folder,
        [("s", "sir"), ("u", "an east train"), ("a", "on top"), ("u", "then"), ("a", "xyz")],
        [("u", "not there")],
    )
    path = regenerate(settings(folder, data=[source]))
    long, short = sorted(records(path), key=lambda record: -len(record["messages"]))
    said = [message["content"] for message in long["messages"]]
    assert said[:4] == ["sir", "an east train", "on top", "then"] and said[4] != "xyz"
    assert [message["role"] for message in short["messages"]] == ["user", "assistant"]
    asked = TEMPLATE_TEXT.format("not there")
    assert short["prompt_tokens"] == len(tokenizer(asked).input_ids)
    for document in tokenize(SourceConfig(files=[str(path)]), tokenizer):
        assert any(document.trained) and not all(document.trained)


def test_a_reply_is_read_again_as_it_was_written(folder, tokenizer):
    """With the tools that it may call, and behind the thought that the prompt has opened."""
    opening = TEMPLATE.replace("{{ m.content }}", "{{ m.content.split('end')[-1] }}")
    opening = opening.replace("(assistant) {", "(assistant) so\n{")
    tools = [{"type": "function", "function": {"name": "an oven"}}]
    source = chats(folder, [("u", "an east train"), ("a", "so\non end it is"), ("u", "then")])
    (path,) = map(Path, source["files"])
    path.write_text(json.dumps({**json.loads(path.read_text()), "tools": tools}) + "\n")
    for template in (TEMPLATE, opening):
        tokenizer.chat_template = "{{ tools[0].function.name }}" + template
        tokenizer.save_pretrained(folder / "target")
        run = {"data": [source], "output": str(folder / ("a" if template is opening else "b"))}
        written = regenerate(settings(folder, **run))
        (record,) = records(written)
        assert record["tools"] == tools
        *_, document = tokenize(SourceConfig(files=[str(written)]), tokenizer)
        asked = record["prompt_tokens"]
        (prompt,) = prompts_of(folder, tokenizer, data=[source])
        assert document.tokens[:asked] == prompt.tokens
        reply = tokenizer.decode(document.tokens[asked:])
        content = record["messages"][-1]["content"]
        assert content.startswith("so\n") == (template is opening)
        assert reply == content.removeprefix("so\n" * (template is opening)) + ";\n"


def test_a_reply_ends_with_its_turn(folder, tokenizer):
    """Where the template ends it, also if no generation config names that token."""
    source = chats(folder, [("u", "an east train")])
    (prompt,) = prompts_of(folder, tokenizer, data=[source])
    ids = torch.tensor([prompt.tokens])
    written = greedy(target(tokenizer), ids, max_new_tokens=8)[0, ids.shape[1] :].tolist()
    place = next(n for n, token in enumerate(written) if n > 1 and token not in prompt.tokens)
    end = tokenizer.convert_ids_to_tokens(written[place])
    tokenizer.add_special_tokens({"extra_special_tokens": [end]})
    ended = "{{ 'END' if m.role == 'assistant' else ';\n' }}".replace("END", end)
    tokenizer.chat_template = TEMPLATE.replace(";\n", ended)
    tokenizer.save_pretrained(folder / "target")
    (record,) = records(regenerate(settings(folder, data=[source], temperature=0)))
    assert record["prompt_tokens"] == len(prompt.tokens)
    assert record["new_tokens"] == place + 1 < len(written)
    assert record["messages"][-1]["content"] == tokenizer.decode(written[:place])


TEMPLATE_TEXT = "(user) {};\n(assistant) "


def test_a_prompt_begins_as_documents_do(folder, tokenizer):
    tokenizer.bos_token = "<pad>"
    whole = tokenizer(WORDS * 4).input_ids
    found = sorted(prompt.tokens for prompt in prompts_of(folder, tokenizer))
    cut = [[0, *whole[place : place + 6]] for place in range(0, len(whole) - 5, 20)]
    assert found == sorted(cut)


def test_draws_depend_on_the_seed_and_not_on_the_moment(folder):
    first = regenerate(settings(folder)).read_bytes()
    torch.manual_seed(99)
    again = regenerate(settings(folder, output=str(folder / "again"))).read_bytes()
    other = regenerate(settings(folder, output=str(folder / "other"), seed=1)).read_bytes()
    assert first == again != other


def test_without_heads_and_a_draft_decoding_is_plain(folder, monkeypatch):
    drafted = []
    monkeypatch.setattr(
        script, "_speed", lambda spec: drafted.append(spec.last_stats.drafted) or {}
    )
    regenerate(settings(folder, draft=None))
    assert set(drafted) == {0}


# Prompts in their order


def test_a_count_is_shared_out_by_weight_at_even_distances(folder, tokenizer):
    (folder / "other.txt").write_text(WORDS * 40)
    data = [
        {"files": [str(folder / "text.txt")], "weight": 1},
        {"files": [str(folder / "other.txt")], "weight": 3},
    ]
    cut = {"tokens": 6, "every": 10, "count": 16}
    prompts = prompts_of(folder, tokenizer, data=data, prompts=cut)
    per_source = [[p for p in prompts if p.source == each["files"][0]] for each in data]
    assert [len(part) for part in per_source] == [4, 12]
    assert prompts != per_source[0] + per_source[1], "the sources are not mixed"
    ids = tokenizer(WORDS * 40).input_ids
    places = range(0, len(ids) - 5, 10)
    expected = [places[n * len(places) // 12] for n in range(12)]
    assert sorted(p.tokens for p in per_source[1]) == sorted(ids[n : n + 6] for n in expected)


# Interrupted


def in_order(path):
    """The texts; which of them is finished first depends on the others."""
    return sorted(path.read_text().splitlines(), key=lambda line: json.loads(line)["number"])


COUPLED = {"exit_layer": 2, "num_draft_tokens": 3, "rule": "coupled"}


def test_a_file_cut_anywhere_is_made_whole_again(folder):
    config = settings(folder, draft=COUPLED)
    path = regenerate(config)
    whole, texts = path.read_bytes(), in_order(path)
    ends = [place + 1 for place, byte in enumerate(whole) if byte == 10]
    assert len(ends) > 4
    for cut in (0, 1, ends[0], ends[2] - 1, ends[2], ends[2] + 5, ends[-1] - 1):
        path.write_bytes(whole[:cut])
        assert in_order(regenerate(config)) == texts, cut


def test_a_damaged_text_is_named_with_its_line(folder):
    config = settings(folder, draft=COUPLED)
    path = regenerate(config)
    first, second, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([first, second[:20] + b"\n", *rest]))
    with pytest.raises(ValueError, match=r"texts\.jsonl, line 2 is damaged: .*; delete that line"):
        regenerate(config)
    path.write_bytes(b"".join([first, *rest]))
    assert len(records(regenerate(config))) == len(rest) + 2


def test_only_what_is_missing_is_written_anew(folder, monkeypatch):
    config = settings(folder)
    path = regenerate(config)
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    rows, append = [], script.append
    monkeypatch.setattr(
        script, "append", lambda path, line: rows.append(line) or append(path, line)
    )
    regenerate(config)
    assert [record["number"] for record in records(path)] == [
        json.loads(line)["number"] for line in whole.splitlines()
    ]
    assert len(rows) == 1
    assert regenerate(config) == path and len(rows) == 1


@pytest.mark.slow
def test_a_killed_run_ends_in_the_same_texts(folder):
    """`kill -9` once a text is written, wherever the process then is."""
    (folder / "text.txt").write_text(WORDS * 25)
    changes = {"new_tokens": 40, "batch_size": 2, "draft": COUPLED}
    config = settings(folder, **changes)
    process = begin(config, folder)
    file = folder / "run" / "texts.jsonl"
    while process.poll() is None and not (file.exists() and file.stat().st_size):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"
    whole = regenerate(settings(folder, output=str(folder / "whole"), **changes))
    assert len(file.read_bytes()) < len(whole.read_bytes())
    assert in_order(regenerate(config)) == in_order(whole)


def begin(config, folder) -> subprocess.Popen[str]:
    path: Path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return start([sys.executable, "-m", "training.regenerate", "--config", str(path)])


def test_what_cannot_be_written_is_said(folder, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(script.os, "fsync", full)
    with pytest.raises(OSError, match=r"texts\.jsonl could not be written.*resume after the last"):
        regenerate(settings(folder))


# Refused


def test_texts_of_another_run_are_refused(folder):
    path = regenerate(settings(folder))
    written, echoed = path.read_bytes(), (folder / "run" / "config.yaml").read_text()
    refusals = {
        r"another seed \(0 there, 4 here\)": {"seed": 4},
        r"prompts\.tokens \(6 there, 7 here\)": {"prompts": {"tokens": 7, "every": 20}},
        r"draft": {"draft": None},
    }
    for refusal, changes in refusals.items():
        with pytest.raises(ValueError, match=refusal):
            regenerate(settings(folder, **changes))
    assert (folder / "run" / "config.yaml").read_text() == echoed
    (folder / "text.txt").write_text(WORDS * 3)
    with pytest.raises(ValueError, match="holds texts with another text; give a new output"):
        regenerate(settings(folder))
    (folder / "text.txt").write_text(WORDS * 4)
    tiny_llama(dtype=torch.float32, seed=1).save_pretrained(folder / "target")
    with pytest.raises(ValueError, match=r"another model\.weights"):
        regenerate(settings(folder))
    assert path.read_bytes() == written


def test_a_file_of_unknown_origin_is_left_alone(folder):
    regenerate(settings(folder))
    (folder / "run" / "texts.json").unlink()
    with pytest.raises(ValueError, match=r"texts without their texts\.json"):
        regenerate(settings(folder))


def test_text_and_chats_do_not_mix(folder):
    source = chats(folder, [("u", "an"), ("a", "on")])
    with pytest.raises(ValueError, match="mixes plain text and chats"):
        regenerate(settings(folder, data=[source, *settings(folder).model_dump()["data"]]))


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"prompts": {"tokens": 4000}}, "has no prompt: no document of 4000 tokens"),
        ({"new_tokens": 125}, r"all \d+ prompts .* longer than 3 tokens"),
        ({"new_tokens": 130}, "new_tokens leaves no room for a prompt: it is 3 tokens or more too"),
        ({"data": [{"files": ["nowhere.txt"]}]}, "no file matches"),
    ],
)
def test_data_without_prompts_is_named(folder, changes, refusal):
    with pytest.raises((ValueError, FileNotFoundError), match=refusal):
        regenerate(settings(folder, **changes))


def test_a_chat_without_a_question_is_named(folder):
    with pytest.raises(ValueError, match="nothing but the assistant's turns"):
        regenerate(settings(folder, data=[chats(folder, [("a", "on")])]))


def test_a_chat_that_leaves_no_room_is_left_out(folder, tokenizer):
    source = SourceConfig(**chats(folder, [("u", "an")], [("u", "an east train " * 20)]))
    kept = read_prompts([source], PromptConfig(), tokenizer, seed=0, longest=60)
    assert len(kept) == 1 and kept[0].chat.messages == [{"role": "user", "content": "an"}]
