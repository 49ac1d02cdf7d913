"""Two processes fit the heads that one does, the target in copies (DDP) or in shards (FSDP2)."""

import pytest
import torch
from conftest import greedy
from fit_tools import EVERY_KIND, fit_config, head_weights, write_target
from training_tools import command, distance, metrics, start

from selfspec import DraftConfig, SelfSpecModel

pytestmark = pytest.mark.slow


def run(folder, name, processes, **loop):
    """Fit every kind in several processes, all with the same batch; returns the output."""
    usual = {"micro_batch_size": 1, "eval_every": 2, "save_every": 2}
    changes = {"heads": EVERY_KIND, "loss": {"depths": 3}, "loop": usual | loop}
    # The same whatever the number of steps. Adam turns the rounding of a gradient that is nearly 0
    # into a difference of up to the rate.
    level = {"lr": 1e-3, "warmup": 0.0, "decay": 0.0}
    config = fit_config(folder, **changes, optimizer=level, output=str(folder / name))
    process = start(command(config, folder, processes, script="training.fit_heads"))
    said, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    return said


def learned(output):
    """What training made; calibrators are fitted to it afterwards."""
    return {k: v for k, v in head_weights(output).items() if ".calibrators." not in k}


def assert_fitted_alike(folder, left, right, within):
    assert distance(learned(folder / left), learned(folder / right)) < within
    for one, other in zip(metrics(folder / left), metrics(folder / right), strict=True):
        assert one == pytest.approx(other, rel=1e-3)


def assert_loads_and_stays_exact(folder, name):
    spec = SelfSpecModel.from_pretrained(
        folder / "target", heads=folder / name / "heads", dtype=torch.float32
    )
    ids = torch.arange(5, 14)[None]
    own = greedy(spec.causal_lm, ids, max_new_tokens=12, pad_token_id=0)
    for head in spec.heads:
        assert sorted(head.calibrators) == ["greedy", "sampled"]
        draft = DraftConfig(exit_layer=head.exit_layer, head=head.kind)
        assert torch.equal(spec.generate(ids, draft=draft, max_new_tokens=12, pad_token_id=0), own)


WAYS = [("copies", False, 1e-5), ("shards", True, 1e-4)]


@pytest.mark.parametrize(("name", "sharded", "within"), WAYS)
def test_two_processes_fit_what_one_does(tmp_path, name, sharded, within):
    write_target(tmp_path)
    run(tmp_path, "one", 1)
    said = run(tmp_path, name, 2, fsdp=sharded)
    assert said.count("fitting 4/4") == said.count("held out, step 4") == 1
    assert said.count("drafting over held-out text") == 1
    assert_fitted_alike(tmp_path, name, "one", within)
    assert_loads_and_stays_exact(tmp_path, name)
    assert not list((tmp_path / name).rglob("*.tmp"))


def test_a_fit_goes_on_in_shards(tmp_path):
    write_target(tmp_path)
    run(tmp_path, "one", 1)
    run(tmp_path, "parts", 1, steps=2)
    run(tmp_path, "parts", 2, fsdp=True)
    assert_fitted_alike(tmp_path, "parts", "one", 1e-4)
    assert_loads_and_stays_exact(tmp_path, "parts")
