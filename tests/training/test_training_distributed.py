"""Two processes learn what one does, in copies (DDP) or in shards (FSDP2); one of them speaks."""

import json

import pytest
import torch
from training_tools import command, distance, metrics, pretrain_config, saved, start, write_text
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow


def train(folder, name, processes, **changes):
    """Pretrain for four steps in several processes; returns the output."""
    loop = {"micro_batch_size": 1, "eval_every": 2, "save_every": 2} | changes.pop("loop", {})
    config = pretrain_config(folder, output=str(folder / name), loop=loop, **changes)
    process = start(command(config, folder, processes))
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return output


def assert_learned_alike(folder, left, right):
    assert distance(saved(folder / left, 4), saved(folder / right, 4)) < 1e-5
    for one, other in zip(metrics(folder / left), metrics(folder / right), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def assert_said_once(output):
    assert output.count("held out, step 2") == output.count("held out, step 4") == 1
    assert output.count("block_size: 32") == 1
    assert output.count("pretraining 4/4") == 1


def assert_loads(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    for name, tensor in saved(folder, 4).items():
        if name.startswith("model.model."):
            saved_in = model.state_dict()[name.removeprefix("model.model.")]
            assert torch.equal(saved_in, tensor.bfloat16())
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert model(**tokenizer("the sea", return_tensors="pt")).logits.isfinite().all()


WAYS = pytest.mark.parametrize(("name", "sharded"), [("copies", False), ("shards", True)])


@WAYS
def test_two_processes_learn_what_one_does(tmp_path, name, sharded):
    write_text(tmp_path)
    train(tmp_path, "one", 1)
    output = train(tmp_path, name, 2, loop={"fsdp": sharded})
    assert_said_once(output)
    assert_learned_alike(tmp_path, name, "one")
    assert_loads(tmp_path / name)
    facts = json.loads((tmp_path / name / "model" / "eval.json").read_text())
    assert facts["tokens_seen"] == 4 * 4 * 32
    assert not [p.name for p in (tmp_path / name).rglob("*.tmp")]


@WAYS
def test_two_processes_update_matrices_whole(tmp_path, name, sharded):
    """Muon makes the update orthogonal, in bfloat16: rounding shows, shards must not."""
    write_text(tmp_path)
    muon = {"optimizer": {"name": "muon"}}
    train(tmp_path, "one", 1, **muon)
    train(tmp_path, name, 2, loop={"fsdp": sharded}, **muon)
    early, late, other = (
        weights(tmp_path / run, step) for run, step in (("one", 2), ("one", 4), (name, 4))
    )
    assert (late - other).norm() < 0.1 * (late - early).norm()


def weights(run, step):
    tensors = saved(run, step)
    return torch.cat([tensors[k].flatten() for k in sorted(tensors) if k.startswith("model.")])


@pytest.mark.parametrize("sharded", [False, True])
def test_a_run_goes_on_on_another_number_of_processes(tmp_path, sharded):
    write_text(tmp_path)
    level = {"optimizer": {"warmup": 0.0, "decay": 0.0}}
    train(tmp_path, "one", 1, **level)
    train(tmp_path, "parts", 1, **level, loop={"steps": 2})
    train(tmp_path, "parts", 2, **level, loop={"fsdp": sharded})
    assert_learned_alike(tmp_path, "parts", "one")


def test_shards_go_on_in_bfloat16(tmp_path):
    write_text(tmp_path)
    for steps in (2, 4):
        train(tmp_path, "run", 2, loop={"steps": steps, "fsdp": True, "precision": "bf16"})
    assert metrics(tmp_path / "run")[-1]["loss"] > 0
    assert_loads(tmp_path / "run")


def test_a_mistake_ends_every_process(tmp_path):
    write_text(tmp_path)
    config = pretrain_config(tmp_path, loop={"batch_size": 3, "micro_batch_size": 1})
    process = start(command(config, tmp_path, 2))
    _, errors = process.communicate(timeout=240)
    assert process.returncode != 0
    assert "batch_size 3 must be a multiple of micro_batch_size 1 times 2 processes" in errors
