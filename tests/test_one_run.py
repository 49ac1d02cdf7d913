"""A folder is one process's at a time; the lock names it, and none is left when it is killed."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from training_tools import start

from selfspec.config import parse
from selfspec.generation.jobs import run_job
from selfspec.heads.files import check_free, one_run
from training.exits.fitting import FitConfig
from training.finetune_layerskip import FinetuneConfig, finetune
from training.fit_heads import fit
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


@contextmanager
def kept(folder):
    """Another process that keeps a folder."""
    process: subprocess.Popen[str] = start([sys.executable, "-c", KEEP, str(folder)])
    assert process.stdout is not None and process.stdout.readline() == "kept\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGTERM])
def test_a_folder_is_kept_as_long_as_its_process_lives(tmp_path, ended_by):
    owner = rf"process {{}} on {socket.gethostname()}, started \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d"
    with kept(tmp_path) as process:
        for attempt in (check_free, lambda folder: one_run(folder).__enter__()):
            with pytest.raises(BlockingIOError, match=owner.format(process.pid)) as caught:
                attempt(tmp_path)
            assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
        process.send_signal(ended_by)
        process.wait()
        check_free(tmp_path)
        with one_run(tmp_path):
            with pytest.raises(BlockingIOError, match=owner.format(os.getpid())):
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
RUNS = {
    "fit": (fit, FitConfig, {**TEXT, "heads": [{"kind": "lens", "exit_layer": 1}]}),
    "measure": (measure_heads, FitConfig, {**TEXT, "heads": [{"kind": "lens", "exit_layer": 1}]}),
    "regenerate": (regenerate, RegenerateConfig, TEXT),
    "pretrain": (
        pretrain,
        PretrainConfig,
        {**TEXT, "model": {"model_type": "llama"}, "held_out": {}},
    ),
    "finetune": (
        finetune,
        FinetuneConfig,
        {**TEXT, "model": "none", "held_out": {"sources": {"a": TEXT["data"][0]}}},
    ),
}


def test_no_run_begins_in_a_folder_that_is_kept(tmp_path):
    with kept(tmp_path) as process:
        for run, config, fields in RUNS.values():
            settings = parse(config, {**fields, "output": str(tmp_path)}, "test")
            with pytest.raises(BlockingIOError, match=f"in use by process {process.pid}"):
                run(settings)
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_no_job_begins_where_another_writes(tmp_path):
    output = tmp_path / "answers.jsonl"
    with kept(tmp_path / "answers.jsonl.parts") as process:
        with pytest.raises(BlockingIOError, match=f"in use by process {process.pid}"):
            run_job(["a"], lambda worker, workers: lambda prompts: [(0, {})], output, {})
    run_job(["a"], lambda worker, workers: lambda prompts: [(0, {})], output, {})
    assert [path.name for path in tmp_path.iterdir()] == [output.name]


def test_a_second_fit_is_one_line_before_its_text_is_read(tmp_path):
    output = Path(tmp_path / "run")
    with kept(output) as process:
        for command in ("fit", "regenerate"):
            told = subprocess.run(
                [sys.executable, "-m", "selfspec.cli", command, "--output", str(output)],
                capture_output=True,
                text=True,
            )
            (line,) = told.stderr.splitlines()
            assert told.returncode == 1 and f"in use by process {process.pid} on" in line
            assert told.stdout == ""
