"""Jobs: every prompt is answered once, in order, whoever dies on the way."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress

import psutil
import pytest
from conftest import EXIT, ROOT, tiny_llama
from job_tools import Shouter
from typer.testing import CliRunner

from selfspec.apps.cli import commands
from selfspec.generation.jobs import _answers, run_job

PROMPTS = [f"prompt {number}" for number in range(30)]
IDENTITY = {"model": "a"}
# More processes that import torch take their time.
PROCESSES = pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out.jsonl"


def texts(output):
    return [json.loads(line)["text"] for line in output.read_text().splitlines()]


def asked(folder):
    return Counter((folder / "asked").read_text().splitlines())


def assert_whole(output, prompts=PROMPTS):
    assert texts(output) == [prompt.upper() for prompt in prompts]
    assert not output.with_name("out.jsonl.parts").exists()


@PROCESSES
def test_every_prompt_is_answered_once_and_in_order(tmp_path, output, processes):
    told = []
    run_job(PROMPTS, Shouter(tmp_path), output, IDENTITY, processes, told.append)
    assert_whole(output)
    assert asked(tmp_path) == Counter(PROMPTS)
    assert sum(told) == len(PROMPTS)
    workers = {json.loads(line)["worker"] for line in output.read_text().splitlines()}
    assert workers == set(range(processes))


@pytest.mark.slow
def test_the_rows_of_a_killed_process_are_done_again(tmp_path, output):
    run_job(PROMPTS, Shouter(tmp_path, dies_at="prompt 11"), output, IDENTITY, 2)
    assert (tmp_path / "died").exists()
    assert_whole(output)
    assert asked(tmp_path) == Counter(PROMPTS)


@pytest.mark.slow
def test_a_killed_job_goes_on_where_it_was(tmp_path, output):
    code = (
        "import sys; from pathlib import Path; from job_tools import Shouter;"
        "from selfspec.generation.jobs import run_job;"
        f"run_job({PROMPTS}, Shouter(Path({str(tmp_path)!r}), dies_at='prompt 7'),"
        f" {str(output)!r}, {IDENTITY})"
    )
    folder = ROOT / "tests"
    killed = subprocess.run([sys.executable, "-c", code], cwd=folder, check=False, timeout=60)
    assert killed.returncode < 0
    assert not output.exists()
    told = []
    run_job(PROMPTS, Shouter(tmp_path), output, IDENTITY, answered=told.append)
    assert told[0] == 7
    assert_whole(output)
    assert asked(tmp_path) == Counter(PROMPTS)


def test_a_damaged_answer_is_named_with_its_line(tmp_path, output):
    journal = stopped(tmp_path, output)
    first, *rest = journal.read_bytes().splitlines(keepends=True)
    for line in (b'{"row": 2, "ans\n', b"\0\0\n", b"[]\n", b'{"row": 2}\n'):
        journal.write_bytes(b"".join([first, line, *rest]))
        told = rf"{journal}, line 2 is damaged: .* with row and answer, got .*; delete that line"
        with pytest.raises(ValueError, match=told):
            run_job(PROMPTS, Shouter(tmp_path), output, IDENTITY)
    journal.write_bytes(b"".join([first, *rest]))
    run_job(PROMPTS, Shouter(tmp_path), output, IDENTITY)
    assert_whole(output)


def test_an_answer_that_cannot_be_written_is_said(tmp_path):
    answers = _answers(Shouter(tmp_path), 0, 1, {0: "a"}, tmp_path / "gone")
    with pytest.raises(OSError, match=r"gone.*\.jsonl could not be written .*No such.* resumes"):
        next(answers)


def test_half_an_answer_is_given_again(tmp_path, output):
    journal = stopped(tmp_path, output)
    whole = journal.read_bytes()
    for cut in (1, 5, len(whole.splitlines(keepends=True)[-1]) - 1):
        journal.write_bytes(whole[:-cut])
        run_job(PROMPTS, Shouter(tmp_path), output, IDENTITY)
        assert_whole(output)
        output.unlink()
        parts = journal.parent
        parts.mkdir()
        (parts / "job.json").write_text(json.dumps({**IDENTITY, "prompts": PROMPTS}))


def stopped(tmp_path, output):
    """The journal of a job that was stopped at a prompt it could not answer."""
    with suppress(ValueError):
        run_job(PROMPTS, Shouter(tmp_path, refuses="prompt 4"), output, IDENTITY)
    (journal,) = output.with_name("out.jsonl.parts").glob("*.jsonl")
    return journal


@PROCESSES
def test_a_prompt_that_cannot_be_answered_is_an_error(tmp_path, output, processes):
    maker = Shouter(tmp_path, refuses="prompt 3")
    with pytest.raises(ValueError, match="prompt 3 is no prompt"):
        run_job(PROMPTS, maker, output, IDENTITY, processes)
    assert not output.exists()


def test_another_job_is_not_gone_on_with(tmp_path, output):
    stopped(tmp_path, output)
    with pytest.raises(ValueError, match=r"another model .*prompts"):
        run_job(PROMPTS[1:], Shouter(tmp_path), output, {"model": "b"})


@pytest.mark.slow
def test_processes_that_all_die_end_the_job(tmp_path, output):
    with pytest.raises(OSError, match="every process died without an answer"):
        run_job(PROMPTS, Shouter(tmp_path, always=True), output, IDENTITY, 2)


def test_an_output_is_not_written_over(tmp_path, output):
    output.write_text("mine")
    with pytest.raises(FileExistsError, match="is there already"):
        run_job(PROMPTS, Shouter(tmp_path), output, IDENTITY)
    assert output.read_text() == "mine"


# The command


@pytest.fixture
def folder(tmp_path, tokenizer):
    path = tmp_path / "tiny"
    tiny_llama("sometimes").save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def generate(*args):
    return CliRunner().invoke(commands, ["generate", *map(str, args)])


@PROCESSES
def test_a_job_writes_what_one_prompt_after_another_gives(folder, tmp_path, processes):
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    # Some characters end lines for str.splitlines, and not in JSON.
    prompts = [f"the cat {number}" for number in range(5)] + ["the\u2028cat\x85"]
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    common = ("--model", folder, "-n", 6, "--draft", f"exit_layer={EXIT}")
    plain = json.loads(generate("--file", file, "--json", *common).stdout)["results"]
    result = generate("--prompts", file, "--output", out, "--processes", processes, *common)
    assert result.exit_code == 0, result.output
    answers = list(map(json.loads, out.read_bytes().splitlines()))
    for answer, expected in zip(answers, plain, strict=True):
        assert answer["prompt"] == expected["prompt"]
        assert answer["text"] == expected["text"]


def journaled(output):
    """What a stopped job has answered so far, by row; half a line at an end does not count."""
    journals = output.with_name(f"{output.name}.parts").glob("*.jsonl")
    lines = [line for journal in journals for line in journal.read_bytes().split(b"\n")[:-1]]
    entries = [json.loads(line) for line in lines]
    assert len({entry["row"] for entry in entries}) == len(entries)
    return {entry["row"]: entry["answer"] for entry in entries}


def await_answers(output, count, command):
    while len(journaled(output)) < count:
        assert command.poll() is None, "the command ended by itself"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_prompts_outlive_a_worker_and_the_command(folder, tmp_path):
    file, one, two = (tmp_path / name for name in ("prompts.jsonl", "one.jsonl", "two.jsonl"))
    prompts = [f"the cat {number}" for number in range(1000)]
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    common = ("--prompts", file, "--model", folder, "-n", 3, "--draft", f"exit_layer={EXIT}")
    assert generate(*common, "--output", one).exit_code == 0
    args = ["generate", *common, "--output", two, "--processes", 2]
    command = subprocess.Popen(
        [sys.executable, "-m", "selfspec.cli", *map(str, args)],
        start_new_session=True,  # so that it can be killed with all its processes
        stderr=subprocess.DEVNULL,
    )
    try:
        await_answers(two, 100, command)
        workers = psutil.Process(command.pid).children()
        worker = next(child for child in workers if "spawn_main" in " ".join(child.cmdline()))
        worker.kill()
        await_answers(two, 300, command)
    finally:
        os.killpg(command.pid, signal.SIGKILL)
        command.wait()
    assert not two.exists()
    before = journaled(two)
    assert 300 <= len(before) < len(prompts)
    assert generate(*args[1:]).exit_code == 0
    answers, expected = (list(map(json.loads, at.read_text().splitlines())) for at in (two, one))
    told = [[(answer["prompt"], answer["text"]) for answer in side] for side in (answers, expected)]
    assert told[0] == told[1] and [prompt for prompt, _ in told[0]] == prompts
    # Seconds and all: what was answered is not answered again.
    assert {row: answers[row] for row in before} == before


@pytest.mark.parametrize(
    "args",
    [["--prompts", "a"], ["--output", "a"], ["-n", "2", "--prompts", "a", "--output", "b", "text"]],
    ids=" ".join,
)
def test_a_job_has_prompts_and_an_output_and_no_other_text(args):
    assert generate(*args).exit_code == 2
