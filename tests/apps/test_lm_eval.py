"""lm-eval's `selfspec` model: the scores and texts of `hf`, and only generation goes through us."""

import importlib.metadata
import json

import pytest
import yaml
from conftest import EXIT

pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install 'selfspec[eval]')")

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from selfspec import SelfSpecModel
from selfspec.apps.bench.lm_eval import SelfSpecLM

DRAFT = {"exit_layer": EXIT, "num_draft_tokens": 3}
PROMPTS = ["the cat", "on the mat\n", "in the sun and the sea", "a", "an hour, on a bat"]
# lm-eval and what it imports warn of themselves.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def folder(folder, tokenizer):
    """The checkpoint; lm-eval wants an end of text."""
    tokenizer.eos_token = "B"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tasks(tmp_path):
    """A task that generates and one that compares log-likelihoods."""
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": prompt, "answer": "the"} for prompt in PROMPTS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
    }
    written = {
        "task": "own_generation",
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["th", "e\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "bleu"}],
    }
    compared = {
        "task": "own_likelihood",
        "output_type": "multiple_choice",
        "doc_to_choice": ["the", "xyz"],
        "metric_list": [{"metric": "acc"}],
    }
    for task in (written, compared):
        (tmp_path / f"{task['task']}.yaml").write_text(yaml.safe_dump({**common, **task}))
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def evaluate(model, folder, task, tasks, batch_size, **arguments):
    found = simple_evaluate(
        model=model,
        model_args={"pretrained": folder, "device": "cpu", **arguments},
        tasks=[task],
        task_manager=tasks,
        batch_size=batch_size,
        bootstrap_iters=0,
    )
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return found, [sample["filtered_resps"] for sample in samples]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_generated_texts_and_scores_are_those_of_hf(folder, tasks, batch_size):
    common = (folder, "own_generation", tasks, batch_size)
    theirs, own_texts = evaluate("hf", *common)
    ours, texts = evaluate("selfspec", *common, draft=DRAFT)
    assert texts == own_texts
    assert len({text for (text,) in texts}) > 1
    assert ours["results"] == theirs["results"]
    told = ours["config"]["selfspec"]
    assert told["draft"] == DRAFT
    assert 0 < told["acceptance_rate"] == told["accepted"] / told["drafted"]


def test_log_likelihoods_do_not_go_through_speculation(folder, tasks, monkeypatch):
    common = (folder, "own_likelihood", tasks, 2)
    theirs, own_answers = evaluate("hf", *common)
    monkeypatch.delattr(SelfSpecModel, "generate")
    ours, answers = evaluate("selfspec", *common, draft=DRAFT)
    assert answers == own_answers
    assert ours["results"] == theirs["results"]
    assert ours["config"]["selfspec"]["drafted"] == 0


def test_a_row_that_stops_does_not_wait_for_the_others(folder, tasks):
    model = SelfSpecLM(folder, draft=DRAFT, device="cpu", batch_size=len(PROMPTS))
    simple_evaluate(model=model, tasks=["own_generation"], task_manager=tasks, bootstrap_iters=0)
    assert model.stats.emitted < 12 * len(PROMPTS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"draft": "early_exits"}, "did you mean 'early_exit'"),
        ({"draft": {"exit_layer": 9}}, r"exit_layer must be in \[1, 3\], got 9"),
        ({"heads": "/no/such/heads"}, "no folder /no/such/heads"),
        ({"profile": "/no/such/profile"}, "no profile at /no/such/profile"),
    ],
    ids=str,
)
def test_a_mistake_is_said_before_anything_runs(folder, arguments, says):
    with pytest.raises((ValueError, OSError), match=says):
        SelfSpecLM(folder, device="cpu", **arguments)


def test_lm_eval_can_find_the_model_by_itself():
    (found,) = importlib.metadata.entry_points(group="lm_eval.models", name="selfspec")
    assert found.load() is SelfSpecLM
