"""What a device allows, what decoding needs, how rounds grow: laws of the measurements."""

import itertools
import json

import pytest
import torch
from conftest import EXIT, contrary, tiny_llama
from typer.testing import CliRunner

from selfspec import SelfSpecModel
from selfspec.bench import (
    Bench,
    BenchConfig,
    Report,
    RunFile,
    measure_limits,
    measure_memory,
    measure_scaling,
    summarise,
    write_plots,
)
from selfspec.bench.limit import check_limits
from selfspec.bench.memory import GROWTH
from selfspec.bench.meters import held_memory
from selfspec.bench.scaling import SWEEPS, Shape
from selfspec.bench.tiny import tiny_target
from selfspec.bench.traffic import Traffic, kv_bytes, read_bandwidth
from selfspec.bench.tune.work import WorkFile
from selfspec.cli import commands
from selfspec.config import parse

TOKENS = 30
CPU = torch.device("cpu")


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat and the rat sat on the cat in the sun\n" * 8)
    sets = [{"name": "mats", "path": str(path), "count": 2, "prompt_tokens": [6, 9]}]

    def make(**fields):
        ours = {"name": "ours", "draft": {"exit_layer": EXIT, "num_draft_tokens": 3}}
        common = {"prompts": sets, "methods": [ours], "modes": ["greedy"], "warm_up": 2}
        return parse(BenchConfig, {**common, "max_new_tokens": TOKENS, **fields}, "test")

    return make


def limits_of(spec, tokenizer, config, folder):
    bench = Bench(spec, tokenizer, config)
    file = RunFile(folder, {})
    bench.run(file)
    work = WorkFile(folder / "work.jsonl", "here")
    return measure_limits(bench, file, work), bench, file


# Bytes


@pytest.mark.parametrize("kind", ["shared", "lens", "block", "fused"])
def test_a_rounds_bytes_are_counted_weight_by_weight(kind):
    spec = tiny_target(32, 4, 64, head=kind)
    decoder, head = spec.engine.decoder, spec.heads[0]
    traffic = Traffic(decoder)
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in decoder.layers]
    kv = 2 * 2 * 8 * 4  # keys and values, two heads of width 8 in float32
    assert kv_bytes(decoder) == [kv] * 4
    lm_head = decoder.lm_head_weight.nbytes
    assert traffic.plain(10) == sum(layers) + 4 * kv * 10 + lm_head
    assert traffic.round(head, 0, 10) == traffic.plain(10)
    # Another draft costs another pass below the exit, the head without what it joins, an LM head.
    rounds = [traffic.round(head, k, 10) for k in (1, 2, 3)]
    joined = sum(
        p.nbytes
        for n, m in head.named_children()
        if n in ("feature_norms", "fuse")
        for p in m.parameters()
    )
    own = sum(p.nbytes for p in head.parameters()) - joined
    each = layers[0] + kv * 10 + own + lm_head + (head.layer is not None) * kv * 10
    assert [b - a for a, b in itertools.pairwise(rounds)] == [each, each]
    assert rounds[0] == traffic.plain(10) + each + joined


def test_a_window_bounds_the_kv_that_is_read_and_a_trimmed_head_the_lm_head():
    spec = tiny_target(32, 4, 64, head="lens")
    decoder, head = spec.engine.decoder, spec.heads[0]
    whole = Traffic(decoder).round(head, 3, 0)
    head.trim(decoder, torch.arange(0, 512, 4))
    less = decoder.lm_head_weight.nbytes * 3 // 4
    assert Traffic(decoder).round(head, 3, 0) == whole - 3 * less
    decoder.windows = [5, None, None, None]
    traffic = Traffic(decoder)
    assert traffic.plain(20) - traffic.plain(0) == kv_bytes(decoder)[0] * (5 + 3 * 20)


def test_bandwidth_is_that_of_reading():
    assert 1e7 < read_bandwidth(1 << 22, CPU) < 1e14


# Limits


def test_an_oracle_drafts_what_will_be_kept(tokenizer, config, tmp_path):
    always = SelfSpecModel(tiny_llama("always", dtype=torch.float32))
    found, _, file = limits_of(always, tokenizer, config(), tmp_path / "always")
    plain, ours, oracle = found.rows
    decoded = sum(run.decoded for run in file.runs.values()) // 2
    assert plain.lengths == {0: decoded}
    # 29 tokens behind the first: two rounds of twelve drafts and the target's token, and the rest.
    assert oracle.lengths == {2: 2, 12: 4}
    assert sum(count * (k + 1) for k, count in oracle.lengths.items()) == decoded
    assert set(ours.lengths) <= {0, 1, 2, 3}
    assert oracle.achieved is None

    never = contrary(tiny_llama(dtype=torch.float32), EXIT)
    found, *_ = limits_of(never, tokenizer, config(), tmp_path / "never")
    plain, ours, oracle = found.rows
    assert oracle.lengths == plain.lengths
    assert oracle.by_passes == pytest.approx(plain.by_passes)
    assert ours.lengths.keys() <= {0, 1, 2, 3}


def test_limits_bound_one_another_and_are_reported(tokenizer, config, tmp_path):
    spec = SelfSpecModel(tiny_llama("sometimes", dtype=torch.float32))
    found, bench, file = limits_of(spec, tokenizer, config(), tmp_path)
    plain = found.rows[0]
    assert 0 < plain.by_passes < plain.by_layers  # layers are a part of the pass
    read = Traffic(spec.engine.decoder).plain(7.5 + TOKENS / 2)
    assert plain.by_memory == pytest.approx(found.bandwidth / read)
    lines = (tmp_path / "work.jsonl").read_text()
    again = measure_limits(bench, file, WorkFile(tmp_path / "work.jsonl", "here"))
    assert again == found
    assert (tmp_path / "work.jsonl").read_text() == lines
    report = Report({}, summarise(bench, file), found)
    report.write(tmp_path)
    written = json.loads((tmp_path / "results.json").read_text())["limits"]
    assert [row["way"] for row in written["rows"]] == ["plain", "ours", "ours, oracle"]
    assert "| ours, oracle | – |" in (tmp_path / "results.md").read_text()
    assert tmp_path / "limits.png" in write_plots(report.rows, tmp_path, found)


@pytest.mark.parametrize("fields", [{"modes": ["sampled"]}, {"batch_sizes": [2]}])
def test_limits_of_what_was_not_run_are_refused(tokenizer, config, fields):
    spec = SelfSpecModel(tiny_llama(dtype=torch.float32))
    with pytest.raises(ValueError, match="have a greedy mode among modes and 1 among batch_sizes"):
        check_limits(Bench(spec, tokenizer, config(**fields)))


# Memory


@pytest.mark.skipif(held_memory(CPU) is None, reason="the system does not tell")
def test_memory_is_measured_at_a_context_and_while_it_grows():
    spec = tiny_target(32, 4, 96, head="fused")
    found = measure_memory(spec, context=1024, growth=200)
    kv = kv_bytes(spec.engine.decoder)[0]
    assert [peak.way for peak in found.peaks] == [way.way for way in found.growth]
    assert [peak.context for peak in found.peaks] == [96, 96]  # no more positions
    # The head's own layer keeps keys and values beside the target's.
    assert [peak.kv for peak in found.peaks] == [96 * 4 * kv, 96 * 5 * kv]
    for peak in found.peaks:
        assert peak.peak > peak.growth >= 0
    for way in found.growth:
        assert len(way.tokens) == len(way.held) == len(way.kv) == 10
        assert way.tokens == sorted(way.tokens) and way.tokens[-1] == 200
        assert min(way.held) > 0
    assert GROWTH == 10_000


# Scaling


def test_rounds_are_timed_at_every_shape_once(tmp_path):
    sweeps = {"batch": (1, 3), "context": (8, 40), "depth": (4, 6)}
    shapes = []
    path = tmp_path / "work.jsonl"
    told = lambda part, done, of: shapes.append((part, of))  # noqa: E731
    found = measure_scaling(WorkFile(path, "here"), CPU, sweeps, told)
    assert shapes[1] == ("batch 3, context 128, depth 8", 6)
    assert [point.value for point in found.points] == [1, 3, 8, 40, 4, 6]
    for point in found.points:
        for seconds in point.seconds.values():
            assert 0 < seconds.inside < seconds.wall
    lines = path.read_text()
    assert measure_scaling(WorkFile(path, "here"), CPU, sweeps) == found
    assert path.read_text() == lines
    assert [grid.title for grid in found.grids] == [f"cost of a round by {a}" for a in sweeps]
    assert {p.name for p in found.plots(tmp_path)} == {f"scaling_{along}.png" for along in sweeps}


def test_the_sweeps_reach_as_far_as_they_say():
    assert {along: (values[0], values[-1]) for along, values in SWEEPS.items()} == {
        "batch": (1, 32),
        "context": (128, 8192),
        "depth": (4, 64),
    }
    assert all(getattr(Shape(), along) in values for along, values in SWEEPS.items())


# Command line


@pytest.mark.parametrize("flag", ["--limit", "--memory", "--scaling"])
def test_the_command_measures_and_writes(flag, tokenizer, config, tmp_path, monkeypatch):
    folder = tmp_path / "tiny"
    tiny_llama("sometimes", dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    monkeypatch.setattr("selfspec.bench.memory.GROWTH", 100)
    monkeypatch.setattr("selfspec.bench.scaling.SWEEPS", {"batch": (1, 2)})
    if flag == "--memory" and held_memory(CPU) is None:
        pytest.skip("the system does not tell")
    fields = config().model_dump(mode="json")
    (tmp_path / "bench.json").write_text(json.dumps({**fields, "target": str(folder)}))
    output = tmp_path / "out"
    args = ["bench", "--config", tmp_path / "bench.json", "--output", output, flag, "--json"]
    result = CliRunner().invoke(commands, list(map(str, args)))
    assert result.exit_code == 0, result.output
    name = "results" if flag == "--limit" else flag[2:]
    found = json.loads(result.stdout)
    assert found == json.loads((output / f"{name}.json").read_text())
    assert (output / f"{name}.md").read_text().startswith("# ")
    assert list(output.glob("*.png"))


def test_two_measurements_at_once_are_refused(tmp_path):
    result = CliRunner().invoke(
        commands, ["bench", "--memory", "--scaling", "--output", str(tmp_path)]
    )
    assert result.exit_code == 1
    assert "give one" in result.stderr
