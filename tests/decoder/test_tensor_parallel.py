"""Two processes with a share of every layer write what one writes, and decide everything alike."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import EXIT, ROOT, tiny_llama
from doc_tools import steps
from head_tools import own_head
from rank_tools import TIMED, write_all
from training_tools import start

from selfspec import DEMO_MODEL, SelfSpecModel
from selfspec.heads import HEAD_KINDS

pytestmark = pytest.mark.slow


def launch(*words):
    """Run a script in two processes; what it printed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = start([*launcher, *map(str, words)])
    try:
        output, errors = process.communicate(timeout=270)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its processes
        raise
    assert process.returncode == 0, errors
    return output


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What each of two processes wrote, with a tiny target whose heads are trimmed and the demo."""
    folder = tmp_path_factory.mktemp("ranks")
    spec = SelfSpecModel(tiny_llama("sometimes", dtype=torch.float32))
    decoder = spec.decoder
    kinds = [kind for kind in HEAD_KINDS if kind != "shared"]
    spec.engine.heads = [own_head(decoder, kind, EXIT, trimmed=True) for kind in kinds]
    spec.save_pretrained(folder / "tiny")
    launch(ROOT / "tests/rank_tools.py", folder)
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("target", ["demo", "tiny"])
def test_two_processes_write_what_one_writes(written, target):
    folder, (first, _) = written
    alone = write_all(DEMO_MODEL if target == "demo" else folder / "tiny")
    timed = {f"{name} sampled" for name in TIMED}
    for case in alone.keys() - timed - {"late"}:
        assert first[target][case]["tokens"] == alone[case]["tokens"], case
        if case.split()[0] not in TIMED:
            assert first[target][case] == alone[case], case


@pytest.mark.parametrize("target", ["demo", "tiny"])
def test_processes_decide_alike_whatever_their_clocks_and_seeds_say(written, target):
    _, (first, second) = written
    assert first[target] == second[target]


def test_other_prompts_in_other_processes_are_refused(written):
    _, (first, _) = written
    assert "give all of them the same prompt" in first["tiny"]["other prompts"]


def test_the_script_on_the_page_is_for_any_number_of_processes(tmp_path, capsys):
    page = steps(ROOT / "docs/devices.md")
    (text,) = (step.text for step in page if "DistributedConfig" in step.text)
    script = tmp_path / "write.py"
    script.write_text(text)
    exec(compile(text, str(script), "exec"), {})
    assert capsys.readouterr().out == launch(script) != ""
