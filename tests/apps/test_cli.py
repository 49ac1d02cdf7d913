"""All commands: help that runs, one line for an error, exit codes, Ctrl-C."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from cli_tools import PROMPT, call, one_object

from selfspec import SelfSpecModel, __version__
from selfspec.apps.cli import commands, common, info
from selfspec.apps.cli.examples import EXAMPLES

COMMANDS = (
    *("app", "bench", "chat", "check", "demo", "export", "fit", "generate", "import", "info"),
    *("measure", "regenerate", "tune"),
)

# Help


def leaves(command, *path):
    """The commands that do something, by their full name."""
    inner = getattr(command, "commands", {})
    found = {} if inner and not command.invoke_without_command else {" ".join(path): command}
    for name, each in inner.items():
        found |= leaves(each, *path, name)
    return found


def test_every_command_is_here_and_has_help_with_examples():
    root = typer.main.get_command(commands)
    assert set(root.commands) == set(COMMANDS)
    assert set(leaves(root)) == set(EXAMPLES)
    for name, lines in EXAMPLES.items():
        shown = " ".join(call(*name.split(), "--help", env={"COLUMNS": "200"}).stdout.split())
        assert all(line in shown for line in lines)
        assert "--json" in shown


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_examples_are_right_usage(line):
    root = typer.main.get_command(commands)
    ran = []
    for name, command in leaves(root).items():
        command.callback = lambda name=name, **options: ran.append(name)
    words = shlex.split(line.rpartition(" | ")[2])
    with pytest.raises(SystemExit) as ended:
        root(words[1:], prog_name=words[0])
    assert not ended.value.code
    assert any(line in EXAMPLES[name] for name in ran)


def test_help_does_not_wait_for_torch():
    code = "import sys, selfspec.apps.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_version():
    assert call("--version").stdout == f"selfspec {__version__}\n"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("selfspec ch", ["chat", "check"]),
        ("selfspec export h", ["hf-draft"]),
        ("selfspec tune --te", ["--text"]),
        ("selfspec generate --format tr", ["trace"]),
    ],
)
def test_a_shell_can_complete(words, found):
    code = "import sys; sys.argv[0] = 'selfspec'; from selfspec.apps.cli import main; main()"
    asked = {
        "_SELFSPEC_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    answer = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | asked, capture_output=True, timeout=60
    )
    assert answer.stdout.decode().split() == found


def test_bars_of_libraries_are_for_terminals():
    code = """import sys; sys.argv[1:] = ["--version"]
from contextlib import suppress
from selfspec.apps.cli import main
with suppress(SystemExit):
    main()
from tqdm.auto import tqdm
list(tqdm(range(2)))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


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
        (["--model", "pyproject.toml"], "no model folder at pyproject.toml, which is a file;"),
        (["--model", "no_such/model"], "there is no folder no_such/model, and no such Hugging"),
        (["--heads", "/no/such/heads"], "no folder /no/such/heads; give the folder of"),
        (["--device", "gpu"], "torch has no device 'gpu' here; leave it out, or say cpu"),
        (["--device", "meta"], "torch has no device 'meta' here"),
        (["--device", "xla"], "torch has no device 'xla' here"),
        (["--device", "cuda:99"], "torch has no device 'cuda:99' here"),
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


@pytest.mark.parametrize(
    "given",
    ["", "  \n", '{"prompt": ""}', '{"text": "a"}', "{nothing", '{"prompt": "a \\ud83d"}'],
)
def test_a_prompt_that_is_none_is_a_mistake(folder, given):
    result = call("generate", "--model", folder, "--json", code=1, input=given)
    assert re.fullmatch(r"selfspec: .*(stdin).*\n", result.stderr)


def test_truncated_weights_are_named(tmp_path, folder):
    damaged(tmp_path / "tiny")
    result = call("generate", PROMPT, "--model", folder, code=1)
    assert re.fullmatch(rf"selfspec: the weights in {folder} cannot be read .*\n", result.stderr)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no/such/folder", r"no model folder at {name}; give"),
        ("half", r"no model folder at {name}: it has no config\.json; give"),
        ("heads", "no model folder at {name}, which holds exit heads; they are given as heads"),
    ],
)
def test_python_says_what_is_wrong_with_a_folder_as_the_commands_do(name, says, tmp_path):
    (tmp_path / "half").mkdir()
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "selfspec.json").touch()
    name = str(tmp_path / name)
    told = call("info", "--model", name, code=1).stderr
    assert re.search(says.format(name=name), told)
    for given in (name, Path(name)):
        with pytest.raises(FileNotFoundError) as raised:
            SelfSpecModel.from_pretrained(given)
        assert told == f"selfspec: {raised.value}\n"


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"head": "heads"}, TypeError, "unknown option of .*'head'; did you mean 'heads'?"),
        ({"kernel": "eager"}, TypeError, "did you mean 'kernels'?"),
        ({"kernels": "compile"}, ValueError, "kernels must be one of"),
        (
            {"dtype": "float3"},
            ValueError,
            "dtype must be .auto., a torch.dtype, or .* got .float3.",
        ),
    ],
)
def test_a_wrong_option_is_named_before_weights_are_read(options, error, says, folder):
    (Path(folder) / "model.safetensors").write_bytes(b"")
    with pytest.raises(error, match=says):
        SelfSpecModel.from_pretrained(folder, **options)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_missing_file_of_a_checkpoint_is_named(name, folder):
    for path in Path(folder).glob(name.partition(".")[0] + "*"):
        path.unlink()
    told = call("generate", PROMPT, "--model", folder, code=1).stderr
    assert name in told and folder in told


def test_debug_shows_the_whole_error(folder):
    result = call("--debug", "generate", PROMPT, "--model", "/no/such/folder", code=1)
    assert isinstance(result.exception, FileNotFoundError)
    assert result.exception.__traceback__ is not None


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("app --config none.yaml", "no config file at none.yaml"),
        ("app --draft exit_lyer=1", "did you mean 'exit_layer'?"),
        ("bench --config none.yaml", "no config file at none.yaml"),
        ("bench repeat=2", "unknown key of BenchConfig: 'repeat'; did you mean 'repeats'?"),
        ("bench repeats", "an override reads section.field=value, got 'repeats'"),
        ("bench max_new_tokens=some", "overrides: max_new_tokens: Input should be a valid integer"),
        ("bench methods.0.name=a", "give the whole list as YAML, such as methods='["),
        ("chat --model ./none", "no model folder at ./none"),
        ("chat --config binary", "binary is not UTF-8 text (byte 0)"),
        ("chat --draft exit_lyer=1", "did you mean 'exit_layer'?"),
        ("check --file none", "no prompt file at none"),
        ("check --file binary", "binary is not UTF-8 text (byte 0)"),
        ("check --config list.yaml", "list.yaml must hold a YAML mapping, got list"),
        ("demo --draft drafter=tree --model .", "no model folder at ."),
        ("demo --draft schedule=never", "draft.schedule: Input should be 'fixed'"),
        ("demo --draft rule=couple", "or 'typical_lossy', got 'couple'"),
        ("demo --draft exit_layer=-1", "greater than or equal to 0, got -1"),
        ("demo --config other.yaml", "unknown key of Sections: 'drafts'; did you mean 'draft'?"),
        ("generate --file binary", "binary is not UTF-8 text (byte 0)"),
        ("generate a --profile none.json --model {folder}", "no profile at none.json"),
        ("info --model ./none", "no model folder at ./none"),
        ("info --model .", "no model folder at ."),
        ("info --model {folder} --heads none", "no folder none"),
        ("tune --text none", "no prompt file at none"),
        ("tune --set batch", "an override reads section.field=value, got 'batch'"),
        ("tune --set bach=2", "did you mean 'batch'?"),
        ("tune --config none.yaml", "no config file at none.yaml"),
        ("tune --config list.yaml", "list.yaml must hold a YAML mapping"),
        ("tune --model {folder} --output binary/tuned", "cannot write binary/tuned: binary is no"),
        ("export hf-draft out --model ./none", "no model folder at ./none"),
        ("export hf-draft binary", "is there already"),
        ("export hf-draft binary/out --model {folder} -e 1 --head shared", "binary"),
        ("export custom-generate binary", "is there already"),
    ],
)
def test_every_command_says_what_is_wrong_in_one_line(line, says, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("binary").write_bytes(b"\xff\xfe")
    Path("list.yaml").write_text("[1]")
    Path("other.yaml").write_text("drafts: {}")
    result = call(*line.format(folder=folder).split(), code=1)
    assert result.stdout == ""
    assert re.fullmatch(r"selfspec: .*\n", result.stderr)
    assert says in result.stderr


@pytest.mark.parametrize("command", ["app", "chat", "check", "demo", "generate a"])
@pytest.mark.parametrize(
    ("draft", "says"),
    [
        ("eerly_exit", "unknown drafter: 'eerly_exit'; did you mean 'early_exit'?"),
        ("head=fusd", "unknown head kind: 'fusd'; did you mean 'fused'?"),
        ("tree --draft schedule=optimal", "'tree' does not use it"),
    ],
)
def test_a_draft_that_no_model_makes_is_refused_before_the_model_is_read(command, draft, says):
    result = call(*f"{command} --model ./none --draft {draft}".split(), code=1)
    assert re.fullmatch(r"selfspec: overrides: draft: .*\n", result.stderr)
    assert says in result.stderr


@pytest.mark.parametrize(
    "line",
    [
        "no-such-command",
        *(f"{name} --no-such-option" for name in COMMANDS),
        "app --port 0",
        "app --share",
        "bench --output",
        "chat --max-new-tokens 0",
        "chat --top-k 5",
        "check --samples -1",
        "demo --dtype int8",
        "demo --domain poetry",
        "demo --seed some",
        "generate a --file b",
        "generate a --top-k 5",
        "generate a --temperature -1",
        "generate a --format html",
        "generate --prompts a --output b --format trace",
        "info --context 0",
        "info more",
        "tune --bach 2",
        "export hf-draft",
        "export hf-draft a b",
        "export custom-generate",
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(line):
    result = call(*line.split(), code=2)
    assert result.stdout == ""
    assert re.fullmatch(r"selfspec: .*; see selfspec.* --help\n", result.stderr)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("generate a -n -5", "greater than or equal to 1, got '-5'; see"),
        ("generate a --temperature -1", "greater than or equal to 0, got '-1'; see"),
        ("generate a --format html", ": 'html' is not one of 'text'"),
        (
            f"generate a --seed {2**63}",
            f"'--seed': Input should be less than or equal to {2**63 - 1}",
        ),
    ],
)
def test_wrong_usage_names_the_value(line, says):
    assert says in call(*line.split(), code=2).stderr


RUNS = ("bench", "chat", "check", "demo --domain code", "generate a", "info", "tune")
RUNS += ("export hf-draft out", "export custom-generate out --heads heads")


@pytest.mark.parametrize("line", RUNS)
def test_an_interrupt_is_exit_code_130(line, monkeypatch, tmp_path):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    for module in (common, info):
        monkeypatch.setattr(module, "resolve", interrupted)
    result = call(*line.split(), code=130)
    assert (result.stdout, result.stderr) == ("", "\n")


@pytest.mark.parametrize("line", RUNS)
def test_an_error_that_nobody_expected_is_one_line_too(line, monkeypatch, tmp_path):
    def wrong(*args):
        raise RuntimeError("a bug,\nsomewhere")

    monkeypatch.chdir(tmp_path)
    for module in (common, info):
        monkeypatch.setattr(module, "resolve", wrong)
    said = "selfspec: RuntimeError: a bug, somewhere (selfspec --debug shows where)\n"
    assert call(*line.split(), code=1).stderr == said
    result = call("--debug", *line.split(), code=1)
    assert isinstance(result.exception, RuntimeError)


def test_json_stays_alone_on_stdout_whoever_prints(folder, monkeypatch):
    write = SelfSpecModel.generate

    def talking(self, *args, **kwargs):
        print("here I am")  # noqa: T201
        return write(self, *args, **kwargs)

    monkeypatch.setattr(SelfSpecModel, "generate", talking)
    result = call("generate", PROMPT, "--model", folder, "-n", 2, "--json")
    assert one_object(result)["results"]
    assert "here I am" in result.stderr
