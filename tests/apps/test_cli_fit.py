"""`selfspec fit`, `measure` and `regenerate`: what is not given is chosen, the rest is kept."""

import json
import shutil
from dataclasses import replace
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest
import torch
from cli_tools import call, one_object
from families import FAMILIES, build
from fit_tools import WORDS, write_target

from selfspec import SelfSpecModel
from selfspec.apps.bench.forecast import Advice, DeviceSpeed
from selfspec.apps.cli.fit import _training
from selfspec.heads import load_heads
from training.data import Mixture
from training.exits import defaults
from training.exits.heads import build_heads

# Of a device on which a head at the embeddings pays: seconds of a target of four layers.
FAST = DeviceSpeed(4, 1.0, {1: 0.24, 2: 0.25, 4: 0.27}, {20: {1: 1.1, 3: 1.3}}, 1e-3, 1e-6)
SLOW = replace(FAST, rounds={20: {1: 3.0, 3: 6.0}})
QUICK = (
    *("loop.steps=3", "loop.precision='no'", "loop.batch_size=2", "block_size=32", "loss.depths=2"),
    *("measure.depths=2", "measure.prompts=1", "measure.new_tokens=4", "measure.prompt_tokens=8"),
    "measure.timed_drafts=[1]",
    "held_out_share=0.3",
)


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """Every test runs on the same device."""
    monkeypatch.setattr(defaults, "device_speed", lambda *_: FAST)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a target and its text."""
    folder = tmp_path_factory.mktemp("made")
    write_target(folder)
    return folder


@pytest.fixture(scope="module")
def fitted(made):
    """What `fit` tells of a run of three steps."""
    options = ("--text", made / "*.txt", "--output", made / "run", "--json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(defaults, "device_speed", lambda *_: FAST)
        return one_object(call("fit", made / "target", *options, *QUICK))


# The commands


def test_the_line_that_is_printed_loads_the_heads(made, fitted):
    names = {}
    exec(fitted["code"], names)
    assert isinstance(names["spec"], SelfSpecModel)
    assert [(head.kind, head.exit_layer) for head in names["spec"].heads] == [("eagle3", 0)]
    shown = call("measure", made / "run", "measure.prompts=0").stdout.strip().splitlines()
    assert shown[-1] == fitted["code"]


def test_a_target_is_the_same_by_another_path_and_another_is_refused_first(
    made, fitted, monkeypatch
):
    monkeypatch.chdir(made)
    shutil.copytree("run", "again")
    options = ("--text", made / "*.txt", "--output", "again", *QUICK)
    shown = call("fit", "target", *options).stdout
    assert "is complete at step 3 of 3" in shown
    assert f"'{made / 'target'}', heads='{made / 'again' / 'heads'}'" in shown
    shutil.copytree("target", "copy")
    result = call("fit", "copy", *options, code=1)
    assert result.stdout == "" and "again holds a run with another target" in result.stderr


def test_a_part_of_the_text_is_held_out_where_no_other_is_given(fitted):
    (domain,) = fitted["domains"]
    (head,) = fitted["domains"][domain]
    assert domain == "held out" and len(head["alpha"]) == 2


def test_measuring_again_gives_the_same_figures(made, fitted):
    again = one_object(call("measure", made / "run", "--json"))
    for before, after in zip(*(f["domains"]["held out"] for f in (fitted, again)), strict=True):
        assert before["alpha"] == after["alpha"]
        assert before["accepted_length"] == after["accepted_length"]
    assert again["code"] == fitted["code"]


def test_measuring_again_leaves_what_else_is_with_the_heads(made, fitted):
    profile = made / "run" / "heads" / "selfspec_profile.json"
    profile.write_text("tuned")
    call("measure", made / "run", "measure.prompts=0")
    assert profile.read_text() == "tuned" and (profile.parent / "fit.yaml").exists()
    profile.unlink()


def test_what_a_model_writes_is_text_to_fit_to(made):
    options = ("--text", made / "*.txt", "--output", made / "written", "new_tokens=24")
    told = one_object(call("regenerate", made / "target", *options, "prompts.count=6", "--json"))
    lines = list(map(json.loads, Path(told["texts"]).read_text().splitlines()))
    assert len(lines) == 6 and all(line["new_tokens"] <= 24 for line in lines)
    config = defaults.complete(
        {"target": str(made / "target"), "data": [{"files": [told["texts"]]}]}, "test"
    )
    assert config.loop.steps == 100  # little text


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        (["a", "b.txt", "loop.steps=3"], "give one model, got a, b.txt; texts go behind", 2),
        (["no/such/model", "--text", "x"], "no model folder at no/such/model", 1),
        (["{target}"], "there is no text for", 1),
        (["{target}", "--text", "none.txt"], "no file matches none.txt", 1),
        (["{target}", "--text", "{text}", "lop.steps=3"], "did you mean 'loop'", 1),
        (["heads=lens"], "must be a list, such as [{kind: lens, exit_layer: 4}], got 'lens'", 1),
    ],
)
def test_mistakes_are_one_line(made, words, message, code):
    words = [word.format(target=made / "target", text=made / "text.txt") for word in words]
    assert message in call("fit", *words, code=code).output


def test_what_is_no_folder_of_a_fit_is_not_measured(tmp_path):
    result = call("measure", tmp_path, code=1)
    assert f"no fit in {tmp_path}; give the folder that selfspec fit wrote" in result.output


@pytest.mark.parametrize("key", ["loop.steps=9", "heads=[{kind: lens, exit_layer: 1}]", "output=x"])
def test_keys_that_mean_nothing_to_measuring_are_refused(made, fitted, key):
    result = call("measure", made / "run", key, code=1)
    assert "is for the fit, and the heads are fitted; measuring reads target, data" in result.stderr


def test_an_installed_package_has_the_training_code_inside(monkeypatch):
    asked = []
    monkeypatch.setattr("selfspec.apps.cli.fit.find_spec", lambda name: name)
    monkeypatch.setattr("selfspec.apps.cli.fit.import_module", asked.append)
    _training("fit_heads")
    assert asked == ["selfspec.training.fit_heads"]


def test_a_module_of_the_users_that_hides_the_training_code_is_named(monkeypatch, tmp_path):
    (tmp_path / "training.py").write_text("1 / 0")
    specs = {"training": spec_from_file_location("training", tmp_path / "training.py")}
    monkeypatch.setattr("selfspec.apps.cli.fit.find_spec", specs.get)
    with pytest.raises(ImportError, match=r"finds .*training\.py as the module .*, expected"):
        _training("fit_heads")
    specs.clear()
    with pytest.raises(ImportError, match=r"finds nothing as the module"):
        _training("fit_heads")


# What is chosen


def test_given_keys_are_kept_and_the_rest_of_their_sections_is_chosen(made):
    given = {
        "target": str(made / "target"),
        "data": [{"files": [str(made / "text.txt")]}],
        "loop": {"steps": 7, "batch_size": 6},
        "optimizer": {"lr": 0.5},
    }
    config = defaults.complete(given, "test")
    assert (config.loop.steps, config.loop.batch_size, config.optimizer.lr) == (7, 6, 0.5)
    assert config.loop.batch_size % config.loop.micro_batch_size == 0
    assert config.optimizer.decay == 0.8 and config.output == "outputs/fit"


def test_texts_without_tokens_count_as_nothing(made, tmp_path):
    """An empty one in front of others, of a tokenizer that adds nothing to it."""
    text = (made / "text.txt").read_text()
    lines = [json.dumps({"text": each}) for each in ("", text)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    given = {"target": str(made / "target"), "output": str(tmp_path / "run")}
    steps = [
        defaults.complete({**given, "data": [{"files": [str(file)]}]}, "test").loop.steps
        for file in (made / "text.txt", tmp_path / "texts.jsonl")
    ]
    assert steps[0] == steps[1]


def test_the_demo_target_has_text_of_its_own():
    config = defaults.complete({}, "test")
    assert [*config.held_out] == ["novels"]
    assert (config.heads[0].kind, config.heads[0].exit_layer) == ("eagle3", 0)
    assert 200 < config.loop.steps < 260


def test_steps_grow_with_the_text_up_to_a_most(made, monkeypatch):
    given = {"target": str(made / "target"), "data": [{"files": [str(made / "text.txt")]}]}
    given |= {"block_size": 8, "loop": {"batch_size": 1}}
    found = []
    for fewest, most in ((1, 10**9), (1, 50), (10**6, 10**9)):
        monkeypatch.setattr(defaults, "_FEWEST", fewest)
        monkeypatch.setattr(defaults, "_MOST", most)
        found.append(defaults.complete(given, "test"))
    steps = [config.loop.steps for config in found]
    tokenizer = found[0].load_target()[1]
    tokens = len(Mixture.read(found[0].data, tokenizer, 8, 0).sources[0].tokens)
    assert steps == [-(-2 * tokens // 8), 50, 10**6]


def test_the_batch_of_one_pass_fits_the_memory(made, monkeypatch):
    given = {"target": str(made / "target"), "data": [{"files": [str(made / "text.txt")]}]}
    given |= {"loop": {"batch_size": 12}}
    parts = []
    for free in (0, 2**25, 2**26, 2**40):
        monkeypatch.setattr(defaults, "_free_bytes", lambda free=free: free)
        parts.append(defaults.complete(given, "test").loop.micro_batch_size)
    assert parts[0] == 1 and parts[-1] == 12
    assert parts == sorted(parts) and len(set(parts)) > 2
    assert all(12 % part == 0 for part in parts)


@pytest.mark.matrix(share=4)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gets_a_head_that_it_can_have(family):
    decoder = SelfSpecModel(build(family, "eager")).decoder
    best = Advice.of(decoder, FAST, {0: 1.0}, 1e6).best
    chosen = {**defaults._of_target(decoder, {}), "heads": [best.head]}
    config = defaults.parse(
        defaults.FitConfig, {**chosen, "output": "x", "data": [{"files": ["x"]}]}, family
    )
    (head,) = build_heads(decoder, config.heads)
    assert head.exit_layer in (0, max(1, decoder.depth // 4))
    assert config.loss.depths == (1 if decoder.counts_keys else 3)


def test_a_wide_model_learns_slower_and_weights_are_those_of_its_drafts(monkeypatch):
    decoder = SelfSpecModel(build("llama", "eager")).decoder
    narrow = defaults._of_target(decoder, {})
    monkeypatch.setattr(decoder.config, "hidden_size", 1024)
    wide = defaults._of_target(decoder, {"depths": 2})
    assert wide["optimizer"]["lr"] == narrow["optimizer"]["lr"] / 4
    assert wide["loss"]["depth_weights"] == [1, 0.5]


def test_features_are_kept_while_a_text_is_read_twice_if_there_is_space(made, fitted, monkeypatch):
    given = {"target": str(made / "target"), "data": [{"files": [str(made / "text.txt")]}]}
    given |= {"output": str(made / "new")}
    chosen = defaults.complete(given, "test").features
    assert chosen is not None and not chosen.keep and chosen.folder == str(made / "new/features")
    assert defaults.complete({**given, "loop": {"steps": 1}}, "test").features is None
    monkeypatch.setattr(defaults, "_DISK", 0.0)
    assert defaults.complete(given, "test").features is None


def test_features_that_are_not_kept_are_gone_when_the_heads_are_there(made):
    folder = made / "passing"
    own = f"features={{folder: {folder / 'features'}, dtype: float32, keep: false}}"
    options = ("--text", made / "*.txt", "--output", folder, own, *QUICK)
    assert "heads: " in call("fit", made / "target", *options).stdout
    assert not (folder / "features").exists()
    again = call("fit", made / "target", *options).stdout  # without making them anew
    assert "is complete at step 3" in again and not (folder / "features").exists()


def test_a_run_goes_on_with_its_head_whatever_the_device_does_now(made, fitted, monkeypatch):
    monkeypatch.setattr(defaults, "device_speed", lambda *_: SLOW)
    options = ("--text", made / "*.txt", "--output", made / "run", *QUICK)
    assert "is complete at step 3 of 3" in call("fit", made / "target", *options).stdout


def test_a_run_goes_on_as_it_began_however_long_it_is_now(made):
    """It reads the text twice now, for which a new run would keep features."""
    options = ("--text", made / "*.txt", "--output", made / "longer", *QUICK)
    call("fit", made / "target", *options)
    assert "step 3 of 200" in call("fit", made / "target", *options, "loop.steps=200").stdout
    parts = {"target": str(made / "target"), "data": [{"files": [str(made / "*.txt")]}]}
    began, longer = (
        defaults.complete({**parts, "output": str(made / name), "block_size": 32}, "test")
        for name in ("new", "longer")
    )
    assert began.features is not None and longer.features is None
    assert began.measure.num_draft_tokens == longer.measure.num_draft_tokens


def test_what_ended_before_a_checkpoint_decides_nothing_for_another_text(made):
    options = ("--output", made / "ended", *QUICK)
    few = (
        "--text",
        made / "text.txt",
        "held_out_share=0.01",
        "heads=[{kind: lens, exit_layer: 2}]",
    )
    refused = call("fit", made / "target", *options, *few, code=1).stderr
    assert "calibrators need" in refused and (made / "ended" / "config.yaml").exists()
    told = call("fit", made / "target", "--text", made / "*.txt", *options).stdout
    assert "expected of a head here" in told and "eagle3 head, exit 0" in told


@pytest.mark.parametrize("name", ["2026", "2026-01-01", "a: b", "a #1", "no"])
def test_a_fit_is_measured_in_a_folder_of_any_name(made, fitted, name):
    shutil.copytree(made / "run", made / name)
    assert f"heads: {made / name / 'heads'}" in call("measure", made / name).stdout


def test_a_fit_that_starts_from_heads_goes_on_with_these(made, monkeypatch):
    """Nothing is measured or chosen, and options and vocabulary are theirs."""
    first = ("--text", made / "*.txt", "--output", made / "first", *QUICK)
    call("fit", made / "target", *first, "heads=[{kind: eagle3, exit_layer: 0, vocab_size: 20}]")
    monkeypatch.setattr(defaults, "device_speed", lambda *_: SLOW)
    start = f"start={made / 'first' / 'heads'}"
    more = ("--text", made / "*.txt", "--output", made / "more", *QUICK)
    told = call("fit", made / "target", *more, start).stdout
    assert "eagle3 head, exit 0" in told and "expected of a head here" not in told
    target = SelfSpecModel.from_pretrained(made / "target").decoder
    before, after = (load_heads(target, made / name / "heads")[0] for name in ("first", "more"))
    assert torch.equal(before.vocab_ids, after.vocab_ids) and before.options == after.options
    assert any((new != after.get_parameter(n)).any() for n, new in before.named_parameters())


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_a_fit_goes_on_from_a_published_head(made, fitted, layout):
    out = made / f"published {layout}"
    call("export", "eagle3", out, "--model", made / "target", "--heads", made / "run" / "heads")
    more = ("--text", made / "*.txt", "--output", made / f"on {layout}", *QUICK)
    told = call("fit", made / "target", *more, f"start={out / layout}", "optimizer.lr=1e-9").stdout
    assert "eagle3 head, exit 0" in told
    target = SelfSpecModel.from_pretrained(made / "target").decoder
    before, after = (
        load_heads(target, folder)[0] for folder in (out / layout, made / f"on {layout}" / "heads")
    )
    assert before.options == after.options
    for name, weight in before.named_parameters():
        torch.testing.assert_close(weight, after.get_parameter(name), rtol=1e-4, atol=1e-5)


def test_what_will_not_pay_is_refused_before_it_is_fitted_unless_forced(made, monkeypatch):
    monkeypatch.setattr(defaults, "device_speed", lambda *_: SLOW)
    options = ("--text", made / "*.txt", "--output", made / "slow", *QUICK)
    refused = call("fit", made / "target", *options, code=1)
    assert "no head would make this model faster" in refused.stderr and "--force" in refused.stderr
    assert "expected of a head here" in refused.stdout  # and shows why
    assert not (made / "slow").exists()
    assert "heads: " in call("fit", made / "target", *options, "--force").stdout
    chosen = call("fit", made / "target", *options, "heads=[{kind: lens, exit_layer: 1}]", code=1)
    assert "holds a run with another heads.0" in chosen.stderr  # and nothing is said of what pays


def test_blocks_are_split_without_loss(made):
    config = defaults.complete(
        {"target": str(made / "target"), "data": [{"files": [str(made / "text.txt")]}]}, "test"
    )
    whole = Mixture.read(config.data, config.load_target()[1], 16, 0)
    kept, (end,) = whole.without_ends(0.05)
    assert len(end) == -(-len(whole.sources[0]) // 20)
    joined = torch.cat([kept.sources[0].tokens, end.tokens])
    assert torch.equal(joined, whole.sources[0].tokens)
    assert len(kept.sources[0]) + len(end) == len(whole.sources[0])
    assert int(joined.max()) < WORDS
