"""`make gpu` without a GPU: stages on a tiny shape, what is resumed, how waits are counted."""

import io
import json
import sys
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from rich.console import Console

from benchmarks import gpu
from benchmarks.gpu import Setup, count_waits, main
from benchmarks.stages import Found, run_stages
from selfspec.apps.bench.results import Grid

CPU = torch.device("cpu")


@pytest.fixture
def setup(tmp_path) -> Setup:
    return Setup(CPU, ("tiny",), tmp_path / "out")


@pytest.fixture
def ran(setup):
    """Runs stages by name; gives what was printed and whether all passed."""

    def run(minutes=25, **stages):
        console = Console(file=io.StringIO(), width=200)
        passed = run_stages(stages, setup.output, setup.identity, console, minutes)
        return passed, console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]

    return run


def test_without_a_gpu_it_stops_with_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 1
    assert capsys.readouterr().out.count("\n") == 1


def test_a_stage_is_run_once_and_one_that_failed_again(ran, setup):
    calls = []

    def stage(name, error):
        calls.append(name)
        if error:
            raise RuntimeError("out of memory")
        return Found({"seen": name}, [Grid("table", ["a"], [["b"]])])

    first, second = partial(stage, "first", False), partial(stage, "second", True)
    passed, shown = ran(first=first, second=second)
    assert not passed and "second: 0 s, RuntimeError: out of memory" in shown
    passed, _ = ran(first=first, second=partial(stage, "second", False))
    assert passed and calls == ["first", "second", "second"]
    report = json.loads((setup.output / "report.json").read_text())
    assert [report[name]["facts"]["seen"] for name in report] == ["first", "second"]
    assert "| a |" in (setup.output / "report.md").read_text()
    assert sorted(path.name for path in setup.output.iterdir()) == [
        "first.json",
        "report.json",
        "report.md",
        "second.json",
    ]


def test_results_of_another_setup_are_not_mixed_in(ran, setup):
    ran(first=Found)
    other = replace(setup, shapes=("SmolLM2-135M",))
    with pytest.raises(ValueError, match="give another --output"):
        console = Console(file=io.StringIO())
        run_stages({"first": Found}, other.output, other.identity, console)


def test_no_stage_begins_when_the_time_is_over(ran):
    passed, shown = ran(minutes=-1, first=Found)
    assert passed and "run the command again to continue" in shown


# Stages


@pytest.mark.slow
def test_a_shape_is_measured_with_planted_drafts_beside_a_static_cache(setup):
    setup.output.mkdir()
    found = gpu.measure_shape("tiny", "direct", setup)
    assert found.passed and found.facts["fell back"] == "no"
    names = [row[0] for row in found.grids[0].rows]
    assert {"plain", "generate, static cache", "selfspec plain", "medusa 0, 0.7"} <= set(names)
    assert all("planted" in grid.title for grid in found.grids)
    assert (setup.output / "tiny_direct" / "results.md").is_file()


def test_a_round_is_a_timeline(setup):
    setup.output.mkdir()
    found = gpu.profile_round(setup)
    (row,) = found.grids[0].rows
    assert row[0] == "direct" and float(row[1]) >= float(row[2]) > 0 < int(row[4])
    timeline = json.loads((setup.output / found.facts["timeline, direct"]).read_text())
    assert any(event["name"].startswith("aten::") for event in timeline["traceEvents"])


def test_drafters_are_checked_and_one_that_fails_is_a_row(setup, monkeypatch):
    drafts = {"fused 0": gpu._DRAFTS["fused 0"], "too deep": {"exit_layer": 99}}
    monkeypatch.setattr(gpu, "_DRAFTS", drafts)
    found = gpu.exactness(setup)
    cells = {(row[0], row[2]): row[3] for row in found.grids[0].rows}
    assert cells["fused 0", "float32"] == "1/1"
    assert cells["too deep", "float32"].startswith("failed: ValueError: exit_layer must be in")
    assert not found.passed


@pytest.mark.slow
def test_waits_of_all_drafters_are_counted(setup, monkeypatch):
    monkeypatch.setattr(gpu, "_DRAFTS", {"none": {"drafter": "none"}})
    rows = gpu.waits(setup).grids[0].rows
    assert [row[:3] for row in rows] == [["none", "direct", m] for m in ("greedy", "sampled")]
    assert all(float(row[3]) >= 0 for row in rows)


@pytest.mark.parametrize("fails", [False, True])
def test_the_tests_that_need_a_device_are_run(setup, monkeypatch, tmp_path, fails):
    tests = tmp_path / "tests"
    tests.mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (tests / "test_a.py").write_text(
        f"import pytest\n@pytest.mark.gpu\ndef test_it():\n    assert {not fails}\n"
    )
    monkeypatch.setattr(gpu, "_TESTS", tests)
    found = gpu.device_tests(setup)
    assert found.passed != fails
    assert f"1 {'failed' if fails else 'passed'}" in found.facts["result"]


# Waits


def test_on_a_cpu_what_reads_numbers_out_of_tensors_counts():
    values = torch.arange(4)

    def reads():
        values.nonzero()
        values[values > 1]
        values.sum().item()

    assert count_waits(reads, CPU).total() == 3
    assert not count_waits(lambda: values[values].gather(0, values), CPU)


def test_on_a_gpu_every_synchronizing_operation_counts(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def call():
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    found = count_waits(call, torch.device("cuda"))
    assert found.total() == 3 and modes == ["warn", "default"]
    assert next(iter(found)).startswith("test_gpu.py:")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="waits are those of a CUDA device")
def test_a_gpu_waits_where_a_number_is_read():
    values = torch.arange(4, device="cuda")
    assert count_waits(lambda: values.sum().item(), values.device).total() == 1
    assert not count_waits(lambda: values.sum(), values.device)


def test_it_is_a_command(monkeypatch, setup):
    monkeypatch.setattr(
        gpu, "stages_of", lambda setup: {"environment": partial(gpu.environment, setup)}
    )
    assert main(["--device", "cpu", "--shape", "tiny", "--output", str(setup.output)]) == 0
    held = json.loads((setup.output / "environment.json").read_text())
    assert held["facts"]["python"] == sys.version.split()[0]
