"""What a folder may hold beside a published head, and what its config may leave out or nest."""

import json
import warnings

import pytest
import torch
from conftest import VOCAB, equal_to_generate, prompt, tiny_llama
from published import (
    DRAFTS,
    EPS,
    LAYER,
    WIDTH,
    change_layer,
    changed,
    eagle3_tensors,
    write,
    write_eagle,
    write_eagle3,
    write_medusa,
    write_speculators,
)
from safetensors.torch import load_file, save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3Config, Qwen3ForCausalLM

from selfspec import SelfSpecModel
from selfspec.decoder import Decoder
from selfspec.heads import Eagle3Head, EagleHead, load_heads, save_heads

IDS, MASK = prompt(4, 9, 6)
LAYERS = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}


@pytest.fixture(scope="module")
def target():
    return tiny_llama("sometimes", rms_norm_eps=EPS)


@pytest.fixture(scope="module")
def decoder(target):
    return Decoder(target)


def load(decoder, folder):
    (head,) = load_heads(decoder, folder)
    return head


def assert_same(one, other):
    assert one.options == other.options
    weights = other.state_dict()
    assert one.state_dict().keys() == weights.keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in one.state_dict().items())


def assert_exact(target, spec):
    """The heads draft, and the text is the target's own."""
    equal_to_generate(spec, IDS, MASK, max_new_tokens=8)
    assert spec.last_stats.drafted > 0


# The config


def nested(folder, *keys):
    """Move the layer's config under keys."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    layer = {key: config.pop(key) for key in LAYER if key in config}
    for key in reversed(keys):
        layer = {key: layer}
    path.write_text(json.dumps({**config, "model_type": "eagle", **layer}))


@pytest.mark.parametrize("keys", [("model",), ("text_config",), ("model", "text_config")])
def test_a_layers_config_may_be_nested(tmp_path, decoder, keys):
    write_eagle(tmp_path / "eagle")
    write_eagle3(tmp_path / "eagle3", eagle3_tensors(), **LAYERS)
    for kind in ("eagle", "eagle3"):
        plain = load(decoder, tmp_path / kind)
        nested(tmp_path / kind, *keys)
        assert_same(load(decoder, tmp_path / kind), plain)


def test_of_several_nested_configs_the_one_of_the_heads_width_is_read(tmp_path, decoder):
    folder = write_eagle3(tmp_path, eagle3_tensors(), **LAYERS)
    plain = load(decoder, folder)
    nested(folder, "text_config")
    changed(folder, vision_config={"num_attention_heads": 2, "hidden_size": 24})
    assert_same(load(decoder, folder), plain)
    changed(folder, vision_config={"num_attention_heads": 2, "hidden_size": WIDTH})
    with pytest.raises(ValueError, match=r"layers under \['text_config', 'vision_config'\]"):
        load(decoder, folder)


@pytest.mark.parametrize("layout", [write_eagle3, write_speculators])
def test_the_tensors_say_what_the_config_leaves_out(tmp_path, decoder, layout):
    folder = layout(tmp_path, eagle3_tensors(), **LAYERS)
    plain = load(decoder, folder)
    sizes = ("hidden_size", "intermediate_size", "num_key_value_heads", "num_hidden_layers")
    for absent in (*sizes, "vocab_size", "head_dim"):
        change_layer(folder, **{absent: None})
        assert_same(load(decoder, folder), plain)
    change_layer(folder, num_attention_heads=None)
    with pytest.raises(ValueError, match="no num_attention_heads and no head_dim, at its top or"):
        load(decoder, folder)
    change_layer(folder, head_dim=LAYER["head_dim"])
    assert_same(load(decoder, folder), plain)


@pytest.mark.parametrize("kind", [EagleHead, Eagle3Head])
def test_a_width_that_is_no_multiple_of_the_heads(tmp_path, kind):
    """As GLM-4.5's: 5120 and 96 heads of 128."""
    shape = {"hidden_size": 32, "num_attention_heads": 6, "head_dim": 8, "num_key_value_heads": 2}
    size = {"vocab_size": VOCAB, "num_hidden_layers": 4, "intermediate_size": 40}
    other = Qwen3ForCausalLM(Qwen3Config(**shape, **size, eos_token_id=None)).eval()
    save_heads([kind.build(Decoder(other))], Decoder(other), tmp_path)
    spec = SelfSpecModel(other, heads=tmp_path)
    assert spec.heads[0].layer.self_attn.q_proj.out_features == 48
    assert_exact(other, spec)


# Rotary embeddings

YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
FACTORS = {"long_factor": [2.0] * 4, "short_factor": [1.5] * 4}
BEFORE = {"original_max_position_embeddings": 64}
LONG = {**FACTORS, **BEFORE}
EQUAL = [
    ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}, {}),
    ({"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}}, {}),
    (
        {"rope_scaling": {"type": "su", **LONG}},
        {"rope_parameters": {"rope_type": "longrope", **LONG, "rope_theta": 5000.0}},
    ),
    (
        {"rope_scaling": {"rope_type": "longrope", **FACTORS}, **BEFORE},
        {"rope_scaling": {"rope_type": "longrope", **LONG}},
    ),
    ({"rope_theta": None}, {"rope_theta": 10_000.0}),
    (
        {"rope_scaling": {"type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "yarn", **YARN}},
    ),
    ({"rope_parameters": {"full_attention": {"rope_theta": 7.0}}}, {"rope_theta": 7.0}),
]


@pytest.mark.parametrize(("one", "other"), EQUAL, ids=str)
def test_rope_parameters_have_many_spellings(tmp_path, decoder, one, other):
    rotaries = []
    for name, keys in (("one", one), ("other", other)):
        write_eagle(tmp_path / name, **keys)
        rotaries.append(load(decoder, tmp_path / name).layer.rotary)
    assert torch.equal(rotaries[0].inv_freq, rotaries[1].inv_freq)
    assert rotaries[0].attention_scaling == rotaries[1].attention_scaling
    plain = torch.arange(0, 8, 2).float().div(8).neg()
    if "theta" in str(one) or "mrope" in str(one):
        theta = next((v for v in other.values() if isinstance(v, float)), LAYER["rope_theta"])
        torch.testing.assert_close(rotaries[0].inv_freq, theta**plain)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_scaling": {"rope_type": "spiral"}}, "unknown rope type .*'spiral'"),
        ({"rope_scaling": {"type": "yarn"}}, "yarn.* do not fit .*factor"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "linear.* do not fit"),
        ({"rope_scaling": {"type": "su", **LONG, "short_factor": [1.0]}}, "longrope.* do not fit"),
        ({"rope_scaling": ["yarn"]}, "must be an object, got"),
        ({"rope_theta": "large"}, "large.* do not fit"),
        ({"rope_theta": -1.0}, "-1.0.* do not fit attention heads of head_dim 8"),
        ({"partial_rotary_factor": 2.0}, "2.0.* do not fit attention heads of head_dim 8"),
    ],
)
def test_rope_parameters_that_cannot_be_used_are_named_with_the_folder(
    tmp_path, decoder, keys, message
):
    write_eagle(tmp_path, **keys)
    with pytest.raises(ValueError, match=f"{tmp_path}: .*{message}"):
        load(decoder, tmp_path)


# Draft vocabularies


@pytest.mark.parametrize("absent", ["lm_head.weight", "d2t", "both"])
def test_a_reduced_vocabulary_needs_its_map_and_its_lm_head(tmp_path, decoder, absent):
    names = ["lm_head.weight", "d2t"] if absent == "both" else [absent]
    tensors = {n: t for n, t in eagle3_tensors().items() if n not in names}
    write_eagle3(tmp_path, tensors, **LAYERS)
    message = rf"drafts {DRAFTS} of {VOCAB} tokens, but its file lacks {' and '.join(names)}$"
    with pytest.raises(ValueError, match=message):
        load(decoder, tmp_path)


def test_the_tokens_of_a_draft_vocabulary_come_in_any_order(tmp_path, decoder):
    tensors = eagle3_tensors()
    write_eagle3(tmp_path / "sorted", tensors, **LAYERS)
    order = torch.randperm(DRAFTS, generator=torch.Generator().manual_seed(0))
    ids = (tensors["d2t"] + torch.arange(DRAFTS))[order]
    shuffled = {
        "d2t": ids - torch.arange(DRAFTS),
        "lm_head.weight": tensors["lm_head.weight"][order],
    }
    write_eagle3(tmp_path / "shuffled", {**tensors, **shuffled}, **LAYERS)
    assert_same(load(decoder, tmp_path / "shuffled"), load(decoder, tmp_path / "sorted"))
    twice = {"d2t": torch.zeros(DRAFTS, dtype=torch.long) - torch.arange(DRAFTS)}
    write_eagle3(tmp_path / "twice", {**tensors, **twice}, **LAYERS)
    with pytest.raises(ValueError, match=r"d2t .* must be different tokens"):
        load(decoder, tmp_path / "twice")


# Medusa counts


@pytest.mark.parametrize(("heads", "layers"), [(2, 2), (5, 2), (3, 1), (3, 4), (1, 1)])
def test_medusas_heads_and_layers_are_counted_in_the_file(tmp_path, decoder, heads, layers):
    write_medusa(tmp_path, heads=heads, layers=layers)
    said = {"medusa_num_heads": 3, "medusa_num_layers": 2}
    held = {"medusa_num_heads": heads, "medusa_num_layers": layers}
    changed(tmp_path, **said)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        head = load(decoder, tmp_path)
    told = [str(warning.message) for warning in caught]
    assert [head.options[key] for key in ("heads", "layers")] == [heads, layers]
    assert [key for key in said if any(f"says {key} = {said[key]}, its" in w for w in told)] == [
        key for key in said if said[key] != held[key]
    ]
    changed(tmp_path, **dict.fromkeys(said))
    assert_same(load(decoder, tmp_path), head)


@pytest.mark.parametrize("lost", ["1.0.linear.weight", "2.1.linear.bias", "0.2.weight"])
def test_a_lost_tensor_of_medusas_is_named(tmp_path, decoder, lost):
    tensors = write_medusa(tmp_path)
    del tensors[lost]
    write(tmp_path, {"medusa_num_heads": 3}, tensors)
    with pytest.raises(ValueError, match=r"lacks a tensor|has a tensor that medusa heads lack"):
        load(decoder, tmp_path)


# Embeddings that a model scales


@pytest.fixture(scope="module")
def gemma():
    torch.manual_seed(0)
    keys = {k: v for k, v in LAYER.items() if k not in ("model_type", "rope_theta", "hidden_act")}
    config = Gemma3TextConfig(**{**keys, "num_hidden_layers": 4, "query_pre_attn_scalar": 8})
    return Gemma3ForCausalLM(config).double().eval()


@pytest.mark.parametrize("rows", ["copy", "absent", "other"])
def test_published_heads_read_the_rows_as_they_are_stored(tmp_path, gemma, rows):
    own = gemma.get_input_embeddings().weight.detach()
    tokens, decoder = torch.tensor([[3, 5, 7]]), Decoder(gemma)
    eagle = write_eagle(tmp_path / "eagle")
    eagle3 = eagle3_tensors()
    table = {"copy": own.clone(), "other": own * 1.01, "absent": own}[rows]
    for folder, tensors in (("eagle", eagle), ("eagle3", eagle3)):
        tensors["embed_tokens.weight"] = table
        if rows == "absent":
            del tensors["embed_tokens.weight"]
        write(tmp_path / folder, {**LAYER, **LAYERS}, tensors)
        head = load(decoder, tmp_path / folder)
        torch.testing.assert_close(head.embed(decoder, tokens), table[tokens])
        assert (head.embed_tokens is None) is (rows != "other")
        save_heads([head], decoder, tmp_path / "ours")
        again = load(decoder, tmp_path / "ours")
        torch.testing.assert_close(again.embed(decoder, tokens), table[tokens])


def test_heads_fitted_to_scaled_embeddings_keep_them(tmp_path, gemma):
    decoder, tokens = Decoder(gemma), torch.tensor([[3, 5, 7]])
    save_heads([EagleHead.build(decoder)], decoder, tmp_path)
    file = tmp_path / "selfspec.json"
    saved = json.loads(file.read_text())
    del saved["heads"][0]["options"]["raw_embedding"]  # as before there was such an option
    file.write_text(json.dumps(saved))
    read = load(decoder, tmp_path).embed(decoder, tokens)
    assert torch.equal(read, gemma.get_input_embeddings()(tokens))
    assert not torch.allclose(read, gemma.get_input_embeddings().weight[tokens])


# Other files, and damage


WRAPPED = {
    "eagle": write_eagle,
    "eagle3": lambda folder: write_eagle3(folder, eagle3_tensors(), **LAYERS),
    "medusa": lambda folder: write_medusa(folder, heads=2, layers=1),
}


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model.", "model.model."])
@pytest.mark.parametrize("kind", WRAPPED)
def test_what_stands_before_every_name_says_nothing(tmp_path, decoder, kind, prefix):
    WRAPPED[kind](tmp_path)
    bare, path = load(decoder, tmp_path), tmp_path / "model.safetensors"
    save_file({prefix + name: tensor for name, tensor in load_file(path).items()}, path)
    assert_same(load(decoder, tmp_path), bare)


def test_other_files_beside_a_head_are_left_out(tmp_path, decoder):
    folder = write_eagle3(tmp_path / "head", eagle3_tensors(), **LAYERS)
    plain = load(decoder, folder)
    state = {"optim.step": torch.ones(1), "exp_avg.fc.weight": torch.ones(2, 2)}
    save_file(state, folder / "optimizer.safetensors")
    (folder / "scaler.safetensors").write_bytes(b"no tensors")
    (folder / "lost.safetensors").symlink_to("/nonexistent")
    (folder / "folder.safetensors").mkdir()
    assert_same(load(decoder, folder), plain)
    (folder / "model.safetensors").rename(folder / "eagle.safetensors")
    assert_same(load(decoder, folder), plain)


def test_damage_names_the_file(tmp_path, decoder):
    folder = write_eagle3(tmp_path, eagle3_tensors(), **LAYERS)
    index = folder / "model.safetensors.index.json"
    for text in ('{"weight_map": ', "[]", "{}", '{"weight_map": {"fc.weight": 1}}'):
        index.write_text(text)
        with pytest.raises(ValueError, match=r"index\.json .*it may be truncated"):
            load(decoder, folder)
    index.write_text(json.dumps({"weight_map": {"fc.weight": "lost.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"lost\.safetensors"):
        load(decoder, folder)
    index.unlink()
    tensors = load_file(folder / "model.safetensors")
    for dtype in (torch.int8, torch.float8_e4m3fn):
        save_file(
            {**tensors, "fc.weight": tensors["fc.weight"].to(dtype)}, folder / "model.safetensors"
        )
        with pytest.raises(ValueError, match=r"fc\.weight .* is stored as (int8|float8_e4m3fn)"):
            load(decoder, folder)


IDS_KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize("nested", [{IDS_KEY: [1, 2, 3]}, {"layer_ids": [2, 3, 4]}])
def test_a_null_hides_nothing_that_is_nested(tmp_path, decoder, nested):
    keys = {IDS_KEY: None, "eagle_config": {**nested, "norm_before_residual": True}}
    folder = write_eagle3(tmp_path, eagle3_tensors(), **keys)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "norm_before_residual": None}))
    head = load(decoder, folder)
    assert head.feature_layers == (2, 3, 4) and head.options["norm_before_residual"]


@pytest.mark.parametrize("flag", ["norm_before_fc", "fc_norm"])
def test_norms_of_features_are_those_of_the_file(tmp_path, decoder, flag):
    head = load(decoder, write_eagle3(tmp_path, eagle3_tensors(**{flag: True}), **LAYERS))
    assert head.options[flag]


def test_an_embedding_that_differs_in_one_row_is_the_heads_own(tmp_path):
    target = tiny_llama(vocab_size=1500, rms_norm_eps=EPS)
    rows = target.model.embed_tokens.weight.detach().clone()
    tensors = {**eagle3_tensors(), "embed_tokens.weight": rows}
    for change in (0.0, 5.0):  # of a row for masks
        rows[1003] += change
        folder = write_eagle3(tmp_path / str(change), tensors, vocab_size=1500, **LAYERS)
        head = load(Decoder(target), folder)
        assert (head.embed_tokens is None) == (change == 0)


# Heads inside the checkpoint of their target


def medusa(folder):
    tensors = write_medusa(folder)
    return tensors, {"medusa_num_heads": 3, "medusa_num_layers": 2}


def eagle(folder):
    return write_eagle(folder), {}


def eagle3(folder):
    # The layer differs from the target's, whose config is the only one here.
    return eagle3_tensors(embedding=False), {**LAYERS, "draft_vocab_size": DRAFTS}


INSIDE = [(medusa, "medusa_head."), (eagle, "eagle_module."), (eagle3, "eagle_module.")]
INSIDE += [(medusa, "model.medusa_heads."), (eagle3, "draft.ea_layer.")]


def whole_checkpoint(folder, target, published, prefix):
    """The target and its head in one file; and the head alone."""
    target.save_pretrained(folder)
    tensors, keys = published(folder.parent / "alone")
    write(folder.parent / "alone", {**LAYER, **keys}, tensors)
    own = load_file(folder / "model.safetensors")
    own |= {prefix + name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 5000.0, **keys}))
    return folder


@pytest.fixture(scope="module")
def theta_target():
    """Its rotary embedding is that of the heads, which have no config of their own."""
    rope = {"rope_type": "default", "rope_theta": LAYER["rope_theta"]}
    return tiny_llama("sometimes", rms_norm_eps=EPS, rope_parameters=rope)


@pytest.mark.parametrize(("published", "prefix"), INSIDE)
def test_a_head_inside_the_checkpoint_of_its_target(tmp_path, theta_target, published, prefix):
    folder = whole_checkpoint(tmp_path / "whole", theta_target, published, prefix)
    named = SelfSpecModel(theta_target, heads=folder)
    found = SelfSpecModel.from_pretrained(folder, dtype=torch.float64)
    alone = load(named.decoder, tmp_path / "alone")
    for spec in (named, found):
        (head,) = spec.heads
        assert_same(head, alone)
        assert_exact(theta_target, spec)
    assert SelfSpecModel.from_pretrained(folder, heads=[]).heads == []


@pytest.mark.parametrize(("published", "prefix"), INSIDE[:3])
def test_one_that_cannot_be_used_does_not_stop_its_target(
    tmp_path, theta_target, published, prefix
):
    folder = whole_checkpoint(tmp_path / "whole", theta_target, published, prefix)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    lost = next(
        n
        for n in tensors
        if n.startswith(prefix) and n.endswith(("down_proj.weight", "1.0.linear.weight"))
    )
    del tensors[lost]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.warns(
        UserWarning, match=rf"{prefix}\* inside .* is not used: .*lacks a tensor"
    ) as told:
        spec = SelfSpecModel.from_pretrained(folder)
    assert spec.heads == [] and len(told) == 1
    with pytest.raises(ValueError, match="lacks a tensor"):
        SelfSpecModel(theta_target, heads=folder)
