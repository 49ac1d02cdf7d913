"""A folder is one process's at a time; the lock names it, and none is left when it is killed."""

import os
import socket
import subprocess
import sys

import pytest
from cli_tools import call
from training_tools import start

import benchmarks.real.__main__ as real
from benchmarks import gpu
from selfspec.config import parse
from selfspec.generation.jobs import run_job
from selfspec.heads.files import check_free, one_run
from training.exits.fitting import FitConfig
from training.finetune_layerskip import FinetuneConfig, finetune
from training.fit_heads import fit
from training.loop.script import run_folder
from training.measure_heads import measure_heads
from training.pretrain import PretrainConfig, pretrain
from training.regenerate import RegenerateConfig, regenerate

KEEP = """
import sys, time
from pathlib import Path
from selfspec.heads.files import one_run
with one_run(Path(sys.argv[1])):
    print("kept", flush=True)
    time.sleep(600)
"""


def name_of(pid):
    return rf"process {pid} on {socket.gethostname()}, started \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d"


@pytest.mark.slow
def test_a_folder_is_kept_as_long_as_its_process_lives(tmp_path):
    process: subprocess.Popen[str] = start([sys.executable, "-c", KEEP, str(tmp_path)])
    assert process.stdout is not None and process.stdout.readline() == "kept\n"
    for attempt in (check_free, lambda folder: one_run(folder).__enter__()):
        with pytest.raises(BlockingIOError, match=name_of(process.pid)) as caught:
            attempt(tmp_path)
        assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
    process.kill()
    process.communicate()
    check_free(tmp_path)


def test_a_folder_is_kept_from_a_second_run_of_its_process(tmp_path):
    with one_run(tmp_path), pytest.raises(BlockingIOError, match=name_of(os.getpid())):
        check_free(tmp_path)
    check_free(tmp_path)


def test_a_block_that_ends_lets_go(tmp_path):
    folder = tmp_path / "a" / "b"
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), one_run(folder):
            raise error
    with one_run(folder):
        pass
    check_free(folder)


def test_a_free_folder_is_not_made(tmp_path):
    check_free(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_without_locks_of_the_file_system_a_run_goes_on(tmp_path, monkeypatch):
    def unsupported(file):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("selfspec.heads.files._lock", unsupported)
    with one_run(tmp_path):
        assert (tmp_path / ".lock").exists()


TEXT = {"data": [{"files": ["none.txt"]}]}
LENS = {**TEXT, "heads": [{"kind": "lens", "exit_layer": 1}]}
LLAMA = {**TEXT, "model": {"model_type": "llama"}, "held_out": {}}
OLD = {**TEXT, "model": "none", "held_out": {"sources": {"a": TEXT["data"][0]}}}
RUNS = [
    (fit, FitConfig, LENS),
    (measure_heads, FitConfig, LENS),
    (regenerate, RegenerateConfig, TEXT),
    (pretrain, PretrainConfig, LLAMA),
    (finetune, FinetuneConfig, OLD),
]


@pytest.mark.parametrize(("run", "config", "fields"), RUNS)
def test_no_run_begins_in_a_folder_that_is_kept(tmp_path, run, config, fields):
    settings = parse(config, {**fields, "output": str(tmp_path)}, "test")
    with one_run(tmp_path), pytest.raises(BlockingIOError, match=name_of(os.getpid())):
        run(settings)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_resume_that_is_refused_leaves_the_config(tmp_path):
    config = parse(FitConfig, {**LENS, "output": str(tmp_path)}, "test")
    step, saved = tmp_path / "checkpoints" / "step_00000001", tmp_path / "config.yaml"
    step.mkdir(parents=True)
    (step / "state.json").write_text('{"identity": {}}')
    saved.write_text("before")
    with pytest.raises(ValueError, match="another text"), run_folder(config, tmp_path):
        raise ValueError("another text")
    assert saved.read_text() == "before"
    with run_folder(config, tmp_path):
        assert "lens" in saved.read_text()


def test_no_job_begins_where_another_writes(tmp_path):
    output = tmp_path / "answers.jsonl"
    job = (["a"], lambda worker, workers: lambda prompts: [(0, {})], output, {})
    with one_run(tmp_path / "answers.jsonl.parts"):
        with pytest.raises(BlockingIOError, match=name_of(os.getpid())):
            run_job(*job)
    run_job(*job)
    assert [path.name for path in tmp_path.iterdir()] == [output.name]


@pytest.mark.parametrize("command", ["fit", "regenerate"])
def test_a_second_run_is_one_line_before_its_text_is_read(tmp_path, command):
    words = (command, "--text", "none.txt", "--output", tmp_path, "target=none")
    with one_run(tmp_path):
        told = call(*words, code=1)
    (line,) = told.output.splitlines()
    assert f"in use by process {os.getpid()} on" in line


def test_a_second_benchmark_or_tuning_is_one_line(tmp_path):
    profile = tmp_path / "profile.json"
    commands = {
        tmp_path / "bench": lambda folder: call("bench", "--output", folder, "target=none", code=1),
        profile.with_suffix(".work"): lambda _: call("tune", "--output", profile, code=1),
    }
    for folder, run in commands.items():
        with one_run(folder):
            (line,) = run(folder).output.splitlines()
        assert f"{folder} is in use by process {os.getpid()} on" in line
        assert [path.name for path in folder.iterdir()] == [".lock"]


def test_measurements_of_a_checkout_have_a_folder_each(tmp_path, capsys):
    with one_run(tmp_path):
        assert gpu.main(["--device", "cpu", "--output", str(tmp_path)]) == 1
        with pytest.raises(SystemExit):
            real.main(["--output", str(tmp_path)])
    told = capsys.readouterr()
    for text in (told.out, told.err):
        assert f"{tmp_path} is in use by process {os.getpid()} on" in text.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("inner", ["", "a/b"])
def test_a_file_in_the_way_is_named(tmp_path, inner):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / inner
    with pytest.raises(ValueError, match=f"{folder} cannot be made, a file is in its way"):
        one_run(folder).__enter__()
