"""Multi-token prediction layers are found in a checkpoint, and draft what transformers' draft."""

import json
import shutil

import pytest
import torch
from cli_tools import call, one_object
from conftest import equal_to_generate, greedy, prompt, tiny_llama
from mtp_tools import DEPTH, FAMILIES, GLM, MIMO, WIDTH, checkpoint, split
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from selfspec import SelfSpecModel
from selfspec.apps.bench.config import MethodConfig
from selfspec.apps.bench.prompts import Batch
from selfspec.apps.bench.run import make_method
from selfspec.heads import draft_states, target_states

IDS, MASK = prompt(4, 9, 6)


@pytest.fixture(scope="module", params=FAMILIES)
def wrapped(request, tmp_path_factory):
    folder = checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    return request.param, folder, SelfSpecModel.from_pretrained(folder)


def test_a_checkpoint_drafts_with_its_own_layer_by_default(wrapped):
    _, _, spec = wrapped
    assert [(head.kind, head.exit_layer) for head in spec.heads] == [("mtp", 0)]
    own = greedy(spec.model, IDS, MASK, max_new_tokens=7)
    for draft in (None, {"num_draft_tokens": 1}, {"drafter": "tree"}, {"drafter": "auto"}):
        if draft == {"drafter": "tree"} and spec.decoder.recurrent_layers:
            continue
        text = spec.generate(IDS, attention_mask=MASK, max_new_tokens=7, draft=draft)
        assert torch.equal(text, own), draft
        if draft != {"drafter": "auto"}:  # which may find drafts too slow
            assert spec.last_stats.drafted > 0


@torch.no_grad()
def test_its_drafts_are_transformers_own(wrapped):
    """transformers loads the layers of two of these families."""
    family, _, spec = wrapped
    if family not in ("deepseek_v3", "glm4_moe"):
        pytest.skip(f"transformers has no multi-token prediction for {family}")
    # Where transformers looks: at the depths of published checkpoints.
    spec.model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{DEPTH}\..*"]
    theirs = MtpModel.from_pretrained(spec.model).eval()
    tokens = IDS[1:2]
    decoder, (head,) = spec.decoder, spec.heads
    last = spec.model.model(tokens).last_hidden_state
    positions = torch.arange(1, tokens.shape[1])[None]
    embedded = spec.model.get_input_embeddings()(tokens[:, 1:])
    layer = theirs.layers[0]
    rotary = spec.model.model.rotary_emb(embedded, positions)
    expected = layer(embedded, last[:, :-1], rotary, None, positions, None)
    known = target_states(decoder, tokens, None, head.input_layers)
    (state, *_) = draft_states(decoder, head, known, 2)
    logits = head.logits(decoder, state)[:, 1:]
    torch.testing.assert_close(logits, spec.model.lm_head(expected), rtol=1e-4, atol=1e-4)


def test_transformers_own_is_a_peer_of_the_benchmark(wrapped, monkeypatch):
    family, _, spec = wrapped
    method = MethodConfig(name="HF use_mtp", peer="use_mtp")
    if family not in ("deepseek_v3", "glm4_moe"):
        monkeypatch.delattr(spec.decoder.config, "num_mtp_layers", raising=False)
        with pytest.raises(ValueError, match="where the config names num_mtp_layers"):
            make_method(spec, method)
        return
    patterns = [rf"model\.layers\.{DEPTH}\..*"]
    monkeypatch.setattr(spec.model, "_keys_to_ignore_on_load_unexpected", patterns)
    ids = IDS[1:2]
    batch = Batch.of(ids)
    written = make_method(spec, method)(batch, {"max_new_tokens": 8, "do_sample": False}, 0)
    own = greedy(spec.model, ids, max_new_tokens=8)
    assert written.texts == own[:, ids.shape[1] :].tolist()


def test_what_is_fed_back(wrapped):
    family, _, spec = wrapped
    raw = family in ("glm4_moe", "glm4_moe_lite", "ernie4_5_moe")
    assert spec.heads[0].options["feeds_normed"] is not raw


def test_info_names_what_was_found(wrapped):
    _, folder, _ = wrapped
    facts = one_object(call("info", "--model", folder, "--json"))
    assert [head["kind"] for head in facts["exit_heads"]] == ["mtp"]
    assert facts["default_draft"]["head"] == "mtp"


def test_the_head_is_saved_with_the_target(wrapped, tmp_path):
    _, _, spec = wrapped
    spec.save_pretrained(tmp_path)
    again = SelfSpecModel.from_pretrained(tmp_path)
    (one,), (other,) = spec.heads, again.heads
    assert one.options == other.options
    weights = other.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in one.state_dict().items())


def test_heads_that_are_given_go_before(wrapped):
    _, folder, spec = wrapped
    (own,), (named,) = spec.heads, SelfSpecModel.from_pretrained(folder, heads=folder).heads
    assert named.options == own.options
    assert SelfSpecModel.from_pretrained(folder, heads=[]).heads == []


# A layer that cannot be used


def lose(folder, root, file):
    (folder / file).unlink()


def cut(folder, root, file):
    (folder / file).write_bytes((folder / file).read_bytes()[:200])


def change(new):
    """Change the tensors of the layer."""

    def changing(folder, root, file):
        layer = new(load_file(folder / file), root)
        save_file(layer, folder / file, metadata={"format": "pt"})
        index = folder / "model.safetensors.index.json"
        places = json.loads(index.read_text())["weight_map"]
        places = {name: at for name, at in places.items() if at != file}
        index.write_text(json.dumps({"weight_map": {**places, **dict.fromkeys(layer, file)}}))

    return changing


def packed(tensors, root):
    name = f"{root}self_attn.q_proj.weight"
    return {**tensors, name: torch.zeros(WIDTH, WIDTH // 2, dtype=torch.uint8)}


def of_another_width(tensors, root):
    return {**tensors, f"{root}self_attn.q_proj.weight": torch.zeros(WIDTH, WIDTH // 2)}


def in_8_bits(tensors, root):
    name = f"{root}self_attn.o_proj.weight"
    return {**tensors, name: tensors[name].to(torch.float8_e4m3fn)}


def with_scales(tensors, root):
    return {**tensors, f"{root}self_attn.o_proj.weight_scale_inv": torch.ones(1, 1)}


def without(part):
    return lambda tensors, root: {n: t for n, t in tensors.items() if part not in n}


UNUSABLE = {
    "its file is missing": (lose, r"mtp\.safetensors"),
    "its file is cut off": (cut, r"mtp\.safetensors cannot be read"),
    "packed in 4 bits": (change(packed), "q_proj.weight is stored as uint8"),
    "of another shape": (change(of_another_width), "q_proj"),
    "in 8 bits": (change(in_8_bits), "o_proj.weight is stored as float8_e4m3fn"),
    "with a quantizer's scales": (change(with_scales), "weight_scale_inv"),
    "without a map": (change(without("o_proj")), "o_proj"),
    "without its entry": (change(without("_proj.weight")), "lacks|fc|eh_proj|input_proj"),
    "without a norm": (change(without("layernorm")), "layernorm|norm"),
    "without an expert": (change(without(".experts.3.")), "experts"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return {
        family: checkpoint(tmp_path_factory.mktemp(family), family)
        for family in ("mimo", "glm4_moe")
    }


@pytest.mark.matrix
@pytest.mark.parametrize("case", UNUSABLE)
@pytest.mark.parametrize("family", ["mimo", "glm4_moe"])
def test_a_layer_that_cannot_be_used_does_not_stop_its_target(tmp_path, whole, family, case):
    if (family, case) == ("mimo", "without an expert"):
        pytest.skip("MiMo is dense")
    (damage, reason), root = UNUSABLE[case], {"mimo": MIMO, "glm4_moe": GLM}[family]
    folder = shutil.copytree(whole[family], tmp_path / "checkpoint")
    split(folder, root, "mtp.safetensors")
    damage(folder, root, "mtp.safetensors")
    what = rf"prediction layer {root}\* of .* is not used: .*{reason}.*; plain drafts are used"
    with pytest.warns(UserWarning, match=what) as told:
        spec = SelfSpecModel.from_pretrained(folder)
    assert len(told) == 1 and spec.heads == []
    equal_to_generate(spec, IDS, MASK, max_new_tokens=6)
    assert SelfSpecModel.from_pretrained(folder, heads=[]).heads == []  # without a word
    with pytest.raises(ValueError, match=rf"layer {root}\* of .* cannot be used: .*{reason}"):
        SelfSpecModel(spec.model, heads=folder)


def test_a_layer_of_a_deeper_model_is_not_taken_for_one(tmp_path):
    """Its layer at the depth of the target is named as DeepSeek's extra layer is."""
    deeper = tiny_llama()
    deeper.save_pretrained(tmp_path)
    depth = deeper.config.num_hidden_layers - 1
    cut_short = SelfSpecModel.from_pretrained(tmp_path, num_hidden_layers=depth)
    assert cut_short.heads == []  # without a word
    with pytest.raises(ValueError, match="holds no head of a known format: its config names"):
        SelfSpecModel(cut_short.model, heads=tmp_path)


@pytest.mark.parametrize("family", ["mimo", "glm4_moe"])
def test_a_layer_in_a_file_that_the_index_leaves_out_is_used(tmp_path, whole, family):
    folder = shutil.copytree(whole[family], tmp_path / "checkpoint")
    split(folder, {"mimo": MIMO, "glm4_moe": GLM}[family], "mtp.safetensors", named=False)
    (head,) = SelfSpecModel.from_pretrained(folder).heads
    (other,) = SelfSpecModel.from_pretrained(whole[family]).heads
    weights = other.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in head.state_dict().items())
    cut(folder, None, "mtp.safetensors")
    with pytest.warns(UserWarning, match=r"not used: .*mtp\.safetensors cannot be read"):
        assert SelfSpecModel.from_pretrained(folder).heads == []


@pytest.mark.parametrize(
    "key", ["num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"]
)
def test_a_layer_that_is_announced_but_not_there_is_missed(tmp_path, whole, key):
    """As in every fine-tune that transformers saves."""
    folder = shutil.copytree(whole["mimo"], tmp_path / "checkpoint")
    split(folder, MIMO, "mtp.safetensors", named=False)
    lose(folder, MIMO, "mtp.safetensors")
    config = json.loads((folder / "config.json").read_text())
    none = {"num_nextn_predict_layers": 0, "num_mtp_layers": 0}
    (folder / "config.json").write_text(json.dumps({**config, **none, key: 1}))
    with pytest.warns(UserWarning, match=rf"announces it \({key} = 1\), but no file") as told:
        assert SelfSpecModel.from_pretrained(folder).heads == []
    assert len(told) == 1
    (folder / "config.json").write_text(json.dumps({**config, **none}))
    assert SelfSpecModel.from_pretrained(folder).heads == []  # without a word
