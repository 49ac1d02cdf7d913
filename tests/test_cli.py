"""All commands: help that runs, one line for an error, exit codes, Ctrl-C."""

import re
import subprocess
import sys

import pytest
from cli_tools import PROMPT, call, one_object

from selfspec import SelfSpecModel, __version__

# What goes wrong


def damaged(folder):
    """The checkpoint, its weights cut short."""
    weights = next(path for path in folder.iterdir() if path.suffix == ".safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model", "/no/such/folder"], "no model folder at /no/such/folder"),
        (["--model", "./here"], "no model folder at ./here"),
        (["--heads", "/no/such/heads"], "no folder /no/such/heads; give the folder of"),
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--file", "/no/such/file"], "no prompt file at /no/such/file"),
        (["--config", "/no/such.yaml"], "no config file at /no/such.yaml"),
        (["--draft", "exit_lyer=2"], "did you mean 'exit_layer'?"),
        (["--draft", "exit_layer=4"], "exit_layer must be in [1, 3], got 4"),
        (["--draft", "num_draft_tokens=0"], "num_draft_tokens must be at least 1"),
        (["--draft", "drafter=early-exit"], "did you mean 'early_exit'?"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_1(folder, options, says):
    prompt = [] if "--file" in options else [PROMPT]
    result = call("generate", *prompt, "--json", "--model", folder, *options, code=1)
    assert result.stdout == ""
    assert re.fullmatch(r"selfspec: .*\n", result.stderr)
    assert says in result.stderr


@pytest.mark.parametrize("given", ["", "  \n", '{"prompt": ""}', '{"text": "a"}', "{nothing"])
def test_a_prompt_that_is_none_is_a_mistake(folder, given):
    result = call("generate", "--model", folder, "--json", code=1, input=given)
    assert re.fullmatch(r"selfspec: .*(stdin).*\n", result.stderr)


def test_truncated_weights_are_named(tmp_path, folder):
    damaged(tmp_path / "tiny")
    result = call("generate", PROMPT, "--model", folder, code=1)
    assert re.fullmatch(rf"selfspec: the weights in {folder} cannot be read .*\n", result.stderr)


def test_debug_shows_the_whole_error(folder):
    result = call("--debug", "generate", PROMPT, "--model", "/no/such/folder", code=1)
    assert isinstance(result.exception, FileNotFoundError)
    assert result.exception.__traceback__ is not None


@pytest.mark.parametrize(
    "args",
    [
        ["generate", "a", "--no-such-option"],
        ["generate", "a", "--file", "b"],
        ["generate", "a", "--top-k", "5"],
        ["generate", "a", "--max-new-tokens", "0"],
        ["no-such-command"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(args):
    assert call(*args, code=2).stdout == ""


def test_an_interrupt_is_exit_code_130(folder, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(SelfSpecModel, "generate", interrupted)
    result = call("generate", PROMPT, "--model", folder, code=130)
    assert "Traceback" not in result.output


def test_json_stays_alone_on_stdout_whoever_prints(folder, monkeypatch):
    write = SelfSpecModel.generate

    def talking(self, *args, **kwargs):
        print("here I am")  # noqa: T201
        return write(self, *args, **kwargs)

    monkeypatch.setattr(SelfSpecModel, "generate", talking)
    result = call("generate", PROMPT, "--model", folder, "-n", 2, "--json")
    assert one_object(result)["results"]
    assert "here I am" in result.stderr


def test_version():
    assert call("--version").stdout == f"selfspec {__version__}\n"


def test_help_does_not_wait_for_torch():
    code = "import sys, selfspec.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
