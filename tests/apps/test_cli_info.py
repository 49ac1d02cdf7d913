"""`selfspec info`: facts that are those of the model."""

import json
import shutil

import pytest
import torch
import transformers
from cli_tools import call, one_object
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

from selfspec import DEMO_MODEL, DraftConfig, SelfSpecModel
from selfspec.apps.bench import forecast
from selfspec.apps.bench.forecast import DeviceSpeed
from selfspec.apps.cli import info
from selfspec.drafters import Auto, make_drafter
from selfspec.heads import LensHead, save_heads
from selfspec.schedule.profile import PROFILE_NAME, Place, Profile, default_path


def test_info_says_what_the_model_is():
    found = one_object(call("info", "--json"))
    # Every command takes this one in float32, where texts have to be equal.
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype="float32")
    assert found["parameters"] == model.num_parameters()
    assert found["weight_bytes"] == model.get_memory_footprint(return_buffers=False)
    assert found["kv_bytes_per_token"] == 4 * 16 * 2 * 2 * 64  # layers, k and v, heads, width
    assert found["kv_bytes"] == 1024 * found["kv_bytes_per_token"]
    assert (found["layers"], found["vocab_size"]) == (16, 6144)
    spec = SelfSpecModel.from_pretrained(DEMO_MODEL)
    for copies in found["low_precision"]:
        assert copies["bytes"] == spec.decoder.copy_bytes(copies["precision"])
    heads = spec.heads
    listed = [(head["kind"], head["exit_layer"]) for head in found["exit_heads"]]
    assert listed == [(head.kind, head.exit_layer) for head in heads] != []
    assert found["default_draft"]["exit_layer"] == heads[0].exit_layer


def test_info_needs_no_weights_and_says_the_same_with_them(folder, monkeypatch):
    common = ("info", "--model", folder, "--context", 100, "--json")
    speed = DeviceSpeed(4, 1.0, {1: 0.2, 2: 0.2}, {40: {1: 1.2, 3: 1.5}}, 0.1, 0.0)
    # Times differ from call to call.
    monkeypatch.setattr(forecast, "measure_device", lambda *_: speed)
    without = one_object(call(*common))
    monkeypatch.setattr(info, "_without_weights", lambda path: None)
    assert one_object(call(*common)) == without
    gains = without["fitting"]["speedups"]
    assert 0 < gains["200000"] < gains["1000000"] < gains["5000000"]


def test_info_of_an_adapter_is_that_of_the_model_with_it(folder, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    found = one_object(call("info", "--model", tmp_path / "adapter", "--json"))
    with_it = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert (
        found["parameters"]
        == with_it.num_parameters()
        > one_object(call("info", "--model", folder, "--json"))["parameters"]
    )


def test_a_folder_that_an_adapter_names_and_is_not_there_is_named(folder, tmp_path):
    facts = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "gone")}
    (tmp_path / "adapter_config.json").write_text(json.dumps(facts))
    for command in ("info",), ("check", "--max-new-tokens", 4):
        AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
        result = call(*command, "--model", tmp_path, code=1)
        assert f"no model folder at {tmp_path / 'gone'}" in " ".join(result.stderr.split())


def test_info_lists_heads(folder, tmp_path):
    spec = SelfSpecModel.from_pretrained(folder, dtype="auto")
    lens = LensHead.build(spec.decoder, 3, rank=8)
    save_heads([lens], spec.decoder, tmp_path / "heads")
    common = ("info", "--model", folder, "--heads", tmp_path / "heads")
    found = one_object(call(*common, "--json"))
    size = sum(p.numel() for p in lens.parameters())
    expected = {"kind": "lens", "exit_layer": 3, "parameters": size, "bytes": 8 * size}
    assert found["exit_heads"] == [expected]
    assert found["default_draft"]["head"] == "lens"
    shown = call(*common).stdout
    assert "lens after layer 3" in shown
    assert "exit after layer 3 (lens head)" in shown


def test_info_names_the_head_that_the_default_drafts_with(folder, tmp_path):
    spec = SelfSpecModel.from_pretrained(folder, dtype="auto")
    lens = [LensHead.build(spec.decoder, exit_layer, rank=8) for exit_layer in (3, 1)]
    save_heads(lens, spec.decoder, tmp_path / "heads")
    found = one_object(call("info", "--model", folder, "--heads", tmp_path / "heads", "--json"))
    spec = SelfSpecModel.from_pretrained(folder, tmp_path / "heads", dtype="auto")
    drafter = make_drafter(spec.engine, spec.default_draft)
    assert isinstance(drafter, Auto)
    assert found["default_draft"]["exit_layer"] == drafter.reader.head.exit_layer == 1


@pytest.mark.usefixtures("untimed")
def test_info_shows_the_profile_that_generate_takes(folder, tmp_path):
    spec = SelfSpecModel.from_pretrained(folder, dtype="auto")
    draft = DraftConfig(drafter="prompt_lookup", num_draft_tokens=5)
    target = tmp_path / "target"
    shutil.copytree(folder, target)
    Profile(draft=draft, place=Place.of(spec.decoder)).save(target / PROFILE_NAME)
    found = one_object(call("info", "--model", target, "--json"))
    assert found["profile"]["draft"]["drafter"] == "prompt_lookup"
    assert "prompt_lookup: 5 tokens a round" in call("info", "--model", target).stdout


@pytest.mark.usefixtures("untimed")
def test_info_shows_a_profile_in_the_users_cache(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert one_object(call("info", "--model", folder, "--json"))["profile"] == {}
    spec = SelfSpecModel.from_pretrained(folder, dtype="auto")
    draft = DraftConfig(exit_layer=4, precision="int8", lm_head_precision="int4", window=64)
    Profile(draft=draft, place=Place.of(spec.decoder)).save(default_path(spec.decoder, None))
    found = one_object(call("info", "--model", folder, "--json"))["profile"]["draft"]
    assert (found["precision"], found["window"]) == ("int8", 64)
    words = "exit after layer 4 (shared head), int8 weights, LM head in int4, 64 recent keys, 4"
    assert words in " ".join(call("info", "--model", folder).stdout.replace("│", " ").split())


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ({"drafter": "none"}, "none: plain decoding"),
        ({"drafter": "auto", "exit_layer": 1}, "the exit after layer 1 (shared head) only if it"),
        ({"drafter": "auto", "exit_layer": 4, "precision": "int4"}, "int4 weights where that is"),
        ({"drafter": "auto", "head": "lens"}, "the exit after layer 3 (lens head) where that is"),
        ({"drafter": "skip_sublayers", "window": 9}, "skip_sublayers: 9 recent keys, 4 tokens"),
    ],
)
def test_a_draft_is_described_by_what_decides_its_speed(draft, words, folder):
    spec = SelfSpecModel.from_pretrained(folder, dtype="float32")
    spec.engine.add(LensHead.build(spec.decoder, 3, rank=8))
    facts = info._of_draft(spec.engine, DraftConfig(**draft))
    assert words in info._draft_in_words(facts)


@pytest.mark.usefixtures("untimed")
@pytest.mark.matrix
@pytest.mark.parametrize("copies", [1, 2])
def test_info_says_what_packed_weights_would_take(folder, copies, monkeypatch):
    faster = "selfspec.decoder.kernels.fbgemm.is_faster"
    monkeypatch.setattr(faster, lambda: copies == 2)
    monkeypatch.setattr("selfspec.decoder.kernels.prepacked.onednn_computes", lambda dtype: True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    monkeypatch.setattr("selfspec.decoder.kernels.prepacked.HALF", (model.dtype,))
    found = one_object(call("info", "--model", folder, "--json"))
    linear = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert found["packed_bytes"] == copies * sum(weight.nbytes for weight in linear)
    assert "more with the kernels" in call("info", "--model", folder).stdout
    monkeypatch.setattr("selfspec.decoder.kernels.prepacked.onednn_computes", lambda dtype: False)
    monkeypatch.setattr(faster, lambda: False)
    assert one_object(call("info", "--model", folder, "--json"))["packed_bytes"] == 0
    assert "more with the kernels" not in call("info", "--model", folder).stdout
