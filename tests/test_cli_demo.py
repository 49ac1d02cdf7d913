"""`selfspec demo`: equal texts, and figures that are those of its JSON."""

import io

import pytest
import torch
from cli_tools import PROMPT, TOKENS, call, one_object, own_text
from conftest import EXIT, tiny_llama
from rich.console import Console

from selfspec import SelfSpecModel
from selfspec.cli import demo
from selfspec.cli.demo import demo_table
from selfspec.display import unmarked
from selfspec.display.demo import DemoOptions, Run, Writer, load_prompts, run_demo
from selfspec.schedule.stats import PARTS


@pytest.fixture
def writer(tokenizer):
    """A tiny target and a prompt, ready to be timed."""

    def make(**options):
        spec = SelfSpecModel(tiny_llama("sometimes", dtype=options.pop("dtype", torch.float64)))
        draft = {"exit_layer": EXIT, "num_draft_tokens": 3}
        options = {"draft": draft, "max_new_tokens": TOKENS, "repeats": 2} | options
        return Writer(spec, tokenizer, PROMPT, DemoOptions(**options))

    return make


def rendered(*tables):
    paper = io.StringIO()
    Console(file=paper, width=120).print(*tables)
    return paper.getvalue()


def test_the_demo_writes_equal_texts_on_the_model_in_the_package():
    found = one_object(call("demo", "--max-new-tokens", 8, "--repeats", 1, "--json"))
    assert found["equal"] is True
    assert found["divergence"] is None
    assert found["stats"]["emitted"] == 8
    assert found["prompt"] == load_prompts()[0].text
    assert found["plain_tokens_per_second"] > 0 < found["tokens_per_second"]


def test_what_the_demo_streams_is_the_text(folder):
    options = (
        "--prompt",
        PROMPT,
        "--max-new-tokens",
        TOKENS,
        "--repeats",
        1,
        "--draft",
        f"exit_layer={EXIT}",
    )
    shown = call("demo", "--model", folder, *options).stdout
    assert PROMPT + own_text(folder) in unmarked(shown)
    assert f"both outputs are equal, all {TOKENS} tokens" in shown


def test_the_demos_table_shows_the_figures_of_its_json(writer):
    result = run_demo(writer())
    found, table = result.to_dict(), rendered(demo_table(result))
    for _, key, form in demo.ROWS:
        assert form.format(found[key]) in table
    assert found["acceptance_rate"] == result.stats.acceptance_rate
    split = [found[f"time_{part}"] for part in (*PARTS, "rest")]
    assert sum(split) == pytest.approx(1)


def altered(plain):
    """The model's own `generate`, with another token in place of the sixth."""

    def write(self, count=None):
        run = plain(self, count)
        tokens = [*run.tokens[:5], (run.tokens[5] + 1) % 64, *run.tokens[6:]]
        return run._replace(tokens=tokens if len(run.tokens) > 5 else run.tokens)

    return write


@pytest.mark.parametrize(("dtype", "code"), [("float32", 1), ("bfloat16", 0)])
def test_texts_that_differ_are_an_error_where_they_must_be_equal(folder, monkeypatch, dtype, code):
    monkeypatch.setattr(Writer, "plain", altered(Writer.plain))
    options = (
        "--prompt",
        PROMPT,
        "-n",
        TOKENS,
        "--repeats",
        1,
        "--draft",
        f"exit_layer={EXIT}",
        "--dtype",
        dtype,
    )
    result = call("demo", "--model", folder, *options, "--json", code=code)
    found = one_object(result)
    assert found["equal"] is False
    assert found["divergence"]["position"] <= 5
    assert found["divergence"]["margin"] >= 0


def test_sampled_texts_are_not_compared(writer):
    result = run_demo(writer(temperature=1.0))
    assert result.equal is None
    assert not result.exact


def test_runs_are_interleaved_and_compared_by_their_medians():
    from selfspec.display.demo import interleaved, ratio

    order = []
    clock = {"a": iter([1, 2, 99]), "b": iter([1, 4, 8])}

    def way(name):
        return lambda: order.append(name) or Run([0] * 8, next(clock[name]))

    runs = interleaved({"a": way("a"), "b": way("b")}, repeats=3)
    assert "".join(order) == "abbaab"
    assert ratio(runs["a"], runs["b"]) == 2
