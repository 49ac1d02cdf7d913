"""The command line: one JSON object on request, one line for an error, the same text as the API."""

import io
import json
import re
import subprocess
import sys

import pytest
import torch
import transformers
from conftest import EXIT, greedy, tiny_llama
from rich.console import Console
from typer.testing import CliRunner

from selfspec import DEMO_MODEL, SelfSpecModel, __version__
from selfspec.cli import app, demo, info
from selfspec.cli.demo import comparison_tables, demo_table
from selfspec.demo import DemoOptions, Run, Writer, compare, load_prompts, run_demo
from selfspec.display import unmarked
from selfspec.heads import LensHead, save_heads
from selfspec.stats import PARTS

PROMPT = "the cat on the mat"
TOKENS = 12
DRAFT = ("--draft", f"exit_layer={EXIT}", "--draft", "num_draft_tokens=3")


@pytest.fixture(autouse=True)
def _quiet():
    """The command line quietens transformers; the next test gets it back as it was."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    yield
    logging.set_verbosity(verbosity)
    (logging.enable_progress_bar if bars else logging.disable_progress_bar)()


@pytest.fixture
def folder(tmp_path, tokenizer):
    """A tiny checkpoint on disk, with its tokenizer."""
    path = tmp_path / "tiny"
    tiny_llama("sometimes").save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def writer(tokenizer):
    """A tiny target and a prompt, ready to be timed."""

    def make(**options):
        spec = SelfSpecModel(tiny_llama("sometimes", dtype=options.pop("dtype", torch.float64)))
        draft = {"exit_layer": EXIT, "num_draft_tokens": 3}
        options = {"draft": draft, "max_new_tokens": TOKENS, "repeats": 2} | options
        return Writer(spec, tokenizer, PROMPT, DemoOptions(**options))

    return make


def call(*args, code=0, **kwargs):
    """Run a command; returns the finished call."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], **kwargs)
    assert result.exit_code == code, result.output
    return result


def one_object(result):
    """The JSON object that is all of stdout."""
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def own_text(folder, prompt=PROMPT):
    """What the checkpoint's own `generate` writes."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    return tokenizer.decode(greedy(model, ids, max_new_tokens=TOKENS)[0, ids.shape[1] :])


def rendered(*tables):
    paper = io.StringIO()
    Console(file=paper, width=120).print(*tables)
    return paper.getvalue()


# Demo


def test_the_demo_writes_equal_texts_on_the_model_in_the_package():
    found = one_object(call("demo", "--max-new-tokens", 8, "--repeats", 1, "--json"))
    assert found["equal"] is True
    assert found["divergence"] is None
    assert found["stats"]["emitted"] == 8
    assert found["prompt"] == load_prompts()[0].text
    assert found["plain_tokens_per_second"] > 0 < found["tokens_per_second"]


def test_what_the_demo_streams_is_the_text(folder):
    options = ("--prompt", PROMPT, "--max-new-tokens", TOKENS, "--repeats", 1, "-e", EXIT)
    shown = call("demo", "--model", folder, *options).stdout
    assert PROMPT + own_text(folder) in unmarked(shown)
    assert f"both texts are equal, all {TOKENS} tokens" in shown


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
    options = ("--prompt", PROMPT, "-n", TOKENS, "--repeats", 1, "-e", EXIT, "--dtype", dtype)
    result = call("demo", "--model", folder, *options, "--json", code=code)
    found = one_object(result)
    assert found["equal"] is False
    assert found["divergence"]["position"] <= 5
    assert found["divergence"]["margin"] >= 0


def test_sampled_texts_are_not_compared(writer):
    result = run_demo(writer(temperature=1.0))
    assert result.equal is None
    assert not result.exact


def test_the_comparison_measures_the_loop_against_its_bars(folder):
    options = ("--prompt", PROMPT, "-n", TOKENS, "--repeats", 2, "-e", EXIT)
    found = one_object(call("demo", "--model", folder, *options, "--compare", "--json"))
    assert list(found["ways"]) == ["generate", "none", "early_exit"]
    assert found["ways"]["generate"]["ratio"] == 1
    assert found["equal"] is True
    overhead, rest = found["bars"]
    assert overhead["value"] == found["ways"]["none"]["ratio"]
    assert overhead["met"] == (overhead["value"] >= 1)
    assert 0 < rest["value"] < 1
    assert rest["met"] == (rest["value"] <= 0.1)


def test_the_comparisons_tables_show_the_figures_of_its_json(writer):
    result = compare(writer())
    found, tables = result.to_dict(), rendered(*comparison_tables(result))
    for way in found["ways"].values():
        assert f"{way['tokens_per_second']:.1f}" in tables
        assert f"{way['ratio']:.3f}x" in tables
    for bar in found["bars"]:
        assert f"{bar['value']:.3f}" in tables


def test_runs_are_interleaved_and_compared_by_their_medians():
    from selfspec.demo.timing import interleaved, ratio

    order = []
    clock = {"a": iter([1, 2, 99]), "b": iter([1, 4, 8])}

    def way(name):
        return lambda: order.append(name) or Run([0] * 8, next(clock[name]))

    runs = interleaved({"a": way("a"), "b": way("b")}, repeats=3)
    assert "".join(order) == "abbaab"
    assert ratio(runs["a"], runs["b"]) == 2


# Generate


def test_generate_writes_what_the_model_writes(folder):
    text = own_text(folder)
    common = ("--model", folder, "-n", TOKENS, *DRAFT)
    assert call("generate", PROMPT, *common).stdout == text + "\n"
    assert call("generate", *common, input=PROMPT + "\n").stdout == text + "\n"
    assert call("generate", "-", *common, input=PROMPT).stdout == text + "\n"
    trace = call("generate", PROMPT, *common, "--format", "trace").stdout
    assert unmarked(trace) == text + "\n"
    assert trace != text + "\n"


def test_generate_json_is_one_object_with_the_figures_of_the_line_on_stderr(folder):
    common = ("generate", PROMPT, "--model", folder, "-n", TOKENS, *DRAFT)
    found = one_object(call(*common, "--format", "trace", "--json"))
    (result,) = found["results"]
    assert found["draft"]["num_draft_tokens"] == 3
    assert result["text"] == own_text(folder)
    assert sum(step["accepted"] for step in result["trace"]) == result["stats"]["accepted"]
    line = call(*common).stderr
    rate, length = result["stats"]["acceptance_rate"], result["stats"]["mean_accepted_length"]
    assert f"acceptance rate {rate:.3f}, mean accepted length {length:.2f}" in line


def test_a_file_of_json_lines_gives_a_line_for_each_prompt(folder, tmp_path):
    prompts = [PROMPT, "in the sun", "a\nb"]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    common = ("--model", folder, "-n", TOKENS, *DRAFT)
    lines = call("generate", "--file", file, *common, "--format", "jsonl").stdout.splitlines()
    found = [json.loads(line) for line in lines]
    assert [entry["prompt"] for entry in found] == prompts
    assert [entry["text"] for entry in found] == [own_text(folder, p) for p in prompts]


def test_a_plain_file_is_one_prompt(folder, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("the cat\n\non the mat\n")
    found = one_object(call("generate", "-f", file, "--model", folder, "-n", 2, "--json"))
    assert [entry["prompt"] for entry in found["results"]] == ["the cat\n\non the mat"]


def test_a_seed_repeats_a_sampled_text(folder):
    common = ("generate", PROMPT, "--model", folder, "-n", TOKENS, "--temperature", 1.5, *DRAFT)
    texts = [call(*common, "--top-k", 20, "--seed", seed).stdout for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_fields_on_the_command_line_override_the_file(folder, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("draft:\n  exit_layer: 1\n  num_draft_tokens: 7\n")
    common = ("generate", PROMPT, "--model", folder, "-n", 2, "--json", "--config", file)
    found = one_object(call(*common, "--draft", "exit_layer=3"))
    assert found["draft"]["exit_layer"] == 3
    assert found["draft"]["num_draft_tokens"] == 7


# Info


def test_info_says_what_the_model_is():
    found = one_object(call("info", "--json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    assert found["parameters"] == model.num_parameters()
    assert found["weight_bytes"] == model.get_memory_footprint(return_buffers=False)
    assert found["kv_bytes_per_token"] == 16 * 2 * 2 * 64 * 2  # layers, k and v, heads, width, bf16
    assert found["kv_bytes"] == 1024 * found["kv_bytes_per_token"]
    assert (found["layers"], found["vocab_size"]) == (16, 6144)
    assert found["default_draft"]["exit_layer"] == 4


def test_info_needs_no_weights_and_says_the_same_with_them(folder, monkeypatch):
    common = ("info", "--model", folder, "--context", 100, "--json")
    without = one_object(call(*common))
    monkeypatch.setattr(info, "_without_weights", lambda path: None)
    assert one_object(call(*common)) == without


def test_info_lists_heads(folder, tmp_path):
    spec = SelfSpecModel.from_pretrained(folder, dtype="auto")
    lens = LensHead.build(spec.engine.decoder, 3, rank=8)
    save_heads([lens], spec.engine.decoder, tmp_path / "heads")
    common = ("info", "--model", folder, "--heads", tmp_path / "heads")
    found = one_object(call(*common, "--json"))
    size = sum(p.numel() for p in lens.parameters())
    expected = {"kind": "lens", "exit_layer": 3, "parameters": size, "bytes": 8 * size}
    assert found["exit_heads"] == [expected]
    assert found["default_draft"]["head"] == "lens"
    assert "lens after layer 3" in call(*common).stdout


# What goes wrong


def damaged(folder):
    """The checkpoint, its weights cut short."""
    weights = next(path for path in folder.iterdir() if path.suffix == ".safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model", "/no/such/folder"], "no model folder at /no/such/folder"),
        (["--model", "./here"], "no model folder at ./here"),
        (["--heads", "/no/such/heads"], "no folder /no/such/heads; give the folder of"),
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--file", "/no/such/file"], "no prompt file at /no/such/file"),
        (["--config", "/no/such.yaml"], "no config file at /no/such.yaml"),
        (["--draft", "exit_lyer=2"], "did you mean 'exit_layer'?"),
        (["--draft", "exit_layer=4"], "exit_layer must be in [1, 3], got 4"),
        (["--draft", "num_draft_tokens=0"], "num_draft_tokens must be at least 1"),
        (["--draft", "drafter=early-exit"], "did you mean 'early_exit'?"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_1(folder, options, says):
    prompt = [] if "--file" in options else [PROMPT]
    result = call("generate", *prompt, "--json", "--model", folder, *options, code=1)
    assert result.stdout == ""
    assert re.fullmatch(r"selfspec: .*\n", result.stderr)
    assert says in result.stderr


@pytest.mark.parametrize("given", ["", "  \n", '{"prompt": ""}', '{"text": "a"}', "{nothing"])
def test_a_prompt_that_is_none_is_a_mistake(folder, given):
    result = call("generate", "--model", folder, "--json", code=1, input=given)
    assert re.fullmatch(r"selfspec: .*(stdin).*\n", result.stderr)


def test_truncated_weights_are_named(tmp_path, folder):
    damaged(tmp_path / "tiny")
    result = call("generate", PROMPT, "--model", folder, code=1)
    assert re.fullmatch(rf"selfspec: the weights in {folder} cannot be read .*\n", result.stderr)


def test_debug_shows_the_whole_error(folder):
    result = call("--debug", "generate", PROMPT, "--model", "/no/such/folder", code=1)
    assert isinstance(result.exception, FileNotFoundError)
    assert result.exception.__traceback__ is not None


@pytest.mark.parametrize(
    "args",
    [
        ["generate", "a", "--no-such-option"],
        ["generate", "a", "--file", "b"],
        ["generate", "a", "--top-k", "5"],
        ["generate", "a", "--max-new-tokens", "0"],
        ["no-such-command"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(args):
    assert call(*args, code=2).stdout == ""


def test_an_interrupt_is_exit_code_130(folder, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(SelfSpecModel, "generate", interrupted)
    result = call("generate", PROMPT, "--model", folder, code=130)
    assert "Traceback" not in result.output


def test_json_stays_alone_on_stdout_whoever_prints(folder, monkeypatch):
    write = SelfSpecModel.generate

    def talking(self, *args, **kwargs):
        print("here I am")  # noqa: T201
        return write(self, *args, **kwargs)

    monkeypatch.setattr(SelfSpecModel, "generate", talking)
    result = call("generate", PROMPT, "--model", folder, "-n", 2, "--json")
    assert one_object(result)["results"]
    assert "here I am" in result.stderr


def test_version():
    assert call("--version").stdout == f"selfspec {__version__}\n"


def test_help_does_not_wait_for_torch():
    code = "import sys, selfspec.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
