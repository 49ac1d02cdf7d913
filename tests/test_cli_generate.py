"""`selfspec generate`: the same text as the API, in every form."""

import json

from cli_tools import DRAFT, PROMPT, TOKENS, call, one_object, own_text

from selfspec.apps.display import unmarked


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
