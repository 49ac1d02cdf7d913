"""Real sizes without weights: their parameters, planted acceptance, and what a round reads."""

import json
import re

import pytest
import torch
from conftest import prompt
from families import build as build_family
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from selfspec import DraftConfig, SelfSpecModel
from selfspec.apps.bench import shapes
from selfspec.apps.bench.config import BenchConfig
from selfspec.apps.bench.planted import GreedyTexts, generate_planted, planted_ranks
from selfspec.apps.bench.prompts import Batch
from selfspec.apps.bench.results import summarise
from selfspec.apps.bench.run import RunFile
from selfspec.apps.bench.shapes import (
    ShapeBench,
    add_heads,
    bytes_a_round,
    default_methods,
    random_model,
    read_shape,
    size_of,
)
from selfspec.apps.cli import bench, commands, common
from selfspec.decoder import Span
from selfspec.drafters.engine import Engine
from selfspec.heads import build_head

NEW = 24
CPU = torch.device("cpu")
PUBLISHED = {
    "SmolLM2-135M": 134_515_008,
    "Qwen3-0.6B": 596_049_920,
    "Llama-3.2-1B": 1_235_814_400,
    "Qwen3-4B": 4_022_468_096,
    "Llama-3.1-8B": 8_030_261_248,
}
CHAINS = {
    "fused 0": {"exit_layer": 0, "head": "fused"},
    "fused 2": {"exit_layer": 2, "head": "fused"},
    "fused 1 in one pass": {"exit_layer": 1, "head": "fused"},
    "block": {"exit_layer": 1, "head": "block"},
    "shared": {"exit_layer": 2, "head": "shared"},
    "medusa": {"exit_layer": 0, "head": "medusa"},
}
TREE = {"drafter": "tree", "exit_layer": 0, "head": "fused", "tree": {"nodes": 12}}


def spec_of(dtype=torch.float32, tied=True):
    config = read_shape("tiny")
    config.tie_word_embeddings = tied
    spec = SelfSpecModel(random_model(config, dtype, CPU))
    add_heads(spec.engine, default_methods(8, (0.5,)))
    spec.engine.add(build_head(spec.decoder, "fused", 2, {}))
    return spec


@pytest.fixture(scope="module")
def spec():
    return spec_of()


def plant(spec, draft, acceptance, *lengths, seed=0, new=NEW):
    """The text with planted drafts, that of `generate`, and the statistics."""
    batch = Batch(*prompt(*lengths, vocab=512))
    options = {"do_sample": False, "max_new_tokens": new, "pad_token_id": 0}
    text = GreedyTexts(spec, new)(batch, options)
    config = DraftConfig.of({"num_draft_tokens": 4, **draft})
    output, session = generate_planted(spec, config, batch, text, acceptance, seed, **options)
    return output[:, batch.width :], text, session


# Shapes


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_has_the_published_number_of_parameters(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_shape(name))
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]


def test_a_shape_may_be_a_config_file_and_an_unknown_one_is_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**read_shape("tiny").to_dict(), "num_hidden_layers": 3}))
    assert read_shape(str(path)).num_hidden_layers == 3
    with pytest.raises(ValueError, match=r"unknown shape: 'Llama-3.2-2B'; did you mean 'Llama-3.2"):
        read_shape("Llama-3.2-2B")


def test_the_text_of_a_random_model_depends_on_all_before(spec):
    ids, mask = prompt(9, 9, vocab=512)
    ids[1, 1:] = ids[0, 1:]  # only the first token differs
    options = {"do_sample": False, "max_new_tokens": NEW, "attention_mask": mask}
    first, second = spec.model.generate(ids, **options)[:, 9:].tolist()
    assert first != second and len(set(first)) > NEW // 4


@pytest.mark.parametrize("tied", [True, False])
def test_in_half_precision_the_next_token_is_clear(tied):
    spec = spec_of(torch.bfloat16, tied)
    ids, _ = prompt(9, vocab=512)
    best = spec.model(ids).logits.float().topk(2).values.detach()
    assert (best[..., 0] - best[..., 1]).min() > 0.25 * best[..., 0].max()
    for draft in (CHAINS["block"], TREE):
        written, own, _ = plant(spec, draft, 0.7, 9, 5)
        assert torch.equal(written, own)


# Planted drafts


@pytest.mark.parametrize("acceptance", [0.2, 0.6, 0.8])
def test_every_candidate_is_right_as_often_as_planted(acceptance):
    ranks = planted_ranks(4, 1000, acceptance, seed=3)
    again = (1 - acceptance) / 2
    for rank in range(3):
        shares = (ranks == rank).float().mean(-1)
        assert torch.allclose(shares, torch.tensor(acceptance * again**rank), atol=2e-3)


def test_one_seed_gives_one_series_for_every_acceptance_rate():
    low, high = (planted_ranks(2, 200, rate, seed=1) == 0 for rate in (0.6, 0.8))
    assert (high | ~low).all() and not torch.equal(low, high)
    assert not torch.equal(planted_ranks(2, 200, 0.6, seed=2) == 0, low)


def lengths_of_rounds(right, drafts, new):
    """Accepted drafts of each round, from the coins alone: no model."""
    found, at = [], 1  # the prefill emits the first token
    while at < new:
        most = min(drafts, new - at - 1)
        run = right[at : at + most]
        kept = next((place for place, good in enumerate(run) if not good), len(run))
        found.append(kept)
        at += kept + 1
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("lengths", [(9,), (9, 5, 2)], ids=["one row", "ragged"])
def test_chains_are_accepted_as_the_coins_say_and_the_text_is_the_targets(spec, name, lengths):
    written, own, session = plant(spec, CHAINS[name], 0.7, *lengths, seed=5)
    assert torch.equal(written, own)
    coins = planted_ranks(len(lengths), NEW + 4, 0.7, seed=5) == 0
    for row, right in zip(session.trace.rows, coins.tolist(), strict=True):
        # A row's last round is cut at its end.
        assert [step.accepted for step in row[1:-1]] == lengths_of_rounds(right, 4, NEW)[:-1]


def test_a_trees_siblings_are_right_where_the_first_is_wrong(spec):
    written, own, tree = plant(spec, TREE, 0.6, 9, 5, seed=5)
    _, _, chain = plant(spec, CHAINS["fused 0"], 0.6, 9, 5, seed=5)
    assert torch.equal(written, own)
    assert tree.stats.mean_accepted_length > chain.stats.mean_accepted_length


def test_only_greedy_drafts_of_an_exit_can_be_planted(spec):
    with pytest.raises(ValueError, match="early_exit and tree, got drafter='prompt_lookup'"):
        plant(spec, {"drafter": "prompt_lookup"}, 0.7, 9)
    batch = Batch(*prompt(9, vocab=512))
    with pytest.raises(ValueError, match="do_sample=True"):
        generate_planted(spec, DraftConfig(), batch, batch.tokens, 0.7, 0, do_sample=True)


# What a round reads


@pytest.mark.parametrize("tied", [True, False])
def test_a_plain_round_reads_all_weights_once_and_all_keys_and_values(tied):
    engine = spec_of(tied=tied).engine
    matrices = size_of(engine.decoder.causal_lm) - size_of(engine.decoder.final_norm)
    if not tied:
        matrices -= size_of(engine.decoder.causal_lm.get_input_embeddings())
    slots = engine.decoder.new_slots(1)
    with torch.inference_mode(), engine.decoder:
        engine.decoder.run(torch.zeros(1, 1, dtype=torch.long), Span(0, 8), slots)
    assert bytes_a_round(engine, None, 0) == matrices
    assert bytes_a_round(engine, None, 100) - matrices == 100 * sum(slots.sizes.token)


def test_a_drafting_round_reads_what_its_passes_read(spec):
    engine: Engine = spec.engine
    layer, kv = size_of(engine.decoder.layers[0]), 100 * 2 * 2 * 16 * 4
    lm_head = size_of(engine.decoder.lm_head)

    def read(**draft):
        return bytes_a_round(engine, DraftConfig(num_draft_tokens=3, **draft), 100)

    # Three drafts: four passes over two layers, one over six; an LM head a draft and one to verify.
    assert read(exit_layer=2, head="shared") == 14 * (layer + kv) + 4 * lm_head
    own = size_of(next(head for head in engine.heads if head.kind == "block"))
    assert read(exit_layer=1, head="block") == 11 * (layer + kv) + 3 * (own + kv) + 4 * lm_head
    medusa = size_of(next(head for head in engine.heads if head.kind == "medusa"))
    assert read(exit_layer=0, head="medusa") == 8 * (layer + kv) + medusa + 2 * lm_head
    own = size_of(next(h for h in engine.heads if h.kind == "fused" and h.exit_layer == 1))
    assert read(exit_layer=1, head="fused") == 9 * (layer + kv) + own + kv + 2 * lm_head
    assert read(drafter="prompt_lookup") is None


# The benchmark

SMALL = ("batch_sizes=[1, 2]", "max_new_tokens=8", "warm_up=2")
PROMPTS = "prompts=[{name: six, reader: random, count: 1, prompt_tokens: 6}]"


@pytest.mark.slow
def test_the_command_says_in_every_table_that_acceptance_was_planted(tmp_path):
    args = ["bench", "--shape", "tiny", "--acceptance", "0.7", "--output", str(tmp_path)]
    result = CliRunner().invoke(commands, [*args, "--json", *SMALL, PROMPTS])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["weights"] == "random" and found["acceptance"].startswith("planted")
    methods = {row["method"]: row for row in found["rows"] if row["batch"] == 2}
    assert {"plain", "generate, static cache", "generate_batch", "fused 0, 0.7"} <= set(methods)
    for row in found["rows"]:
        assert row["failure"] is None and row["equality"]["differing"] == [], row
        assert row["limit"] > 0 < row["bytes_a_round"]
    titles = re.findall("^## (.*)$", (tmp_path / "results.md").read_text(), re.MULTILINE)
    assert titles and all("acceptance planted" in title for title in titles)
    # The runs are there; nothing is measured again.
    before = (tmp_path / "runs.jsonl").read_text()
    assert re.search(r"of \d+ timed calls .* on a CPU this takes minutes\n", result.stderr)
    again = CliRunner().invoke(commands, [*args, *SMALL, PROMPTS])
    assert again.exit_code == 0, again.output
    assert again.stderr == ""
    assert (tmp_path / "runs.jsonl").read_text() == before


def test_every_shape_has_a_default_folder_of_its_own(tmp_path, monkeypatch):
    folders = []

    def record(config, output):
        folders.append(str(output))
        raise ValueError("seen")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "run_bench", record)
    for args in ([], ["--shape", "Llama-3.2-1B"], ["shape=Qwen3-4B"], ["shape=a/my/config.json"]):
        CliRunner().invoke(commands, ["bench", *args])
    names = ["bench", "bench-Llama-3.2-1B", "bench-Qwen3-4B", "bench-my"]
    assert folders == [f"outputs/{name}" for name in names]


def test_progress_is_lines_where_there_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setattr(common, "_LINE_EVERY", 0.0)
    with common.progress_bar() as show:
        show("greedy", 1, 4)
    assert capsys.readouterr().err == "1/4  greedy\n"


def test_what_is_given_is_kept_and_the_rest_is_chosen_by_the_device():
    given = BenchConfig(shape="tiny", max_new_tokens=5, acceptance=(0.5,))
    here = shapes.with_defaults(given, 8, CPU)
    there = shapes.with_defaults(given, 8, torch.device("cuda"))
    assert here.max_new_tokens == there.max_new_tokens == 5
    assert (here.dtype, there.dtype) == ("float32", "bfloat16")
    assert max(there.batch_sizes) == 32 and there.prompts[-1].lengths == (32768, 32768)
    assert {method.acceptance for method in here.methods} == {None, 0.5}


def test_what_does_not_fit_is_left_out_and_named(monkeypatch):
    config = BenchConfig(shape="tiny", batch_sizes=(1, 64))
    bench = ShapeBench(config)
    assert bench.measured["left out"] == []
    decoder = bench.spec.decoder
    needed = size_of(decoder.causal_lm) + sum(map(size_of, bench.spec.heads))
    # The whole model drafts in 8 and in 4 bits, and both copies stay.
    needed += sum(sum(decoder.copy_bytes(bits).values()) for bits in ("int8", "int4"))
    monkeypatch.setattr(shapes, "usable_memory", lambda device: needed + 4e6)
    assert ShapeBench(config).measured["left out"] == [
        "batch 64 of 64 tokens",
        "batch 64 of 256 tokens",
    ]
    monkeypatch.setattr(shapes, "usable_memory", lambda device: needed)
    with pytest.raises(ValueError, match=r"do not fit in .*; choose a smaller"):
        ShapeBench(config)


def test_default_methods_whose_head_a_shape_cannot_have_are_left_out_and_named(tmp_path):
    build_family("qwen3_next", "sdpa").config.save_pretrained(tmp_path)
    prompts = [{"name": "six", "reader": "random", "count": 1, "prompt_tokens": 6}]
    given = {"shape": str(tmp_path), "batch_sizes": (1,), "prompts": prompts}
    bench = ShapeBench(BenchConfig.model_validate(given))
    (reason,) = bench.measured["left out"]
    assert reason.startswith("fused 1 in one pass, 0.7 (layer 0 below exit_layer 1 is recurrent")
    names = [method.name for method in bench.config.methods]
    assert "fused 0, 0.7" in names and "fused 1 in one pass, 0.7" not in names
    methods = [method.model_dump() for method in default_methods(5, (0.7,))]
    with pytest.raises(ValueError, match="layer 0 below exit_layer 1 is recurrent"):
        ShapeBench(BenchConfig.model_validate({**given, "methods": methods}))


COPIED = {"name": "copied", "draft": "prompt_lookup"}
PLANTED = {"name": "planted", "draft": {"exit_layer": 2, "head": "shared"}, "acceptance": 0.7}


def test_planted_drafts_are_right_as_often_in_every_mode():
    """A mode's drafts are planted from the text of that mode."""
    six = {"name": "six", "reader": "random", "count": 1, "prompt_tokens": 6}
    modes = ["greedy", {"name": "penalised much", "repetition_penalty": 3.0}]
    small = {"batch_sizes": [1], "max_new_tokens": 48, "warm_up": 2, "prompts": [six]}
    given = {"shape": "tiny", "methods": [PLANTED], "modes": modes, **small}
    bench = ShapeBench(BenchConfig.model_validate(given))
    file = RunFile(None)
    bench.run(file)
    rows = [row for row in summarise(bench, file) if row.place.method == "planted"]
    texts = {tuple(run.texts[0]) for run in file.runs.values()}
    assert len(texts) == len(rows) == 2  # the modes write different texts
    greedy, penalised = (row.acceptance_rate for row in rows)
    assert greedy == penalised > 0.3


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"shape": "tiny", "heads": "x"}, "leave target, heads and profile out"),
        ({"methods": [{"name": "x", "acceptance": 0.5}]}, "plants acceptance; it needs a `draft`"),
        ({"methods": [{**COPIED, "acceptance": 0.5}]}, "needs a `draft` by early_exit or tree"),
        ({"methods": [PLANTED]}, "'planted' plants acceptance .*, and mode 'sampled' samples; set"),
        ({"shape": "tiny", "methods": [PLANTED], "modes": ["sampled"]}, "mode 'sampled' samples"),
        ({"methods": [{**COPIED, "head_options": {"rank": 2}}]}, "untrained heads of a shape"),
        ({"acceptance": []}, "acceptance"),
        ({"shape": "tiny", "acceptance": [1.5]}, "acceptance.0\n  Input should be less than 1"),
        ({"acceptance": [0.5]}, "default methods of a shape; give a shape"),
    ],
)
def test_configs_that_cannot_be_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        BenchConfig(**fields)
