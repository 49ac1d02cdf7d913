"""`selfspec generate`: the same text as the API, in every form."""

import json
import re
from importlib.util import find_spec

import pytest
from cli_tools import DRAFT, PROMPT, TOKENS, call, one_object, own_text, unmarked
from conftest import greedy
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def test_generate_writes_what_the_model_writes(folder):
    text = own_text(folder)
    common = ("--model", folder, "-n", TOKENS, *DRAFT)
    assert call("generate", PROMPT, *common).stdout == text + "\n"
    assert call("generate", *common, input=PROMPT + "\n").stdout == text + "\n"
    assert call("generate", "-", *common, input=PROMPT).stdout == text + "\n"
    trace = call("generate", PROMPT, *common, "--format", "trace").stdout
    assert unmarked(trace) == text + "\n"
    assert trace != text + "\n"


def test_generate_json_is_one_object_with_the_figures_of_the_line_on_stderr(folder):
    common = ("generate", PROMPT, "--model", folder, "-n", TOKENS, *DRAFT)
    found = one_object(call(*common, "--format", "trace", "--json"))
    (result,) = found["results"]
    assert found["draft"]["num_draft_tokens"] == 3
    assert result["text"] == own_text(folder)
    assert sum(step["accepted"] for step in result["trace"]) == result["stats"]["accepted"]
    line = call(*common).stderr
    rate, length = result["stats"]["acceptance_rate"], result["stats"]["mean_accepted_length"]
    assert f"acceptance rate {rate:.3f}, mean accepted length {length:.2f}" in line


def test_a_file_of_json_lines_gives_a_line_for_each_prompt(folder, tmp_path):
    prompts = [PROMPT, "in the sun", "a\nb"]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    common = ("--model", folder, "-n", TOKENS, *DRAFT)
    lines = call("generate", "--file", file, *common, "--format", "jsonl").stdout.splitlines()
    found = [json.loads(line) for line in lines]
    assert [entry["prompt"] for entry in found] == prompts
    assert [entry["text"] for entry in found] == [own_text(folder, p) for p in prompts]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("form", ["[%s, %s]", "[\n%s,\n%s]\n", "%s\r\n%s\r\n"])
def test_arrays_and_byte_order_marks_are_read(folder, tmp_path, form, mark):
    entries = [{"prompt": prompt} for prompt in (PROMPT, "in the sun")]
    text = mark + form % tuple(map(json.dumps, entries))
    file = tmp_path / "prompts.json"
    file.write_bytes(text.encode())
    common = ("generate", "--model", folder, "-n", 2, "--json", *DRAFT)
    for found in (one_object(call(*common, "-f", file)), one_object(call(*common, input=text))):
        assert [{"prompt": entry["prompt"]} for entry in found["results"]] == entries


def test_text_in_brackets_is_a_prompt(folder):
    for text in ("[the cat] sat", "[a, 2]", '["the cat"]'):
        found = one_object(call("generate", "--model", folder, "-n", 2, "--json", input=text))
        assert [entry["prompt"] for entry in found["results"]] == [text]


def test_a_plain_file_is_one_prompt(folder, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("the cat\n\non the mat\n")
    found = one_object(call("generate", "-f", file, "--model", folder, "-n", 2, "--json"))
    assert [entry["prompt"] for entry in found["results"]] == ["the cat\n\non the mat"]


def test_a_seed_repeats_a_sampled_text(folder):
    common = ("generate", PROMPT, "--model", folder, "-n", TOKENS, "--temperature", 1.5, *DRAFT)
    texts = [call(*common, "--top-k", 20, "--seed", seed).stdout for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_fields_on_the_command_line_override_the_file(folder, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("draft:\n  exit_layer: 1\n  num_draft_tokens: 7\n")
    common = ("generate", PROMPT, "--model", folder, "-n", 2, "--json", "--config", file)
    found = one_object(call(*common, "--draft", "exit_layer=3"))
    assert found["draft"]["exit_layer"] == 3
    assert found["draft"]["num_draft_tokens"] == 7


# Chats

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}{% if m.role == 'assistant' %}END"
    "{% endif %}.{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture
def chatty(folder):
    """The tiny checkpoint with a chat template, whose replies end with a token that it writes.

    Returns:
        The folder, and the reply up to that token, which no generation config names.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    said = f"s: one.u: {PROMPT}.a:"
    ids = tokenizer(said, return_tensors="pt").input_ids
    written = greedy(model, ids, max_new_tokens=TOKENS)[0, ids.shape[1] :].tolist()
    used = {*ids[0].tolist(), 0}
    place = next(n for n, token in enumerate(written) if n > 1 and token not in used)
    end = tokenizer.convert_ids_to_tokens(written[place])
    tokenizer.add_special_tokens({"extra_special_tokens": [end]})
    assert tokenizer(said).input_ids == ids[0].tolist()
    tokenizer.chat_template = TEMPLATE.replace("END", tokenizer.decode([written[place]]))
    tokenizer.save_pretrained(folder)
    return folder, tokenizer.decode(written[:place], skip_special_tokens=True)


def test_a_chat_goes_through_the_template_and_stops_at_its_end_of_turn(chatty, tmp_path):
    folder, reply = chatty
    options = ("--model", folder, "--chat", "--system", "one", "-n", TOKENS, *DRAFT)
    result = call("generate", PROMPT, *options)
    assert result.stdout == reply + "\n" and "--chat" not in result.stderr
    file, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    file.write_text(json.dumps({"prompt": PROMPT}))
    call("generate", "--prompts", file, "--output", output, *options)
    assert json.loads(output.read_text())["text"] == reply
    said = call("chat", "--model", folder, "--system", "one", "-n", TOKENS, input=PROMPT + "\n")
    assert said.stdout == reply + "\n"


def test_without_chat_a_checkpoint_with_a_template_gets_a_hint(chatty):
    options = ("generate", PROMPT, "--model", chatty[0], "-n", 2)
    assert call(*options).stderr.startswith("the checkpoint has a chat template: --chat puts")


def test_a_chat_without_a_template_is_refused_before_weights_are_read(folder, tmp_path):
    (tmp_path / "tiny" / "model.safetensors").unlink()
    for more in ((), ("--prompts", "-", "--output", tmp_path / "out.jsonl")):
        prompt = () if more else (PROMPT,)
        result = call(
            "generate", *prompt, "--model", folder, "--chat", *more, code=1, input='{"prompt": "a"}'
        )
        assert result.stderr.startswith("selfspec: --chat needs a chat template")
    assert "give --chat, too" in call("generate", PROMPT, "--system", "one", code=2).stderr


# What the checkpoint says


def test_the_checkpoints_generation_config_is_kept_and_shown(folder, tmp_path):
    wanted = {"do_sample": True, "temperature": 1.5, "top_k": 20, "min_p": 0}
    GenerationConfig(**wanted, pad_token_id=0).save_pretrained(folder)
    common = ("generate", PROMPT, "--model", folder, "-n", TOKENS, *DRAFT)
    own = call(*common, "--seed", 3)
    told = call(*common, "--seed", 3, "--temperature", 1.5, "--top-k", 20)
    assert own.stdout == told.stdout
    options = ("--model", folder, "--prompts", "-", "-o", tmp_path / "answers", "-n", TOKENS)
    for line in (own.stderr.splitlines()[0], call("generate", *options, input="a").stderr):
        assert re.match("of the checkpoint's generation_config: ", line)
        assert all(f"{name}={value}" in line for name, value in wanted.items())
    assert one_object(call(*common, "--json"))["generation_config"] == wanted
    greedily = call(*common, "--temperature", 0)
    assert greedily.stdout == own_text_greedy(folder) + "\n"
    assert "generation_config" not in greedily.stderr  # nothing of it is in effect


def own_text_greedy(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model.generation_config = GenerationConfig(pad_token_id=0)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    return tokenizer.decode(greedy(model, ids, max_new_tokens=TOKENS)[0, ids.shape[1] :])


# JSON

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 23]}}, "required": ["a"]}


NEEDS_XGRAMMAR = pytest.mark.skipif(
    find_spec("xgrammar") is None, reason="the extra `structured` is not installed"
)


@NEEDS_XGRAMMAR
@pytest.mark.parametrize("where", ["text", "file"])
def test_a_text_fits_its_schema(tmp_path, where):
    schema = json.dumps({**SCHEMA, "additionalProperties": False})
    if where == "file":
        (tmp_path / "schema.json").write_text(schema, encoding="utf-8-sig")
        schema = tmp_path / "schema.json"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("A", "B")))
    found = one_object(call("generate", "-f", prompts, "--json-schema", schema, "-n", 60, "--json"))
    texts = [result["text"] for result in found["results"]]
    answers = tmp_path / "answers.jsonl"
    call("generate", "--prompts", prompts, "-o", answers, "--json-schema", schema, "-n", 60)
    assert [json.loads(line)["text"] for line in answers.read_text().splitlines()] == texts
    assert all(json.loads(text)["a"] in (1, 23) for text in texts)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("{", "the schema is not JSON"),
        ("none.json", "no schema at none.json; give JSON, or the path"),
        pytest.param('{"type": "no"}', "does not understand the schema", marks=NEEDS_XGRAMMAR),
    ],
)
def test_a_schema_that_is_none_is_refused(schema, says):
    assert says in call("generate", PROMPT, "--json-schema", schema, code=1).stderr


def test_a_schemas_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "schema.json").write_bytes(b"{\xe9")
    result = call("generate", PROMPT, "--json-schema", tmp_path / "schema.json", code=1)
    assert "schema.json is not UTF-8 text (byte 1)" in result.stderr


def test_without_xgrammar_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("selfspec.apps.cli.generate.find_spec", lambda name: None)
    result = call("generate", PROMPT, "--json-schema", json.dumps(SCHEMA), code=1)
    assert "pip install 'selfspec[structured]'" in result.stderr


def test_a_picture_is_of_one_prompt(tmp_path):
    file = tmp_path / "two.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    result = call("generate", "--file", str(file), "--format", "svg", code=2)
    assert result.stdout == "" and "--format svg draws one prompt, got 2" in result.stderr
