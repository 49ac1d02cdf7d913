"""`selfspec demo`: equal texts, and figures that are those of its JSON."""

import io
import shutil

import pytest
import torch
from cli_tools import PROMPT, TOKENS, altered, call, one_object, own_text, unmarked
from conftest import EXIT, greedy, tiny_llama
from head_tools import own_head
from rich.console import Console
from transformers import AutoTokenizer

from selfspec import DEMO_MODEL, SelfSpecModel
from selfspec.apps.bench.results import loops
from selfspec.apps.cli import demo
from selfspec.apps.cli.demo import demo_table
from selfspec.apps.display.demo import (
    Comparison,
    DemoOptions,
    Run,
    load_prompts,
    run_demo,
)
from selfspec.apps.display.divergence import next_scores
from selfspec.apps.smollm2 import QUESTIONS
from selfspec.heads import save_heads
from selfspec.schedule.stats import PARTS


@pytest.fixture
def writer(tokenizer):
    """A tiny target and a prompt, ready to be timed."""

    def make(**options):
        spec = SelfSpecModel(tiny_llama("sometimes", dtype=options.pop("dtype", torch.float64)))
        draft = {"exit_layer": EXIT, "num_draft_tokens": 3}
        options = {"draft": draft, "max_new_tokens": TOKENS, "repeats": 2} | options
        return Comparison(spec, tokenizer, PROMPT, DemoOptions(**options))

    return make


def rendered(*tables):
    paper = io.StringIO()
    Console(file=paper, width=120).print(*tables)
    return paper.getvalue()


@pytest.fixture(scope="module")
def shown():
    """What the demo tells of the model in the package."""
    return one_object(call("demo", "--max-new-tokens", 64, "--repeats", 1, "--json"))


@pytest.mark.slow
def test_the_demo_writes_equal_texts_of_prose_and_code(shown):
    assert list(shown["texts"]) == ["prose", "code"]
    for domain, found in shown["texts"].items():
        assert found["equal"] is True
        assert found["divergence"] is None
        assert found["stats"]["emitted"] == 64
        assert found["prompt"] == load_prompts(domain)[0].text
        assert found["plain_tokens_per_second"] > 0 < found["tokens_per_second"]


@pytest.mark.slow
def test_the_demos_texts_do_not_loop(shown):
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    for found in shown["texts"].values():
        assert not loops(tokenizer(found["text"]).input_ids)
        assert found["acceptance_rate"] > 0.2


@pytest.mark.slow
def test_the_demo_decodes_greedily_if_asked_to():
    options = ("--domain", "code", "--max-new-tokens", 8, "--repeats", 1, "--greedy", "--json")
    found = one_object(call("demo", *options))
    assert found["options"]["temperature"] == 0
    assert [*found["texts"]] == ["code"] and found["texts"]["code"]["equal"] is True


def test_the_chat_model_answers_questions_with_its_head(folder, tmp_path, monkeypatch):
    """Greedily, in its chat template; fetched, it is the target unless another one is named."""
    shutil.copytree(folder, tmp_path / "chat")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "chat")
    tokenizer.chat_template = "{% for m in messages %}u: {{ m.content }}.a:{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "chat")
    spec = SelfSpecModel.from_pretrained(tmp_path / "chat")
    save_heads([own_head(spec.decoder, "lens", EXIT)], spec.decoder, tmp_path / "heads")
    monkeypatch.setattr(demo, "_chat_model", lambda: tmp_path / "chat")
    monkeypatch.setattr(demo, "HEADS", tmp_path / "heads")
    found = one_object(call("demo", "--max-new-tokens", 8, "--repeats", 1, "--json"))
    assert list(found["texts"]) == list(QUESTIONS) and found["options"]["temperature"] == 0
    for name, told in found["texts"].items():
        assert told["prompt"] == QUESTIONS[name] and told["equal"] is True
        ids = tokenizer(f"u: {QUESTIONS[name]}.a:", return_tensors="pt").input_ids
        own = greedy(spec.model, ids, max_new_tokens=8)[0, ids.shape[1] :]
        assert told["text"] == tokenizer.decode(own, skip_special_tokens=True)


def test_the_demo_says_why_the_chat_model_is_left_out(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert demo._chat_model() is None
    assert "without SmolLM2-135M-Instruct (HF_HUB_OFFLINE is set)" in capsys.readouterr().err


@pytest.mark.parametrize("sampled", [False, True])
def test_what_the_demo_streams_is_the_text(folder, sampled):
    options = ["--prompt", PROMPT, "--max-new-tokens", TOKENS, "--repeats", 1]
    options += ["--draft", f"exit_layer={EXIT}", *([] if sampled else ["--greedy"])]
    told = call("demo", "--model", folder, *options).stdout
    text = one_object(call("demo", "--model", folder, *options, "--json"))["texts"][""]["text"]
    assert PROMPT + text in unmarked(told)
    assert (text == own_text(folder)) is not sampled
    assert f"both outputs are equal, all {TOKENS} tokens" in told


def test_the_demos_table_shows_the_figures_of_its_json(writer):
    result = run_demo(writer())
    found, table = result.to_dict(), rendered(demo_table({"prose": result}))
    for _, key, form in demo.ROWS:
        assert form.format(found[key]) in table
    assert found["acceptance_rate"] == result.stats.acceptance_rate
    split = [found[f"time_{part}"] for part in (*PARTS, "rest")]
    assert sum(split) == pytest.approx(1)


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize(("dtype", "code"), [("float32", 1), ("bfloat16", 0)])
def test_texts_that_differ_are_an_error_where_they_must_be_equal(
    folder, monkeypatch, dtype, code, temperature
):
    monkeypatch.setattr(Comparison, "plain", altered(Comparison.plain))
    options = ["--prompt", PROMPT, "-n", TOKENS, "--repeats", 1, "--draft", f"exit_layer={EXIT}"]
    options += ["--dtype", dtype, "--temperature", temperature]
    result = call("demo", "--model", folder, *options, "--json", code=code)
    found = one_object(result)["texts"][""]
    assert found["equal"] is False
    assert found["divergence"]["position"] <= 5
    assert found["divergence"]["margin"] >= 0


def test_texts_sampled_by_another_rule_are_not_compared(writer):
    result = run_demo(writer(temperature=1.0))
    assert result.equal is None
    assert not result.exact


def test_the_models_own_generate_makes_the_choices_of_the_rule_coupled(writer):
    """Whatever the seed; another seed gives another text."""
    draft = {"exit_layer": EXIT, "num_draft_tokens": 3, "rule": "coupled"}
    texts = []
    for seed in range(4):
        made = writer(temperature=0.9, draft=draft, seed=seed)
        texts.append(made.plain().tokens)
        assert made.speculative(made.options.draft).tokens == texts[-1]
    assert len(set(map(tuple, texts))) == 4


def test_the_margin_of_sampled_texts_is_that_of_what_was_chosen_by(writer):
    """The chosen token has the largest score at every position, so the margin is positive."""
    draft = {"exit_layer": EXIT, "rule": "coupled"}
    made = writer(temperature=0.9, draft=draft)
    tokens = made.plain().tokens
    for place, token in enumerate(tokens):
        other = [*tokens[:place], (token + 1) % 64, *tokens[place + 1 :]]
        found = made.divergence(tokens, other)
        ids = made.inputs["input_ids"]
        texts = torch.cat([ids, ids.new_tensor([tokens[:place]])], dim=1)
        scores = next_scores(made.spec, texts, torch.ones_like(texts), made.own_options)[0].float()
        assert found.position == place
        assert int(scores.argmax()) == token
        assert found.margin == float(scores[token] - scores[(token + 1) % 64]) > 0


def test_runs_are_interleaved_and_compared_by_their_medians():
    from selfspec.apps.display.demo import interleaved, ratio

    order = []
    clock = {"a": iter([1, 2, 99]), "b": iter([1, 4, 8])}

    def way(name):
        return lambda: order.append(name) or Run([0] * 8, next(clock[name]))

    runs = interleaved({"a": way("a"), "b": way("b")}, repeats=3)
    assert "".join(order) == "abbaab"
    assert ratio(runs["a"], runs["b"]) == 2
