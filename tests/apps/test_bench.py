"""The benchmark: its statistics, its bookkeeping, and what it says of methods that go wrong."""

import io
import itertools
import json
import re
import sys
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
import yaml
from conftest import EXIT, ROOT, tiny_llama
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from selfspec import SelfSpecModel
from selfspec.apps.bench.config import BenchConfig, MethodConfig
from selfspec.apps.bench.plots import write_plots
from selfspec.apps.bench.prompts import Batch
from selfspec.apps.bench.results import (
    SHEETS,
    Report,
    grid,
    loops,
    median_interval,
    percentile,
    summarise,
)
from selfspec.apps.bench.run import Bench, Key, Place, Run, RunFile, peak_memory
from selfspec.apps.cli import commands
from selfspec.apps.display.divergence import first_divergence
from selfspec.config import parse
from selfspec.schedule.stats import PARTS

TOKENS = 12
DRAFT = {"exit_layer": EXIT, "num_draft_tokens": 3}
OURS = {"name": "ours", "draft": DRAFT}
PEERS = [
    {"name": "early exit", "peer": "assistant_early_exit"},
    {"name": "lookup", "peer": "prompt_lookup_num_tokens"},
]
GREEDY = {"name": "greedy"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the cat sat on the mat and the rat sat on the cat in the sun\n" * 8)
    return str(path)


@pytest.fixture(scope="module")
def spec():
    return SelfSpecModel(tiny_llama("sometimes", dtype=torch.float32))


@pytest.fixture
def config(text) -> Callable[..., BenchConfig]:
    def make(**fields) -> BenchConfig:
        sets = [{"name": "mats", "path": text, "count": 2, "prompt_tokens": [6, 9]}]
        common = {"prompts": sets, "methods": [OURS], "modes": [GREEDY], "warm_up": 2}
        return parse(BenchConfig, {**common, "max_new_tokens": TOKENS, **fields}, "test")

    return make


def measured(spec, tokenizer, config, folder):
    bench = Bench(spec, tokenizer, config)
    file = RunFile(folder, {"config": config.model_dump(mode="json")})
    bench.run(file)
    return {row.place.method: row for row in summarise(bench, file)}, file


# Statistics


@pytest.mark.parametrize(
    "values", [[1.0, 2.0, 4.0], [3.0, 1.0, 2.0, 9.0], [2.0, 2.5, 8.0, 1.0, 5.0]]
)
def test_the_bootstrap_is_that_of_all_resamples(values):
    medians = np.sort([np.median(s) for s in itertools.product(values, repeat=len(values))])
    found = median_interval(values)
    assert found.value == np.median(values)
    assert found.taken_over == len(values)
    # Where the quantile of all resamples falls between two values, 4,000 draws may take either.
    for end, share in ((found.low, 0.025), (found.high, 0.975)):
        near = np.quantile(medians, [share - 0.015, min(1.0, share + 0.015)])
        assert near[0] <= end <= near[1]


def test_the_interval_of_one_value_is_that_value_and_of_none_there_is_none():
    assert median_interval([2.0])[:3] == (2.0, 2.0, 2.0)
    assert median_interval([]) is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_a_weighted_percentile_is_that_of_the_values_written_out(pairs):
    values, weights = zip(*pairs, strict=True)
    spelled = sorted(v for v, w in pairs for _ in range(w))
    for share in (0.5, 0.95, 1.0):
        place = int(np.ceil(round(share * len(spelled), 9))) - 1
        assert percentile(values, weights, share) == spelled[place]


def period_of(tokens):
    """The least period of a whole sequence, by definition."""
    for period in range(1, len(tokens)):
        if all(tokens[i] == tokens[i % period] for i in range(len(tokens))):
            return period
    return len(tokens)


@given(st.integers(1, 20), st.integers(0, 40), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_a_text_loops_when_its_last_32_tokens_have_a_short_period(period, before, seed):
    source = np.random.default_rng(seed)
    tail = (list(source.integers(0, 50, period)) * 40)[:32]
    tokens = [*source.integers(0, 50, before), *tail]
    assert loops(tokens) == (period_of(tokens[-32:]) <= 16)
    assert not loops(tokens[-31:])


def run_of(counts, times, number=0, method="m", **more):
    key = Key(Place("s", "p", 1, method), number, 0)
    return Run([[0] * sum(counts)], list(counts), list(times), [], **more, key=key)


def test_a_runs_rate_leaves_its_prefill_out():
    run = run_of([3, 2, 4], [1.0, 1.5, 4.0])
    assert (run.decoded, run.prefill_seconds, run.decode_seconds) == (6, 1.0, 3.0)
    assert run.rate == 2
    assert run_of([1], [1.0]).rate is None


# Running


def test_every_method_writes_the_same_texts_and_is_measured(spec, tokenizer, config, tmp_path):
    wanted = config(methods=[OURS, *PEERS], repeats=2)
    rows, file = measured(spec, tokenizer, wanted, tmp_path)
    assert list(rows) == ["plain", "ours", "early exit", "lookup"]
    assert len(file.runs) == 2 * 4 * 2
    for row in rows.values():
        assert row.failure is None, row
        assert row.equality.differing == []
        assert row.texts == 4
        assert row.tokens_per_second > 0 < row.ms_per_token <= row.ms_per_token_p95
        assert row.speedup.low <= row.speedup.value <= row.speedup.high
    assert rows["plain"].speedup[:3] == (1, 1, 1)
    assert rows["plain"].mean_accepted_length == 1


def test_a_static_cache_and_continuous_batching_write_the_same_texts(
    spec, tokenizer, config, tmp_path
):
    peers = [{"name": name, "peer": name} for name in ("static_cache", "continuous_batching")]
    rows, file = measured(spec, tokenizer, config(methods=peers, batch_sizes=[1, 2]), tmp_path)
    assert len(file.runs) == 3 * (2 + 1)
    for run in file.runs.values():
        assert run.counts == [run.key.place.batch] * TOKENS
        assert list(run.times) == sorted(run.times) and run.decoded == len(run.accepted)
    for row in rows.values():
        assert row.failure is None and row.equality.differing == [], row
    assert not hasattr(spec.causal_lm, "_previous_max_cache_length")


def test_a_peer_with_a_cache_of_its_own_refuses_one_that_rounds(tokenizer, config, tmp_path):
    rounding = SelfSpecModel(tiny_llama("sometimes"), kv_cache_dtype="int8")
    peers = [{"name": name, "peer": name} for name in ("static_cache", "continuous_batching")]
    rows, _ = measured(rounding, tokenizer, config(methods=peers), tmp_path)
    assert all(rows[peer["name"]].failure.startswith("ValueError") for peer in peers)


def test_what_is_reported_of_drafts_is_what_the_traces_say(spec, tokenizer, config, tmp_path):
    rows, file = measured(spec, tokenizer, config(), tmp_path)
    bench = Bench(spec, tokenizer, config())
    drafted, accepted, lengths = 0, 0, []
    for prompt in bench.prompts["mats"]:
        spec.generate(prompt[None], draft=DRAFT, max_new_tokens=TOKENS)
        rounds = spec.last_trace.rows[0][1:]
        drafted += sum(len(step.drafted) for step in rounds)
        accepted += sum(step.accepted for step in rounds)
        lengths += [step.accepted for step in rounds]
    row = rows["ours"]
    assert row.acceptance_rate == accepted / drafted
    assert row.accepted_lengths == {n: lengths.count(n) for n in sorted(set(lengths))}
    assert row.mean_accepted_length == pytest.approx(2 * (TOKENS - 1) / len(lengths))
    assert sum(row.time_split.values()) == pytest.approx(1)
    for run in file.runs.values():
        assert sum(run.counts) == len(run.texts[0]) == TOKENS


def test_a_speedup_takes_every_prompts_usual_pace(spec, tokenizer, config, tmp_path):
    """A machine that was slow for one of three repeats is no slow method."""
    wanted = config(repeats=3)
    _, file = measured(spec, tokenizer, wanted, tmp_path)
    paces = {"plain": {0: 1.0, 1: 2.0}, "ours": {0: 0.5, 1: 1.5}}  # seconds of a text
    for key, run in list(file.runs.items()):
        slow = key.repeat == 1 and key.place.method == "ours"
        seconds = paces[key.place.method][key.number] * (10 if slow else 1)
        file.runs[key] = replace(run, counts=[1, TOKENS - 1], times=[0.1, 0.1 + seconds])
    (_, ours) = summarise(Bench(spec, tokenizer, wanted), file)
    assert ours.speedup.value == pytest.approx((1.0 / 0.5 + 2.0 / 1.5) / 2)
    assert ours.drafting is None  # no method is the loop without drafts


def test_what_drafting_brings_is_told_beside_what_the_kernels_bring(
    spec, tokenizer, config, tmp_path
):
    loop = {"name": "loop", "draft": {"drafter": "none"}}
    wanted = config(methods=[OURS, loop])
    _, file = measured(spec, tokenizer, wanted, tmp_path)
    seconds = {"plain": 1.2, "ours": 0.4, "loop": 0.6}
    for key, run in list(file.runs.items()):
        times = [0.1, 0.1 + seconds[key.place.method]]
        file.runs[key] = replace(run, counts=[1, TOKENS - 1], times=times)
    rows = {row.place.method: row for row in summarise(Bench(spec, tokenizer, wanted), file)}
    assert rows["ours"].speedup.value == pytest.approx(3)
    assert rows["ours"].drafting.value == pytest.approx(1.5)
    assert rows["loop"].drafting.value == pytest.approx(1)


def test_a_methods_turn_moves_on_from_prompt_to_prompt(spec, tokenizer, config, tmp_path):
    wanted = config(methods=[OURS, PEERS[1]], repeats=3)
    _, file = measured(spec, tokenizer, wanted, tmp_path)
    order = [key.place.method[0] for key in file.runs]
    turns = ["".join(order[start : start + 3]) for start in range(0, len(order), 3)]
    assert turns == ["pol", "plo", "lpo", "lop", "olp", "opl"]
    assert {turn[0] for turn in turns} == {"p", "o", "l"}


def test_sampled_texts_are_repeated_by_the_seed_and_not_compared(spec, tokenizer, config, tmp_path):
    wanted = config(modes=["sampled"])
    first, runs = measured(spec, tokenizer, wanted, tmp_path / "a")
    _, again = measured(spec, tokenizer, wanted, tmp_path / "b")
    assert first["ours"].equality is None
    assert [r.texts for r in runs.runs.values()] == [r.texts for r in again.runs.values()]


def test_texts_end_where_the_model_ends_them(spec, tokenizer, config, tmp_path):
    rows, file = measured(spec, tokenizer, config(), tmp_path / "a")
    stop = next(iter(file.runs.values())).texts[0][4]
    stopping = SelfSpecModel(tiny_llama("sometimes", dtype=torch.float32, eos_token_id=stop))
    rows, file = measured(stopping, tokenizer, config(), tmp_path / "b")
    for run in file.runs.values():
        assert stop not in run.texts[0][:-1]
    ours = [run for key, run in file.runs.items() if key.place.method == "ours"]
    assert sum(len(run.texts[0]) < TOKENS for run in ours) >= len(ours) / 2
    assert rows["ours"].equality.differing == []


# Batches

SIZES = [1, 2, 3]


def in_batches(config):
    return config(batch_sizes=SIZES, prompts=[{**config().prompts[0].model_dump(), "count": 3}])


def test_batches_are_ragged_and_write_what_each_prompt_alone_gets(
    spec, tokenizer, config, tmp_path
):
    wanted = in_batches(config)
    bench = Bench(spec, tokenizer, wanted)
    file = RunFile(tmp_path, {})
    bench.run(file)
    assert bench.total == len(file.runs) == 2 * (3 + 2 + 1)
    assert {int(n) for n in bench.batches["mats", 3][0].mask.sum(-1)} == {6, 7, 9}
    rows = summarise(bench, file)
    assert [row.place.batch for row in rows] == [1, 1, 2, 2, 3, 3]
    for row in rows:
        assert row.failure is None
        assert row.equality.differing == []
        # The first prompt stands in the last batch of two again.
        assert row.texts == row.equality.texts == {1: 3, 2: 4, 3: 3}[row.place.batch]
    written = {key: run.texts for key, run in file.runs.items()}
    for method in ("plain", "ours"):
        alone, together = (
            [
                text
                for key, texts in written.items()
                if key.place.batch == size and key.place.method == method
                for text in texts
            ]
            for size in (1, 3)
        )
        assert alone == together


def test_in_a_batch_all_rows_tokens_count_and_no_padding(tokenizer, config, tmp_path):
    free = SelfSpecModel(tiny_llama("sometimes", dtype=torch.float32))
    _, file = measured(free, tokenizer, in_batches(config), tmp_path / "a")
    whole = next(run.texts for key, run in file.runs.items() if key.place.batch == 3)
    stop = whole[0][4]
    stopping = SelfSpecModel(tiny_llama("sometimes", dtype=torch.float32, eos_token_id=stop))
    _, file = measured(stopping, tokenizer, in_batches(config), tmp_path / "b")
    for key, run in file.runs.items():
        texts = [row[: row.index(stop) + 1] if stop in row else row for row in whole]
        if key.place.batch == 3:
            assert run.texts == texts
        assert sum(run.counts) == sum(map(len, run.texts))
        kept = sum(run.accepted) + len(run.accepted)
        # A row that stops at a kept draft gets no token of the target.
        assert run.decoded <= kept <= run.decoded + len(run.texts)


def test_every_batch_size_has_its_tables_and_the_speed_against_them_a_picture(
    spec, tokenizer, config, tmp_path
):
    bench = Bench(spec, tokenizer, in_batches(config))
    file = RunFile(tmp_path, {})
    bench.run(file)
    rows = summarise(bench, file)
    report = Report({}, rows)
    titles = [grid.title for grid in report.grids]
    for size in SIZES:
        assert f"greedy · mats · batch {size} · speed" in titles
    names = {path.name for path in write_plots(rows, tmp_path)}
    assert names == {f"{kind}_greedy.png" for kind in ("speedup", "acceptance", "time", "batches")}


@pytest.mark.parametrize("width", [50, 60, 80, 120])
def test_a_terminal_shows_names_and_speeds_whole_and_says_what_it_leaves_out(width):
    sheet, names = SHEETS["speed"], ["plain", "HF assistant_early_exit", "fused 1, tree of 12, 0.7"]
    cells = [
        "131.5",
        "1.71x (1.50–1.93)",
        "1.62",
        "0.812",
        "3.41",
        "NOT EQUAL: 3/4, margin 1.2e-05",
    ]
    rows = [[name, *cells] for name in names]
    speeds = grid("speed", sheet, rows)
    columns, spare = speeds.columns, speeds.spare
    assert spare == ["over own loop", "length", "accepted", "outputs equal"]
    console = Console(width=width, file=io.StringIO())
    console.print(speeds.table(width))
    shown = console.file.getvalue()
    assert "…" not in shown and max(map(len, shown.splitlines())) <= width
    assert shown.count("131.5  1.71x (1.50–1.93)") == len(names)
    assert all(word in shown for word in [*columns[:3], *" ".join(names).split()])
    caption = " ".join(shown.split()).partition("left out, as the terminal is narrow: ")[2]
    left_out = caption.split(", ") if caption else []
    assert set(left_out) == set(spare[: len(left_out)])
    assert ("0.812" in shown) == ("accepted" not in left_out)
    assert bool(left_out) == (width < 120)


def test_one_row_wrong_in_a_batch_is_caught(tokenizer, config, tmp_path, monkeypatch):
    spec = SelfSpecModel(tiny_llama("sometimes", dtype=torch.float32))
    planted(spec, monkeypatch, place=5)
    bench = Bench(spec, tokenizer, in_batches(config))
    file = RunFile(tmp_path, {})
    bench.run(file)
    found = {row.place.batch: row for row in summarise(bench, file) if row.place.method == "ours"}
    assert found[3].equality.differing == [0]
    assert found[2].equality.differing == [0, 2]
    assert all(row.equality.failed for row in found.values())


def test_what_is_reported_of_rounds_adds_up(spec, tokenizer, config, tmp_path):
    rows, _ = measured(spec, tokenizer, config(), tmp_path)
    report = Report({}, list(rows.values()))
    cells = {
        column: grid.rows[1][place]
        for grid in report.grids
        for place, column in enumerate(grid.columns)
    }
    ours = rows["ours"]
    shares = [float(share) for share in cells["rounds, by accepted drafts (0, 1, …)"].split()]
    assert len(shares) == 1 + max(ours.accepted_lengths)
    assert sum(shares) == pytest.approx(1, abs=0.02)
    by_position = [float(rate) for rate in cells["accepted, by position"].split()]
    assert by_position == pytest.approx(ours.acceptance_by_position, abs=0.005)
    split = [float(cells[part]) for part in (*PARTS, "rest")]
    assert sum(split) == pytest.approx(1, abs=0.005)
    assert float(cells["sampling"]) > 0


# What goes wrong


def test_a_method_that_fails_is_a_row_with_its_reason(spec, tokenizer, config, tmp_path):
    wrong = [
        {"name": "too deep", "draft": {"exit_layer": 9}},
        {"name": "no model", "peer": "assistant_model", "options": {"assistant_model": "./none"}},
        {"name": "too deep for HF", "peer": "prompt_lookup_num_tokens"},
    ]
    wrong[2]["options"] = {"prompt_lookup_num_tokens": -1}
    rows, _ = measured(spec, tokenizer, config(methods=[*wrong, OURS]), tmp_path)
    assert rows["too deep"].failure.startswith("ValueError: exit_layer must be in [1, 3], got 9")
    assert "none" in rows["no model"].failure
    assert rows["too deep for HF"].failure is not None
    assert rows["ours"].failure is None
    assert rows["ours"].equality.differing == []
    assert spec.causal_lm.config.num_hidden_layers == 4


def planted(spec, monkeypatch, place):
    """A `generate` whose text has another token at `place`."""
    write = SelfSpecModel.generate

    def wrong(self, *args, **kwargs):
        output = write(self, *args, **kwargs)
        output[0, place - TOKENS] = (output[0, place - TOKENS] + 1) % 64
        return output

    monkeypatch.setattr(SelfSpecModel, "generate", wrong)


@pytest.mark.parametrize(("dtype", "fails"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_method_that_writes_something_else_is_caught(
    tokenizer, config, tmp_path, monkeypatch, dtype, fails
):
    spec = SelfSpecModel(tiny_llama("sometimes", dtype=dtype))
    planted(spec, monkeypatch, place=5)
    rows, _ = measured(spec, tokenizer, config(), tmp_path)
    found = rows["ours"].equality
    assert len(found.differing) == 2
    assert found.first.position <= 5
    assert found.first.margin >= 0
    assert found.failed == fails
    assert rows["plain"].equality.differing == []
    report = Report({"command": "x"}, list(rows.values()))
    assert report.failed == fails
    report.write(tmp_path)
    assert ("NOT EQUAL" in (tmp_path / "results.md").read_text()) == fails


def test_a_divergence_says_what_both_wrote_and_how_near_it_was(spec):
    prompt = torch.tensor([[5, 6, 7]])
    options = {
        "do_sample": False,
        "repetition_penalty": 1.2,
        "max_new_tokens": 6,
        "pad_token_id": 0,
    }
    plain = spec.model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    tokens = plain[0, 3:].tolist()
    batch = Batch.of(prompt)
    assert first_divergence(spec, *batch, options, tokens, list(tokens)) is None
    other = [*tokens[:4], (tokens[4] + 1) % 64, tokens[5]]
    found = first_divergence(spec, *batch, options, tokens, other)
    assert (found.position, found.plain, found.other) == (4, tokens[4], other[4])
    # The scores after the processors: tokens that have been written count less.
    text = torch.cat([prompt, plain[:, 3:7]], dim=1)
    logits = spec.model(text).logits[0, -1].detach()
    seen = logits[text[0]]
    logits[text[0]] = torch.where(seen > 0, seen / 1.2, seen * 1.2)
    assert found.margin == pytest.approx(float(logits[tokens[4]] - logits[other[4]]), rel=1e-4)
    assert not found.rounding
    short = first_divergence(spec, *batch, options, tokens, tokens[:3])
    assert (short.position, short.other, short.margin, short.rounding) == (3, None, None, False)


# On disk


def test_a_benchmark_goes_on_where_it_was_stopped(spec, tokenizer, config, tmp_path, monkeypatch):
    wanted = config(methods=[OURS, PEERS[1]])
    calls = []
    write = SelfSpecModel.generate

    def interrupted(self, *args, **kwargs):
        calls.append(kwargs["max_new_tokens"])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return write(self, *args, **kwargs)

    monkeypatch.setattr(SelfSpecModel, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measured(spec, tokenizer, wanted, tmp_path)
    kept = (tmp_path / "runs.jsonl").read_text()
    assert 0 < kept.count('"texts"') < 6
    # A line that was being written when the power went is written anew.
    (tmp_path / "runs.jsonl").write_text(kept + '{"setting": "gre')
    rows, file = measured(spec, tokenizer, wanted, tmp_path)
    assert calls == [2, TOKENS, TOKENS, 2, TOKENS]
    assert len(file.runs) == 6
    assert all(row.failure is None for row in rows.values())
    measured(spec, tokenizer, wanted, tmp_path)
    assert len(calls) == 5
    for line in (tmp_path / "runs.jsonl").read_text().splitlines():
        json.loads(line)


def test_runs_of_another_benchmark_are_not_mixed_in(spec, tokenizer, config, tmp_path):
    measured(spec, tokenizer, config(), tmp_path)
    says = r"config\.repeats \(1 there, 2 here\); give another --output"
    with pytest.raises(ValueError, match=says):
        measured(spec, tokenizer, config(repeats=2), tmp_path)


def test_another_benchmark_is_refused_before_the_model_is_read(config, tmp_path):
    RunFile(tmp_path, {"config": config().model_dump(mode="json"), "where": {}})
    result = CliRunner().invoke(commands, ["bench", "target=./none", "--output", str(tmp_path)])
    assert result.exit_code == 1
    assert re.fullmatch(r"selfspec: .* holds the runs .* another config\..*\n", result.stderr)


def test_what_failed_is_tried_again(spec, tokenizer, config, tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(SelfSpecModel, "generate", broken)
        rows, _ = measured(spec, tokenizer, config(), tmp_path)
    assert rows["ours"].failure == "RuntimeError: out of luck"
    rows, _ = measured(spec, tokenizer, config(), tmp_path)
    assert rows["ours"].failure is None


def test_peak_memory_is_that_of_the_call():
    found = peak_memory(lambda: torch.ones(8 << 20).sum(), torch.device("cpu"))
    if found is None:
        pytest.skip("the system does not tell")
    assert found.growth >= 30 << 20
    assert found.peak > found.growth


# Configs, report, command line


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"methods": [{**OURS, "peer": "plain"}]}, "has a `draft` or a `peer`, not both"),
        ({"methods": [{"name": "x", "peer": "plan"}]}, "methods.0.peer"),
        ({"methods": [{"name": "x", "draft": "tre"}]}, "methods.0.draft: unknown drafter: 'tre'"),
        ({"methods": [{"name": "x", "draft": {"head": "fusd"}}]}, "did you mean 'fused'?"),
        ({"methods": [{**PEERS[1], "options": {"max_ngram": 2}}]}, "did you mean 'max_matching"),
        ({"methods": [{"name": "x", "peer": "assistant_model"}]}, "needs options.assistant_model"),
        ({"methods": [OURS, OURS]}, "two are named 'ours'"),
        ({"methods": ["none/*.yaml"]}, "no method file at none"),
        ({"methods": "plain"}, "methods is a list"),
        ({"modes": []}, "modes is empty"),
        ({"modes": ["greedily"]}, "unknown mode: 'greedily'; did you mean 'greedy'"),
        ({"modes": "greedy"}, "modes is a list"),
        ({"batch_sizes": [2, 2]}, "batch_sizes has a size twice"),
        ({"batch_sizes": [0]}, "batch_sizes.0"),
        ({"repeat": 2}, "did you mean 'repeats'"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_a_config_that_cannot_be_is_refused(config, fields, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        config(**fields)


def test_the_configs_beside_the_package_are_read(monkeypatch):
    monkeypatch.chdir(ROOT)
    fields = yaml.safe_load((ROOT / "configs/bench.yaml").read_text())
    found = parse(BenchConfig, fields, "bench.yaml")
    assert len(found.methods) > 10
    for path in (ROOT / "configs/methods").glob("*.yaml"):
        method = parse(MethodConfig, yaml.safe_load(path.read_text()), path.name)
        assert ("reimplemented here" in method.name) == bool(method.source)


@pytest.fixture
def folder(tmp_path, tokenizer):
    path = tmp_path / "tiny"
    tiny_llama("sometimes", dtype=torch.float32).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_the_command_writes_its_report(folder, config, tmp_path):
    wrong = {"name": "too | deep", "draft": {"exit_layer": 9}}
    fields = config(methods=[OURS, wrong], modes=["greedy", "sampled"]).model_dump(mode="json")
    (tmp_path / "bench.yaml").write_text(yaml.safe_dump({**fields, "target": str(folder)}))
    output = tmp_path / "out"
    args = ["bench", "--config", tmp_path / "bench.yaml", "--output", output, "max_new_tokens=8"]
    shown = CliRunner().invoke(commands, list(map(str, args)))
    assert shown.exit_code == 0, shown.output
    result = CliRunner().invoke(commands, [*map(str, args), "--json"])
    found = json.loads(result.stdout)
    assert found["rows"] == json.loads((output / "results.json").read_text())["rows"]
    assert (found["new tokens"], found["dtype"], found["failed"]) == (8, "float32", False)
    assert "too | deep failed: ValueError: exit_layer" in shown.stdout
    markdown = (output / "results.md").read_text()
    for row in found["rows"]:
        if row["failure"] is None:
            assert f"| {row['method']} | {row['tokens_per_second']:.1f} |" in markdown
            assert f"{row['speedup']['value']:.2f}x" in shown.stdout.replace("\n", "")
    assert r"| too \| deep | failed |" in markdown
    assert "- too | deep failed: ValueError: exit_layer" in markdown
    page = (output / "report.html").read_text()
    pictures = [*output.glob("*.png")]
    assert all(b64encode(path.read_bytes()).decode() in page for path in pictures)
    assert page.count("<img ") == len(pictures) and "too | deep failed" in page
    assert {path.name for path in pictures} == {
        f"{kind}_{mode}.png"
        for kind in ("speedup", "acceptance", "time")
        for mode in ("greedy", "sampled")
    }


def test_plots_need_matplotlib_and_say_so(spec, tokenizer, config, tmp_path, monkeypatch):
    rows, _ = measured(spec, tokenizer, config(), tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"selfspec\[bench\]"):
        write_plots(list(rows.values()), tmp_path)


def test_lm_evals_model_needs_lm_eval_and_says_so(monkeypatch):
    for name in ("lm_eval", "lm_eval.api.registry"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "selfspec.apps.bench.lm_eval", raising=False)
    with pytest.raises(ImportError, match=r"lm-eval's models need: .*selfspec\[eval\]"):
        import_module("selfspec.apps.bench.lm_eval")


def test_mistakes_on_the_command_line_are_one_line(tmp_path):
    for args in (["--config", "none.yaml"], ["repeat=2"], ["target=./none"]):
        result = CliRunner().invoke(commands, ["bench", *args, "--output", str(tmp_path)])
        assert result.exit_code == 1
        assert re.fullmatch(r"selfspec: .*\n", result.stderr)
