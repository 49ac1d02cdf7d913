"""A fit from a config: heads that load and stay exact, killed or not; mistakes told at once."""

import json
import shutil

import pytest
import torch
import yaml
from conftest import greedy
from fit_tools import EVERY_KIND, fit_config, settings, write_target
from training_tools import command, metrics, start
from transformers import AutoTokenizer

from selfspec import DraftConfig, SelfSpecModel
from selfspec.config import load_config
from training import fit_heads as fit_module
from training.data import Mixture
from training.exits import fitting, report
from training.exits import measure as measure_module
from training.exits.drafts import HeldOutDrafts
from training.exits.fitting import FitConfig
from training.exits.heads import build_heads, trim_heads
from training.exits.measure import expected_tokens
from training.exits.task import DraftLossConfig, ExitTask
from training.fit_heads import fit
from training.loop.checkpoint import Checkpoints
from training.measure_heads import measure_heads

HEADS = [{"kind": "shared", "exit_layer": 2}, *EVERY_KIND]
MEASURE = {"depths": 3, "blocks": 12, "prompts": 2, "prompt_tokens": 6, "new_tokens": 6}
CHANGES = {
    "heads": HEADS,
    "loss": {"depths": 3, "depth_weights": [1.0, 0.8, 0.6]},
    "loop": {"steps": 16, "eval_every": 8},
    "measure": {**MEASURE, "timed_drafts": [1, 2]},
}


@pytest.fixture(scope="module", autouse=True)
def _no_plots():
    """Plots have tests of their own, and take longer than all the rest of a report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "draw_plots", lambda *_: [])
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a target and its text."""
    folder = tmp_path_factory.mktemp("made")
    write_target(folder)
    return folder


@pytest.fixture(scope="module")
def fitted(made):
    """The folder of a fit of every kind, whose rounds all take a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_module, "round_seconds", lambda *_: 1.0)
        fit(settings(made, **CHANGES, output=str(made / "fitted")))
    return made / "fitted"


@pytest.fixture
def folder(made, tmp_path):
    """A folder of its own for a test, with the same target and text."""
    shutil.copy(made / "text.txt", tmp_path)
    (tmp_path / "target").symlink_to(made / "target")
    return tmp_path


def load(made, run):
    return SelfSpecModel.from_pretrained(made / "target", heads=run / "heads", dtype=torch.float32)


def figures(run):
    """The report, without what a clock measured."""
    content = json.loads((run / "report.json").read_text())
    for head in content["domains"]["words"]:
        del head["predicted_speedup"]
    return content


def check_exact(spec):
    """Every head drafts, and leaves the target's text as it is."""
    ids = torch.randint(1, 300, (1, 9), generator=torch.Generator().manual_seed(3))
    own = greedy(spec.causal_lm, ids, max_new_tokens=12, pad_token_id=0)
    for head in spec.heads:
        draft = DraftConfig(exit_layer=head.exit_layer, head=head.kind)
        assert torch.equal(spec.generate(ids, draft=draft, max_new_tokens=12, pad_token_id=0), own)
        assert spec.last_stats.drafted > 0


# From text to heads


def test_a_fit_leaves_heads_that_load_and_stay_exact(made, fitted):
    spec = load(made, fitted)
    assert [(h.kind, h.exit_layer) for h in spec.heads] == [
        (h["kind"], h["exit_layer"]) for h in HEADS
    ]
    check_exact(spec)


def test_the_loss_of_every_head_falls(made, fitted):
    config = settings(made, **CHANGES)
    spec, tokenizer = config.load_target()
    decoder = spec.decoder
    data = Mixture.read(config.data, tokenizer, config.block_size, seed=0)
    torch.manual_seed(config.loop.seed)
    untrained = build_heads(decoder, config.heads)
    trim_heads(decoder, untrained, config.heads, data.sources)
    losses = []
    for heads in (untrained, load(made, fitted).heads):
        for head in heads:
            head.requires_grad_(True)
        watched = HeldOutDrafts(decoder, heads, data.sources[0], 1)
        task = ExitTask(decoder, heads, config.loss, watched)
        with torch.no_grad():
            losses.append(task(data.batch(0, 16), 0, 0.0)[1])
    before, after = losses
    assert before.keys() == after.keys() and len(after) == len(EVERY_KIND)
    assert all(after[name] < before[name] for name in before)


def test_a_head_that_drafts_in_one_pass_may_start_from_one_that_does_not(made, fitted, folder):
    options = {"parallel": True, "markov": 4, "confidence": True}
    heads = [{"kind": "fused", "exit_layer": 2, "options": options}]
    changes = {"loss": {"depths": 3, "share": 0.5}, "optimizer": {"lr": 1e-12}}
    fit(settings(folder, heads=heads, start=str(fitted / "heads"), **changes))
    spec = load(made, folder / "run")
    (head,) = spec.heads
    (before,) = [h for h in load(made, fitted).heads if h.kind == "fused"]
    assert head.drafts_at_once and head.options == before.options | options
    for name, weight in before.named_parameters():
        torch.testing.assert_close(head.get_parameter(name), weight)
    check_exact(spec)


def test_a_fit_goes_on_from_a_trimmed_head_with_its_vocabulary(made, fitted, folder):
    """On other text, whose most frequent tokens are others."""
    (before,) = [h for h in load(made, fitted).heads if h.kind == "lora"]
    head = {"kind": before.kind, "exit_layer": before.exit_layer}  # its options are the saved ones
    heads = [{**head, "vocab_size": len(before.vocab_ids)}]
    start, still = str(fitted / "heads"), {"lr": 1e-12}
    (folder / "other.txt").write_text("zebras jump over quiet foxes. " * 400)
    changes = {"data": [{"files": [str(folder / "other.txt")]}], "optimizer": still}
    fit(settings(folder, heads=heads, start=start, **changes))
    (after,) = load(made, folder / "run").heads
    assert torch.equal(after.vocab_ids, before.vocab_ids)
    for name, weight in before.named_parameters():
        torch.testing.assert_close(after.get_parameter(name), weight)
    other = {"start": start, "output": str(folder / "other")}
    with pytest.raises(ValueError, match="has rank=2, got 3; a fit goes on with the same options"):
        fit(settings(folder, heads=[{**head, "options": {"rank": 3}}], **other))
    for size in (0, 41):
        with pytest.raises(ValueError, match=f"drafts 40 tokens, .*vocab_size={size}; give"):
            other = {"start": start, "output": str(folder / f"run{size}")}
            fit(settings(folder, heads=[{**head, "vocab_size": size}], **other))


def test_later_drafts_wait_until_the_first_is_learned():
    config = DraftLossConfig(depths=3, depth_weights=[2.0, 1.0, 1.0], unroll_from=0.5)
    assert config.weights(0.0) == config.weights(0.49) == [1.0]
    assert config.weights(0.5) == config.weights(1.0) == [0.5, 0.25, 0.25]
    assert DraftLossConfig(depths=2).weights(0.0) == [0.5, 0.5]


def test_a_confidence_output_is_trained_and_leaves_the_drafts_alone(made, fitted, folder):
    options = {"confidence": True}
    changes = {"loss": {"depths": 2}, "loop": {"steps": 16}, "measure": CHANGES["measure"]}
    for run, own in (("plain", {}), ("run", options)):
        heads = [{"kind": "fused", "exit_layer": 2, "options": own}]
        fit(settings(folder, **changes, heads=heads, output=str(folder / run)))
    spec = load(made, folder / "run")
    ((head,), (without,)) = (load(made, folder / run).heads for run in ("run", "plain"))
    assert head.options == without.options | options
    known = dict(without.named_parameters())
    for name, weight in head.named_parameters():
        if not name.startswith("confidence."):
            torch.testing.assert_close(weight, known[name])
    exits = json.loads((folder / "run" / "report.json").read_text())["reliability"]
    assert len(exits) == 3 and "fused, exit 2, sampled, own output" in exits
    check_exact(spec)


def test_a_fit_says_what_it_was_and_what_it_is_worth(made, fitted):
    config = settings(made, **CHANGES, output=str(fitted))
    assert load_config(FitConfig, fitted / "heads" / "fit.yaml") == config
    spec, report_ = load(made, fitted), figures(fitted)
    card = (fitted / "heads" / "README.md").read_text()
    for head, told in zip(spec.heads, report_["domains"]["words"], strict=True):
        assert sorted(head.calibrators) == ["greedy", "sampled"]
        assert f"| `{head.kind}` | {head.exit_layer} |" in card
        assert len(told["alpha"]) == len(told["agreement"]) == MEASURE["depths"]
        assert set(told["accepted_length"]) == {"greedy", "sampled"}
        assert 0 <= told["ece"] <= 1
        facts = head.facts["held_out"]["words"]
        assert facts["alpha"] == told["alpha"] and facts["ece"] == told["ece"]
        assert head.facts["data"] == [f"{made / '*.txt'} (100%)"]
    assert len(report_["reliability"]) == 2 * len(HEADS)
    last = metrics(fitted)[-1]
    assert last["step"] == 15 and "alpha_fused_2_3" in last and "loss_lora_2" in last


def test_a_trimmed_head_drafts_the_most_frequent_tokens(made, fitted):
    config = settings(made)
    counts = Mixture.read(config.data, config.load_target()[1], 32, 0).sources[0].tokens
    (lora,) = [h for h in load(made, fitted).heads if h.kind == "lora"]
    counts = counts.long().bincount(minlength=320)
    kept = torch.zeros(320, dtype=torch.bool).index_fill(0, lora.vocab_ids, True)
    assert kept.sum() == 40 and counts[kept].min() >= counts[~kept].max()


def test_a_draft_is_accepted_only_after_those_before_it():
    assert expected_tokens([0.5, 0.2, 0.9], 3) == pytest.approx(1 + 0.5 + 0.1 + 0.09)
    assert expected_tokens([0.5, 0.0, 1.0], 3) == pytest.approx(1.5)
    assert expected_tokens([0.5, 0.2], 3) == pytest.approx(1 + 0.5 + 0.1 + 0.02)
    assert expected_tokens([1.0], 4) == 5


def test_the_predicted_speedup_is_that_of_greedy_rounds(fitted):
    """Rounds all take as long as a plain step here, so it is the tokens of a round."""
    content = json.loads((fitted / "report.json").read_text())
    for told in content["domains"]["words"]:
        assert told["predicted_speedup"] == pytest.approx(expected_tokens(told["agreement"], 2))


def test_measuring_again_gives_the_same_figures_wherever_the_run_lies(made, fitted, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(fitted, moved)
    before, heads = figures(moved), (moved / "heads" / "exit_heads.safetensors").read_bytes()
    (moved / "report.json").unlink()
    (moved / "config.yaml").unlink()
    told = measure_heads(settings(made, **CHANGES, output=str(moved)))
    assert [e.alpha for e in told["words"]] == [e["alpha"] for e in before["domains"]["words"]]
    assert figures(moved) == before
    assert (moved / "heads" / "exit_heads.safetensors").read_bytes() == heads
    fit_yaml = [(run / "heads" / "fit.yaml").read_text() for run in (fitted, moved)]
    assert fit_yaml[0] == fit_yaml[1]


# Resumption


def stop_at(monkeypatch, step):
    forward = ExitTask.forward

    def until(task, batch, now, progress):
        if now == step:
            raise KeyboardInterrupt
        return forward(task, batch, now, progress)

    monkeypatch.setattr(ExitTask, "forward", until)


def test_a_stopped_fit_goes_on_as_if_it_had_not_been(folder, monkeypatch):
    heads = [EVERY_KIND[1], EVERY_KIND[3]]
    changes = {"heads": heads, "loss": {"depths": 2}, "loop": {"steps": 6, "save_every": 2}}
    stop_at(monkeypatch, 5)
    with pytest.raises(KeyboardInterrupt):
        fit(settings(folder, **changes))
    assert not (folder / "run" / "heads").exists()
    monkeypatch.undo()
    runs = [fit(settings(folder, **changes, output=str(folder / run))) for run in ("run", "whole")]
    files = [(run / "exit_heads.safetensors").read_bytes() for run in runs]
    assert files[0] == files[1]
    assert metrics(folder / "run") == metrics(folder / "whole")


def test_a_fit_that_is_killed_while_it_measures_has_saved_its_heads(folder, monkeypatch):
    def broken(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(fit_module, "measure_saved", broken)
    with pytest.raises(KeyboardInterrupt):
        fit(settings(folder))
    config = settings(folder)
    assert load(folder, folder / "run").heads[0].kind == "lens"
    measure_heads(config)
    assert figures(folder / "run")["domains"]["words"][0]["kind"] == "lens"
    assert list(load(folder, folder / "run").heads[0].calibrators) == ["greedy", "sampled"]


# Mistakes


def lens(**changes):
    return {"heads": [{"kind": "lens", "exit_layer": 2, **changes}]}


def head(kind, **changes):
    return {"heads": [{"kind": kind, "exit_layer": 2, **changes}]}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (lens(kind="lems"), r"heads\.0\.kind: unknown head kind: 'lems'; did you mean 'lens'"),
        (lens(exit=2), r"heads\.0: unknown key of HeadConfig: 'exit'; did you mean 'exit_layer'"),
        (lens(vocab_size=1), r"heads\.0\.vocab_size: must leave a choice of at least 2 tokens"),
        (lens(exit_layer=-1), r"heads\.0\.exit_layer: Input should be greater than or equal to 0"),
        (head("shared"), "heads: a shared head has nothing to fit; add a lens"),
        ({"heads": []}, "heads: List should have at least 1 item"),
        ({"lop": {"steps": 3}}, "unknown key of FitConfig: 'lop'; did you mean 'loop'"),
        ({"loss": {"depths": 2, "depth_weights": [1.0]}}, "for each of 2 depths, got 1"),
        ({"loss": {"depth_weights": [0.0]}}, r"must be at least 0, and one above, got \[0.0\]"),
        ({"loss": {"depths": 2, "depth_weights": [2, -1]}}, "must be at least 0, and one above"),
        ({"loss": {"schedule": {"loss": "lk"}}}, r"loss\.schedule\.loss: Input should be 'ce', 'k"),
        ({"measure": {"timed_drafts": [0]}}, r"measure\.timed_drafts\.0: Input should be greater"),
        ({"held_out": {}, "held_out_share": 1}, "held_out_share: Input should be less than 1"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(made, changes, match):
    with pytest.raises(ValueError, match=match):
        settings(made, **changes)


@pytest.fixture
def untrained(monkeypatch):
    """No step may be made."""
    stop_at(monkeypatch, 0)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (lens(exit_layer=4), r"exit_layer must be in \[1, 3\], got 4; the model has 4 layers"),
        (lens(exit_layer=0), r"exit_layer must be in \[1, 3\], got 0"),
        ({"heads": [*EVERY_KIND, EVERY_KIND[0]]}, "two heads of kind 'lens' at exit_layer 2"),
        (lens(options={"rnak": 3}), "unknown option of the lens head: 'rnak'; did you mean 'rank'"),
        (head("block", options={"rank": 3}), "unknown option of the block head: 'rank'"),
        (head("fused", options={"layers": [2]}), "did you mean 'feature_layers'"),
        (head("fused", options={"feature_layers": [1]}), r"must be in \[2, 4\], got \[1\]"),
        (head("fused", options={"feature_layers": 3}), "options .* do not fit"),
        (head("block", options={"place": 4}), r"place must be a layer in \[0, 3\], got 4"),
        (head("lora", options={"rank": "many"}), "options .* do not fit"),
        (lens(options={"rank": 0}), "rank must be at least 1, got 0"),
        (lens(vocab_size=320), "must be smaller than the target's 320, got 320; 0 keeps all"),
        ({"target": "./absent"}, "absent"),
        ({"measure": {"depths": 40}}, "no held-out document that is read has 40 tokens before one"),
        ({"measure": {"blocks": 2}}, "need 128 held-out tokens.* hold 62; raise measure.blocks"),
        (
            {"held_out": {}, "held_out_share": 0.01},
            "need 128 held-out tokens.* hold .*; give more text",
        ),
        ({"block_size": 256}, "the target was made for 128 positions, got 256; lower block_size"),
        ({"measure": {"prompts": 1, "new_tokens": 100}}, "made for 128 positions, got 164"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(folder, untrained, changes, match):
    with pytest.raises((ValueError, OSError), match=match):
        fit(settings(folder, **changes))
    assert not (folder / "run" / "heads").exists()


@pytest.mark.parametrize("part", ["data", "held_out"])
@pytest.mark.parametrize("content", ["", "too short"])
def test_text_of_less_than_a_block_is_refused(folder, untrained, part, content):
    (folder / "other").mkdir()
    (folder / "other" / "text.txt").write_text(content)
    source = {"files": [str(folder / "other" / "text.txt")]}
    changes = {"data": [source]} if part == "data" else {"held_out": {"words": source}}
    with pytest.raises(ValueError, match="less than one block of 32; give more text"):
        fit(settings(folder, **changes))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"target": "elsewhere"}, "a run with another target"),
        ({"heads": EVERY_KIND[1:2]}, "a run with another heads"),
        ({"loss": {"schedule": {"loss": "tv"}}}, r"a run with another loss\.schedule\.loss"),
    ],
)
def test_a_folder_holds_one_fit(folder, changes, match):
    fit(settings(folder))
    kept = (folder / "run" / "heads" / "exit_heads.safetensors").read_bytes()
    told = (folder / "run" / "config.yaml").read_text()
    with pytest.raises(ValueError, match=match):
        fit(settings(folder, **changes))
    assert (folder / "run" / "heads" / "exit_heads.safetensors").read_bytes() == kept
    assert (folder / "run" / "config.yaml").read_text() == told


def test_a_fit_goes_on_with_the_same_text_and_target_alone(folder, monkeypatch):
    config = settings(folder)
    fit(config)
    text = (folder / "text.txt").read_text()
    (folder / "text.txt").write_text(text + text)
    with pytest.raises(ValueError, match="a run with another text"):
        fit(config)
    (folder / "text.txt").write_text(text)
    (folder / "target").unlink()
    write_target(folder, seed=1)
    (folder / "text.txt").write_text(text)
    with pytest.raises(ValueError, match=r"a run with another .*model\.weights"):
        fit(config)


def test_a_full_disk_leaves_the_heads_that_were_there(folder, monkeypatch):
    def full(*_):
        raise OSError("no space left on device")

    fit(settings(folder))
    kept = {file.name: file.read_bytes() for file in (folder / "run" / "heads").iterdir()}
    monkeypatch.setattr(fitting, "save_heads", full)
    with pytest.raises(OSError, match="no space left"):
        fit(settings(folder, loop={"steps": 6}))
    assert {f.name: f.read_bytes() for f in (folder / "run" / "heads").iterdir()} == kept
    assert Checkpoints(folder / "run").steps() == [4, 6]


@pytest.mark.parametrize("tied", [False, True])
def test_targets_with_tied_and_untied_heads_are_fitted(tmp_path, tied):
    write_target(tmp_path, tie_word_embeddings=tied)
    heads = [EVERY_KIND[1], {**EVERY_KIND[2], "vocab_size": 100}]
    fit(settings(tmp_path, heads=heads, loop={"steps": 2}))
    spec = load(tmp_path, tmp_path / "run")
    assert spec.causal_lm.config.tie_word_embeddings == tied
    assert [len(head.vocab_ids) for head in spec.heads] == [40, 100]


def test_heads_that_are_not_there_cannot_be_measured(folder):
    with pytest.raises(FileNotFoundError, match=r"no selfspec\.json in "):
        measure_heads(settings(folder))


def test_chats_are_fitted_and_measured_on(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} . {% endfor %}"
    shutil.copytree(folder / "target", folder / "chatting")
    tokenizer.save_pretrained(folder / "chatting")
    words, roles = (folder / "text.txt").read_text().split(), ("user", "assistant")
    chats = [
        {"messages": [{"role": role, "content": " ".join(words[n : n + 30])} for role in roles]}
        for n in range(0, 900, 30)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(c) + "\n" for c in chats))
    source = {"files": [str(folder / "chats.jsonl")], "format": "chat"}
    changes = {"data": [source], "held_out": {"chats": source}, "measure": {"blocks": 40}}
    fit(settings(folder, **changes, target=str(folder / "chatting")))
    assert [*json.loads((folder / "run" / "report.json").read_text())["domains"]] == ["chats"]


# The command line


@pytest.mark.slow
def test_a_fit_and_its_measurement_run_from_the_command_line(folder):
    config = fit_config(folder, heads=HEADS[:2])
    found = []
    for script in ("training.fit_heads", "training.measure_heads"):
        process = start(command(config, folder, script=script))
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        found.append(figures(folder / "run"))
        (folder / "run" / "report.json").unlink()
    assert found[0] == found[1]
    assert (
        yaml.safe_load((folder / "run" / "config.yaml").read_text())["target"] == config["target"]
    )
