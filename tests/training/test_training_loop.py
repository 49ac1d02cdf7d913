"""The loop: portions do not matter, nothing is lost, and what goes wrong says so."""

import errno
import json
import math
import resource
import shutil
import signal

import pytest
import torch
import yaml
from conftest import tiny_llama
from safetensors import SafetensorError
from training_tools import (
    Line,
    Stopped,
    assert_same,
    distance,
    kept_steps,
    language_task,
    make_loop,
    metrics,
    mixture,
    saved,
    stop,
)

from selfspec.decoder.kernels import prepacked
from training.language.task import LanguageModelling
from training.loop import checkpoint
from training.loop import metrics as metrics_module
from training.loop.checkpoint import Checkpoints, write_folder
from training.loop.loop import LoopConfig
from training.loop.metrics import MetricsLog, read_metrics
from training.loop.optim import OptimizerConfig, make_optimizers, rate_scale


def run(task, output, **config):
    return make_loop(task, output, **config).run()


# Portions


@pytest.mark.parametrize("micro", [4, 2, 1])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_accumulated_gradients_are_those_of_one_big_batch(tmp_path, micro, optimizer):
    for name, size in (("whole", 8), ("parts", micro)):
        task = language_task(attention_dropout=0.0)
        output = tmp_path / name
        run(task, output, optimizer=optimizer, steps=4, batch_size=8, micro_batch_size=size)
    assert distance(saved(tmp_path / "whole", 4), saved(tmp_path / "parts", 4)) < 1e-6
    for whole, parts in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "parts"), strict=True):
        assert whole == pytest.approx(parts, rel=1e-6)


def test_the_loss_is_a_mean_over_terms_and_so_are_metrics(tmp_path):
    run(Line(), tmp_path, steps=1)
    (entry,) = metrics(tmp_path)
    assert entry["loss"] == pytest.approx(9 * 0.7**2)
    assert entry["double"] == pytest.approx(2 * entry["loss"])


def test_the_gradient_is_clipped_and_its_norm_before_that_reported(tmp_path):
    for clip in (0.0, 1.0):
        run(Line(), tmp_path / str(clip), steps=1, clip=clip)
        (entry,) = metrics(tmp_path / str(clip))
        assert entry["grad_norm"] == pytest.approx(3 * 2 * 0.7)
    free, clipped = (saved(tmp_path / str(clip), 1) for clip in (0.0, 1.0))
    moment = "optimizer0.state.weight.exp_avg"
    assert float(clipped[moment].norm() * 3 * 2 * 0.7) == pytest.approx(float(free[moment].norm()))


def test_a_batch_that_does_not_divide_is_refused(tmp_path):
    refusal = "batch_size 6 must be a multiple of micro_batch_size 4 times 1 processes"
    with pytest.raises(ValueError, match=refusal):
        make_loop(Line(), tmp_path, batch_size=6, micro_batch_size=4)


def test_evaluations_and_lines_do_not_change_what_is_learned(tmp_path):
    class Random(LanguageModelling):
        def evaluate(self):
            torch.rand(5)
            return super().evaluate()

    for every in (0, 1):
        task = language_task()
        task.__class__ = Random
        run(task, tmp_path / str(every), eval_every=every, log_every=every + 1, save_every=10)
    assert_same(saved(tmp_path / "0", 10), saved(tmp_path / "1", 10))


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_precisions_follow_one_another_in_one_process(tmp_path, precision):
    task = language_task(dtype=torch.float32)
    assert run(task, tmp_path, precision=precision, steps=2)["bits_per_byte"] > 0
    assert all(p.dtype == torch.float32 for p in task.parameters())


def test_bfloat16_is_the_default_where_the_device_computes_in_it(monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    for computes, precision in ((True, "bf16"), (False, "no")):
        monkeypatch.setattr(prepacked, "onednn_computes", lambda dtype, it=computes: it)
        assert LoopConfig().precision == precision


def test_a_bare_no_in_yaml_is_a_precision():
    assert LoopConfig(**yaml.safe_load("precision: no")).precision == "no"


def test_only_what_is_trained_is_saved(tmp_path):
    task = Line()
    run(task, tmp_path, steps=1)
    assert "model.weight" in saved(tmp_path, 1) and "model.frozen" not in saved(tmp_path, 1)
    assert torch.equal(task.frozen, torch.ones(2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`")
def test_a_compiled_task_learns_the_same(tmp_path):
    for name in (False, True):
        task = language_task(attention_dropout=0.0)
        run(task, tmp_path / str(name), compile=name, steps=3)
    assert distance(saved(tmp_path / "True", 3), saved(tmp_path / "False", 3)) < 1e-5


# Going on


def stop_at(task, last):
    """Let a run of the task end at a step, from outside."""
    forward = task.forward

    def until(batch, step, progress):
        return stop(None) if step == last else forward(batch, step, progress)

    task.forward = until


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("stopped_at", [1, 7])
def test_a_resumed_run_is_an_uninterrupted_one_bit_for_bit(tmp_path, optimizer, stopped_at):
    settings = {"optimizer": optimizer, "eval_every": 2}
    whole = run(language_task(), tmp_path / "whole", **settings)
    task = language_task()
    stop_at(task, stopped_at)
    with pytest.raises(Stopped):
        run(task, tmp_path / "parts", **settings)
    assert Checkpoints(tmp_path / "parts").steps() == [3, 6][: stopped_at // 3]
    resumed = run(language_task(), tmp_path / "parts", **settings)
    assert resumed == whole
    assert_same(saved(tmp_path / "parts", 10), saved(tmp_path / "whole", 10))
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


def test_an_interrupted_run_says_where_it_goes_on(tmp_path, capsys):
    def interrupt(loss):
        raise KeyboardInterrupt

    for step, says in [(1, "no checkpoint yet; the same command begins anew"), (8, "is step 6 in")]:
        with pytest.raises(KeyboardInterrupt):
            run(Line({step: interrupt}), tmp_path)
        assert f"{says}" in capsys.readouterr().out.splitlines()[-1]
    run(Line(), tmp_path)
    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"resuming the run in {tmp_path} after step 6 of 10"


def test_what_a_resumed_run_repeats_is_in_the_metrics_once(tmp_path):
    with pytest.raises(Stopped):
        run(Line({8: stop}), tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    task = Line()
    run(task, tmp_path)
    assert task.steps == [step for step in range(6, 10) for _ in range(2)]
    assert [entry["step"] for entry in metrics(tmp_path)] == list(range(10))


def test_metrics_of_a_run_without_a_checkpoint_begin_anew(tmp_path):
    with pytest.raises(Stopped):
        run(Line({2: stop}), tmp_path)
    assert [entry["step"] for entry in metrics(tmp_path)] == [0, 1]
    MetricsLog(tmp_path, 1)
    assert [entry["step"] for entry in read_metrics(tmp_path)] == [0]
    run(Line(), tmp_path)
    assert [entry["step"] for entry in metrics(tmp_path)] == list(range(10))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is damaged.* with step, got"):
        MetricsLog(tmp_path, 3)


def test_a_finished_run_trains_and_evaluates_no_more(tmp_path, capsys):
    first = run(Line(figures=[3.0, 2.0]), tmp_path, eval_every=5)
    before, lines = saved(tmp_path, 10), metrics(tmp_path)
    capsys.readouterr()
    task = Line(figures=[7.0])
    assert run(task, tmp_path, eval_every=5) == first == {"distance": 2.0}
    assert "complete at step 10 of 10" in " ".join(capsys.readouterr().out.split())
    assert task.steps == [] and task.evaluations == 0
    assert_same(saved(tmp_path, 10), before)
    assert metrics(tmp_path) == lines
    assert torch.equal(task.weight, before["model.weight"])


def test_a_finished_run_can_be_made_longer(tmp_path):
    run(Line(), tmp_path, steps=4)
    task = Line()
    run(task, tmp_path, steps=6)
    assert set(task.steps) == {4, 5}


def test_the_newest_checkpoints_stay(tmp_path):
    run(Line(), tmp_path / "two")
    run(Line(), tmp_path / "one", keep=1)
    assert kept_steps(tmp_path / "two") == [9, 10] and kept_steps(tmp_path / "one") == [10]


def test_what_a_kill_leaves_of_a_checkpoint_is_none(tmp_path):
    left_over = tmp_path / "checkpoints" / ".step_00000003.tmp"
    left_over.mkdir(parents=True)
    (left_over / "state.safetensors").write_bytes(b"half")
    assert Checkpoints(tmp_path).steps() == []
    run(Line(), tmp_path, keep=9)
    assert not left_over.exists() and kept_steps(tmp_path) == [3, 6, 9, 10]


# Another run in the folder


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, r"loop\.seed \(0 there, 1 here\)"),
        ({"batch_size": 2}, r"loop\.batch_size \(4 there, 2 here\)"),
        ({"identity": {"model": {"layers": 2, "width": 9}}}, r"model\.width \(8 there, 9 here\)"),
        ({"identity": {"model": {"layers": 2}}}, r"model\.width \(8 there, None here\)"),
        ({"identity": {"data": ["b"]}}, r"data\.0 \('a' there, 'b' here\)"),
    ],
)
def test_another_run_in_the_folder_is_refused_by_what_differs(tmp_path, change, named):
    identity = {"model": {"layers": 2, "width": 8}, "data": ["a"], "betas": (0.9, 0.95)}
    run(Line(), tmp_path, identity=identity, steps=3)
    change = {"identity": {}} | change
    change["identity"] = identity | change["identity"]
    with pytest.raises(ValueError, match=f"another {named}; give a new output folder"):
        make_loop(Line(), tmp_path, steps=3, **change)
    assert kept_steps(tmp_path) == [3]


def test_portions_may_change_between_a_checkpoint_and_its_resumption(tmp_path):
    run(Line(), tmp_path, steps=4)
    run(Line(), tmp_path, steps=6, micro_batch_size=1, save_every=2, keep=1, eval_every=1)
    assert kept_steps(tmp_path) == [6]


def test_weights_of_another_shape_are_named(tmp_path):
    run(Line(), tmp_path, steps=4)
    other = Line()
    other.weight = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match="other weights than the run: weight"):
        run(other, tmp_path, steps=6)


# What goes wrong


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, value):
    with pytest.raises(FloatingPointError) as stopped:
        run(Line({7: lambda loss: loss * value}), tmp_path)
    message = str(stopped.value)
    assert f"loss of step 7 is {value}" in message and "blocks 28 to 31" in message
    assert f"the last good checkpoint is step 6 in {tmp_path / 'checkpoints'}" in message
    task = Line()
    run(task, tmp_path)
    assert min(task.steps) == 6 and torch.isfinite(task.weight).all()


def test_a_gradient_that_is_not_finite_stops_the_run_before_it_does_harm(tmp_path):
    task = Line({2: lambda loss: loss + (loss - loss).sqrt()})
    with pytest.raises(FloatingPointError, match=r"grad_norm of step 2 is nan.*no checkpoint yet"):
        run(task, tmp_path)
    assert torch.isfinite(task.weight).all()


@pytest.fixture
def full_disk(monkeypatch):
    """`full_disk(how)`: from then on tensors cannot be written."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill(how):
        def refuse(tensors, path):
            path.write_bytes(b"half of it")
            raise how

        if how == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
        else:
            monkeypatch.setattr(checkpoint, "save_file", refuse)

    yield fill
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def large_line(events=None):
    """A task whose metrics are small beside its checkpoints."""
    task = Line(events)
    task.weight = torch.nn.Parameter(torch.ones(30, 30))
    return task


@pytest.mark.parametrize(
    "how",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device"),
        "limit",
    ],
    ids=["system", "safetensors", "limit"],
)
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, full_disk, how):
    with pytest.raises(Stopped):
        run(large_line({4: stop}), tmp_path)
    before = saved(tmp_path, 3)
    loop = make_loop(large_line(), tmp_path)
    full_disk(how)
    with pytest.raises(OSError, match=r"step 6 could not be saved.*last good checkpoint is step 3"):
        loop.run()
    assert_same(saved(tmp_path, 3), before)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000003"]


@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "empty", "of something else"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_serves(tmp_path, name, damage):
    whole = run(Line(), tmp_path / "whole")
    with pytest.raises(Stopped):
        run(Line({8: stop}), tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step_00000006"
    file = newest / name
    content = file.read_bytes()
    file.unlink()
    others = {"cut": content[: len(content) // 2], "empty": b"", "of something else": b"{}"}
    if damage != "gone":
        file.write_bytes(others[damage])
    with pytest.raises(
        ValueError, match=rf"checkpoint {newest} cannot be read .*delete that folder"
    ):
        run(Line(), tmp_path / "run")
    shutil.rmtree(newest)
    assert run(Line(), tmp_path / "run") == whole
    assert_same(saved(tmp_path / "run", 10), saved(tmp_path / "whole", 10))


def test_a_folder_is_written_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "folder"
    write_folder(folder, lambda scratch: (scratch / "a").write_text("first"))

    def fail(scratch):
        (scratch / "a").write_text("second")
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        write_folder(folder, fail)
    assert [p.read_text() for p in tmp_path.rglob("*") if p.is_file()] == ["first"]
    write_folder(folder, lambda scratch: (scratch / "b").write_text("third"))
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["b"]


# Early stop


def test_a_run_that_gets_no_better_stops_early(tmp_path, capsys):
    figures = [3.0, 2.0, 2.5, 2.0, 1.0]
    task = Line(figures=figures)
    assert run(task, tmp_path, eval_every=1, patience=2) == {"distance": 2.0}
    assert max(task.steps) == 3 and kept_steps(tmp_path) == [3, 4]
    capsys.readouterr()
    again = Line(figures=figures)
    assert run(again, tmp_path, eval_every=1, patience=2) == {"distance": 2.0}
    assert again.steps == [] and "complete at step 4 of 10" in capsys.readouterr().out


def test_patience_survives_a_resumption(tmp_path):
    settings = {"eval_every": 1, "patience": 3, "save_every": 1}
    with pytest.raises(Stopped):
        run(Line({3: stop}, figures=[1.0, 2.0, 2.0]), tmp_path, **settings)
    task = Line(figures=[2.0, 0.0])
    run(task, tmp_path, **settings)
    assert set(task.steps) == {3}


def test_a_better_figure_starts_the_count_anew(tmp_path):
    task = Line(figures=[3.0, 3.5, 2.0, 2.5, 1.0, 1.5, 0.5, 0.9, 0.4, 0.3])
    run(task, tmp_path, eval_every=1, patience=2)
    assert max(task.steps) == 9


# Settings


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"patience": 2}, "patience counts evaluations; give eval_every"),
        ({"fsdp": True, "precision": "fp16"}, "take bf16 with fsdp"),
        ({"seed": -1}, "greater than or equal to 0"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, refusal):
    with pytest.raises(ValueError, match=refusal):
        LoopConfig(**settings)


def test_an_unknown_tracker_is_refused_with_those_known(tmp_path):
    with pytest.raises(
        ValueError, match="unknown tracker: 'tensorbord'; did you mean 'tensorboard"
    ):
        make_loop(Line(), tmp_path, trackers=["tensorbord"])


def test_a_tracker_that_is_not_installed_is_named_before_work_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="tracker 'wandb' is not installed: pip install wandb"):
        make_loop(Line(), tmp_path, trackers=["wandb"])


def test_a_task_with_nothing_to_train_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing is trained: every parameter is frozen"):
        make_loop(Line().requires_grad_(False), tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_muon_takes_the_matrices_inside_layers_alone(tied):
    model = tiny_llama(tie_word_embeddings=tied)
    muon, adamw = make_optimizers(model, OptimizerConfig(name="muon"))
    names = {parameter: name for name, parameter in model.named_parameters()}
    by_muon = {names[p] for group in muon.param_groups for p in group["params"]}
    by_adamw = {names[p] for group in adamw.param_groups for p in group["params"]}
    assert by_muon == {n for n in names.values() if "proj" in n}
    assert by_muon | by_adamw == set(names.values())


def test_muon_without_a_matrix_is_refused():
    with pytest.raises(ValueError, match="muon trains matrices inside layers"):
        make_optimizers(torch.nn.LayerNorm(4), OptimizerConfig(name="muon"))


def test_the_rate_rises_stays_and_falls():
    config = OptimizerConfig(warmup=0.1, decay=0.5, final=0.2)
    scales = [rate_scale(config, step, 100) for step in range(100)]
    assert scales[0] == pytest.approx(0.1) and scales[9:51] == pytest.approx([1.0] * 42)
    assert scales == sorted(scales[:10]) + scales[10:50] + sorted(scales[50:], reverse=True)
    assert scales[-1] == pytest.approx(0.2 + 0.8 / 50)
    assert [rate_scale(OptimizerConfig(warmup=0, decay=0), s, 3) for s in range(3)] == [1, 1, 1]


def test_checkpoints_are_safetensors_and_json(tmp_path):
    run(Line(), tmp_path, steps=1)
    (folder,) = (tmp_path / "checkpoints").iterdir()
    assert {path.name for path in folder.iterdir()} == {"state.safetensors", "state.json"}
    facts = json.loads((folder / "state.json").read_text())
    assert facts["step"] == 1 and facts["identity"]["task"] == "line"


# The data's order


def test_processes_share_out_one_order():
    data = mixture()
    whole = data.batch(0, 12)
    for world in (2, 3):
        parts = [mixture().batch(rank, 12 // world, stride=world) for rank in range(world)]
        for rank, part in enumerate(parts):
            assert torch.equal(part.tokens, whole.tokens[rank::world])


def test_the_order_is_a_function_of_the_place():
    data = mixture()
    late = data[57].tokens
    assert torch.equal(mixture()[57].tokens, late)
    assert any(not torch.equal(mixture(1)[n].tokens, data[n].tokens) for n in range(5))


def test_an_epoch_holds_every_block_once_and_sources_come_by_weight():
    data = mixture()
    places = [data._order[n] for n in range(300) if data[n]]
    first = [number for source, number in places if source == 0]
    size = len(data.sources[0])
    assert sorted(first[:size]) == sorted(first[size : 2 * size]) == list(range(size))
    assert first[:size] != first[size : 2 * size]
    assert 0.55 < len(first) / len(places) < 0.78
