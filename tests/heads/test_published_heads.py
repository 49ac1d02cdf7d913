"""Heads in the formats of others: read, and drafting what their publishers' code would draft."""

import json
import shutil

import pytest
import torch
from cli_tools import call, one_object
from conftest import VOCAB, equal_to_generate, prompt, tiny_llama
from families import model_of
from head_tools import own_head, record
from published import (
    DRAFTS,
    EPS,
    HEADS,
    INNER,
    KV_HEADS,
    WIDTH,
    change_layer,
    changed,
    eagle3_logits,
    eagle3_tensors,
    eagle_logits,
    medusa_logits,
    peagle_logits,
    peagle_tensors,
    residual_streams,
    write,
    write_eagle,
    write_eagle3,
    write_medusa,
    write_speculators,
)
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PhiConfig

from selfspec import SelfSpecModel
from selfspec.apps.export import export_eagle3
from selfspec.decoder import Decoder
from selfspec.heads import (
    Eagle3Head,
    build_head,
    draft_states,
    load_heads,
    save_heads,
    target_states,
)
from selfspec.heads.llama_layer import ATTENTION_MAPS, MLP_MAPS

IDS, MASK = prompt(4, 9, 6)
NEW = 14
EAGLE3 = {
    "plain": {},
    "norm before residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "norm of each stream": {"fc_norm": True},
    "normed output": {"norm_output": True},
    "Qwen3": {"qwen": True},
}
# What only the tensors say: options of the builders, and keys of the config.
BIASES = [
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj"),
    (*ATTENTION_MAPS, *MLP_MAPS),
]
LAYERS = [
    *({"biases": maps} for maps in BIASES),
    {"heads": 6, "num_attention_heads": 6},  # of which the width is no multiple
    {"partial_rotary_factor": 0.5},
    {"qwen": True, "partial_rotary_factor": 0.25, "biases": BIASES[0]},
]


@pytest.fixture(scope="module")
def target():
    return tiny_llama("sometimes", rms_norm_eps=EPS)


def streams_before(target, reading, layers):
    """Residual streams at what verification had read before the draft."""
    return residual_streams(target, reading.text[: len(reading.text) - reading.step - 1], layers)


def check_reads(monkeypatch, target, folder, expected, trimmed=True, close=1e-5, **draft):
    """Greedy text is the target's own; each reading has the logits that `expected` says."""
    spec, seen = SelfSpecModel(target, heads=folder), record(monkeypatch)
    equal_to_generate(spec, IDS, MASK, max_new_tokens=NEW, draft={"num_draft_tokens": 3, **draft})
    assert {reading.step for reading in seen} == {0, 1, 2}
    (head,) = spec.heads
    for reading in seen[::11]:
        logits = reading.logits[:, head.vocab_ids] if trimmed else reading.logits
        torch.testing.assert_close(logits[0], expected(reading), rtol=close, atol=close)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", [write_eagle3, write_speculators])
@pytest.mark.parametrize("variant", EAGLE3)
@pytest.mark.parametrize("drafter", ["early_exit", "tree"])
def test_an_eagle3_head_drafts_what_its_paper_says(
    monkeypatch, tmp_path, target, layout, variant, drafter
):
    options = dict(EAGLE3[variant])
    qwen = options.pop("qwen", False)
    tensors = eagle3_tensors(streams=2, qwen=qwen, **options)
    layers = {"eagle_aux_hidden_state_layer_ids": [2, 4]}
    folder = layout(tmp_path / "head", tensors, **options, **layers)

    def expected(reading):
        streams, _ = streams_before(target, reading, (2, 4))
        return eagle3_logits(tensors, reading.text, streams, reading.step, **options)[-1][0]

    check_reads(monkeypatch, target, folder, expected, drafter=drafter)


@pytest.mark.matrix
@pytest.mark.parametrize("options", LAYERS, ids=str)
@pytest.mark.parametrize("layout", [write_eagle3, write_speculators])
def test_a_layer_is_what_its_tensors_say(monkeypatch, tmp_path, target, options, layout):
    built = {key: value for key, value in options.items() if key in ("biases", "heads", "qwen")}
    keys = {key: value for key, value in options.items() if key not in built}
    tensors = eagle3_tensors(streams=2, **built)
    folder = layout(tmp_path / "head", tensors, eagle_aux_hidden_state_layer_ids=[2, 4])
    change_layer(folder, **keys)
    share = options.get("partial_rotary_factor", 1)

    def expected(reading):
        streams, _ = streams_before(target, reading, (2, 4))
        return eagle3_logits(tensors, reading.text, streams, reading.step, share)[-1][0]

    check_reads(monkeypatch, target, folder, expected)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "options",
    [
        *({"biases": maps, "attention_bias": maps == BIASES[1]} for maps in BIASES),
        *({"bias": bias, "prefix": root} for bias in (True, False) for root in ("", "model.")),
    ],
    ids=str,
)
def test_an_eagle_head_drafts_what_its_paper_says(monkeypatch, tmp_path, target, options):
    tensors = write_eagle(tmp_path / "head", **options)

    def expected(reading):
        _, last = streams_before(target, reading, (1,))
        lm_head = target.lm_head.weight
        return eagle_logits(tensors, reading.text, last, lm_head, reading.step)[-1][0]

    # Without a norm before its attention, rotary embeddings in float32 count for more.
    check_reads(monkeypatch, target, tmp_path / "head", expected, trimmed=False, close=1e-4)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["original", "speculators"])
@pytest.mark.parametrize("variant", EAGLE3)
@pytest.mark.parametrize("drafter", ["early_exit", "tree"])
def test_a_p_eagle_head_makes_all_drafts_in_one_pass(
    monkeypatch, tmp_path, target, layout, variant, drafter
):
    options, mask_token = dict(EAGLE3[variant]), 7
    qwen = options.pop("qwen", False)
    depth = 1 if qwen else 3
    tensors = peagle_tensors(depth=depth, qwen=qwen, **options)
    keys = {**options, "eagle_aux_hidden_state_layer_ids": [2, 4]}
    if layout == "original":
        named = {**tensors, "mask_hidden": tensors["mask_hidden"][0]}
        folder = write_eagle3(tmp_path / "head", named, ptd_token_id=mask_token, **keys)
    else:
        keys |= {"speculators_model_type": "peagle", "mask_token_id": mask_token}
        folder = write_speculators(tmp_path / "head", tensors, **keys)
    change_layer(folder, num_hidden_layers=depth)

    def expected(reading):
        known = reading.text[: len(reading.text) - reading.step]
        streams, _ = residual_streams(target, known[:-1], (2, 4))
        return peagle_logits(tensors, known, streams, 3, mask_token, **options)[reading.step]

    check_reads(monkeypatch, target, folder, expected, drafter=drafter)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mask_token_id": None}, "names no mask token: mask_token_id or ptd_token_id"),
        ({"mask_token_id": VOCAB}, r"mask_token must be a token id in \[0, 63\], got 64"),
        ({"mask_token_id": 7, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "fc.weight"),
    ],
)
def test_what_does_not_fit_a_p_eagle_head_is_named(tmp_path, target, keys, message):
    keys = {"eagle_aux_hidden_state_layer_ids": [2, 4], **keys}
    folder = write_speculators(tmp_path, peagle_tensors(), speculators_model_type="peagle", **keys)
    change_layer(folder, num_hidden_layers=2)
    with pytest.raises(ValueError, match=message):
        SelfSpecModel(target, heads=folder)


def test_a_p_eagle_head_without_its_mask_is_refused(tmp_path, target):
    keys = {"speculators_model_type": "peagle", "mask_token_id": 7}
    folder = write_speculators(tmp_path, eagle3_tensors(), **keys)
    with pytest.raises(ValueError, match="P-EAGLE one, but lacks mask_hidden"):
        SelfSpecModel(target, heads=folder)


def test_default_layers_are_those_of_the_paper(tmp_path):
    deep = tiny_llama(num_hidden_layers=12)
    (head,) = load_heads(Decoder(deep), write_eagle3(tmp_path, eagle3_tensors()))
    assert head.feature_layers == (2, 6, 9)


@pytest.mark.parametrize(("ids", "layers"), [([1, 2, 3], (2, 3, 4)), ([2, 3, 4], (2, 3, 4))])
def test_ids_inside_eagle_config_are_indices_if_the_first_is_one(tmp_path, target, ids, layers):
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    (head,) = load_heads(Decoder(target), write_eagle3(tmp_path, eagle3_tensors(), **nested))
    assert head.feature_layers == layers


@pytest.mark.parametrize("drafter", ["early_exit", "tree", "cascade", "auto"])
def test_a_medusa_head_drafts_every_position_from_one_state(tmp_path, target, drafter):
    tensors = write_medusa(tmp_path / "head", heads=3, layers=2)
    spec = SelfSpecModel(target, heads=tmp_path / "head")
    (head,) = spec.heads
    decoder, text = spec.decoder, IDS[1]
    forced = draft_states(decoder, head, target_states(decoder, text[None], None, [0, 4]), 5)
    _, last = residual_streams(target, text, (1,))
    for depth, state in enumerate(forced):
        logits = head.logits(decoder, state, depth)[0, depth + 1 :]
        expected = medusa_logits(tensors, last[: len(text) - 1 - depth], depth, 2)
        torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    assert depth == 2, "a head for each of three positions"
    draft = {"drafter": drafter, "num_draft_tokens": 5}
    text = equal_to_generate(spec, IDS, MASK, max_new_tokens=NEW, draft=draft)
    if drafter == "early_exit":
        assert max(len(r.drafted) for row in spec.last_trace.rows for r in row) == 3


def test_medusas_drafts_are_those_of_teacher_forcing(tmp_path, target):
    write_medusa(tmp_path / "head")
    spec = SelfSpecModel(target, heads=tmp_path / "head")
    (head,), decoder = spec.heads, spec.decoder
    draft = {"num_draft_tokens": 3}
    spec.generate(IDS, attention_mask=MASK, max_new_tokens=NEW, draft=draft)
    checked = 0
    for row, steps in enumerate(spec.last_trace.rows):
        text = IDS[row][MASK[row] > 0].tolist()
        for step in steps:
            if step.drafted and len(text) > 1:
                states = target_states(decoder, torch.tensor([text]), None, [0, 4])
                for depth, state in enumerate(draft_states(decoder, head, states, 1)):
                    best = head.logits(decoder, state[:, -1:], depth).argmax().item()
                    assert step.drafted[0] == best
                    checked += 1
            text += step.tokens
    assert checked > 5


def test_a_published_head_is_saved_in_our_format(tmp_path, target):
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    write_eagle3(tmp_path / "theirs", eagle3_tensors(), norm_output=True, **layers)
    spec = SelfSpecModel(target, heads=tmp_path / "theirs")
    spec.save_pretrained(tmp_path / "ours")
    again = SelfSpecModel.from_pretrained(tmp_path / "ours", dtype=torch.float64)
    (one,), (other,) = spec.heads, again.heads
    assert one.options == other.options
    assert all(torch.equal(w, other.state_dict()[name]) for name, w in one.state_dict().items())


def test_a_copy_of_the_targets_embeddings_is_not_held_twice(tmp_path, target):
    tensors = eagle3_tensors()
    tensors["embed_tokens.weight"] = target.model.embed_tokens.weight.detach().half()
    folder = write_eagle3(tmp_path, tensors, eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    (head,) = load_heads(Decoder(target), folder)
    assert head.embed_tokens is None


@pytest.mark.parametrize("whole", [False, True], ids=["rows", "whole LM heads"])
def test_vllms_medusa_names_and_token_map(tmp_path, target, whole):
    theirs = write_medusa(tmp_path / "theirs", heads=2, layers=1)
    ids = torch.arange(0, VOCAB, 2)
    tensors = {"token_map": ids}
    for head in range(2):
        for part in ("weight", "bias"):
            name = f"blocks.{head}.layers.0.{part}"
            tensors[name] = theirs[f"{head}.0.linear.{part}"]
        readout = theirs[f"{head}.1.weight"]
        tensors[f"lm_heads.{head}.weight"] = readout if whole else readout[ids]
    config = {"model_type": "medusa", "num_heads": 2, "num_hidden_layers": 1}
    decoder = Decoder(target)
    (head,) = load_heads(decoder, write(tmp_path / "vllm", config, tensors))
    (other,) = load_heads(decoder, tmp_path / "theirs")
    state = torch.randn(1, 1, WIDTH, dtype=torch.float64)
    expected = other.all_logits(decoder, state)[..., ids]
    torch.testing.assert_close(head.all_logits(decoder, state), expected)


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
def test_vllms_medusa_with_the_targets_lm_head(tmp_path, target, name):
    theirs = write_medusa(tmp_path / "theirs", heads=2, layers=1)
    tensors = {
        f"blocks.{head}.layers.0.{part}": theirs[f"{head}.0.linear.{part}"]
        for head in range(2)
        for part in ("weight", "bias")
    }
    tensors[name] = target.lm_head.weight.detach()
    config = {"model_type": "medusa", "num_heads": 2, "original_lm_head": True}
    (head,) = load_heads(Decoder(target), write(tmp_path / "vllm", config, tensors))
    assert head.readouts is None and head.longest == 2


# Written


WRITTEN = {
    **EAGLE3,
    "Qwen3": {"layer": {"model_type": "qwen3"}},
    "some biases": {"layer": {"biases": ["self_attn.q_proj", "mlp.up_proj"]}},
    "part of each head rotated": {"layer": {"partial_rotary_factor": 0.5}},
    "P-EAGLE": {"parallel": True, "mask_token": 5, "num_hidden_layers": 2},
    "P-EAGLE with some biases": {
        "layer": {"biases": ["self_attn.q_proj", "mlp.up_proj"]},
        "parallel": True,
        "num_hidden_layers": 2,
    },
}


@pytest.mark.matrix
@pytest.mark.parametrize("variant", WRITTEN)
@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_an_exported_head_drafts_as_before(tmp_path, target, variant, trimmed, layout):
    decoder, flags = Decoder(target), dict(WRITTEN[variant])
    flags["layer"] = {**Eagle3Head.build(decoder).options["layer"], **flags.get("layer", {})}
    head = own_head(decoder, "eagle3", 0, trimmed=trimmed, feature_layers=[1, 2, 4], **flags)
    exported = export_eagle3(decoder, head, tmp_path / "out", target="target")
    assert exported.vocabulary == (VOCAB // 2 if trimmed else VOCAB)
    (again,) = load_heads(decoder, tmp_path / "out" / layout)
    assert again.feature_layers == (1, 2, 4)
    biases = {name for name in again.state_dict() if name.endswith("bias")}
    # Engines know one switch for the attention and one for the MLP.
    layers = head.options["num_hidden_layers"]
    assert len(biases) == (7 * layers if "some biases" in variant else 0)
    known = target_states(decoder, IDS[1:2], None, head.input_layers)
    for one, other in zip(
        *(draft_states(decoder, h, known, 3) for h in (head, again)), strict=True
    ):
        wide = [
            h.vocabulary(decoder).spread(h.logits(decoder, x), -torch.inf)
            for h, x in ((head, one), (again, other))
        ]
        torch.testing.assert_close(*wide)


@pytest.mark.parametrize("family", ["granite", "cohere"])
def test_the_scale_of_a_targets_logits_is_exported(tmp_path, family):
    spec = SelfSpecModel(model_of(family, "sdpa"))
    decoder = spec.decoder
    head = own_head(decoder, "eagle3", 0)
    export_eagle3(decoder, head, tmp_path / "out", target="target")
    (again,) = load_heads(decoder, tmp_path / "out" / "eagle3")
    assert again.readout is not None
    state = torch.randn(1, 2, decoder.config.hidden_size, dtype=decoder.dtype)
    torch.testing.assert_close(head.logits(decoder, state), again.logits(decoder, state))


@pytest.mark.parametrize(("kind", "longest"), [("dynamic", 32), ("default", 128)])
def test_frequencies_that_depend_on_a_heads_positions_stay(tmp_path, target, kind, longest):
    rope = {"rope_type": kind, "rope_theta": 10_000.0}
    rope |= {"factor": 2.0} if kind == "dynamic" else {}
    layer = Eagle3Head.build(Decoder(target)).options["layer"]
    layer = {**layer, "rope_parameters": rope, "max_position_embeddings": 32}
    head = own_head(Decoder(target), "eagle3", 0, layer=layer)
    export_eagle3(Decoder(target), head, tmp_path / "out", target="target")
    config = json.loads((tmp_path / "out/eagle3/config.json").read_text())
    assert config["max_position_embeddings"] == longest


def test_the_guide_beside_an_exported_head(tmp_path):
    spec = SelfSpecModel(tiny_llama())
    spec.save_pretrained(tmp_path / "target")
    head = own_head(spec.decoder, "eagle3", 0)
    save_heads([head], spec.decoder, tmp_path / "heads")
    out = tmp_path / "out"
    options = ["--model", tmp_path / "target", "--heads", tmp_path / "heads", "-k", 3, "--json"]
    told = call("export", "eagle3", out, *options[:2], code=1).stderr
    assert "no eagle3 head here (heads: none); give the folder of one with --heads" in told
    facts = one_object(call("export", "eagle3", out, *options))
    assert facts["vocabulary"] == VOCAB and facts["folder"] == str(out)
    guide = (out / "README.md").read_text()
    assert f'"model": "{out}/speculators", "num_speculative_tokens": 3' in guide
    assert f"--speculative-draft-model-path {out}/eagle3" in guide


def test_a_bias_of_the_targets_lm_head_cannot_be_exported(tmp_path):
    keys = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "intermediate_size": 48}
    decoder = Decoder(AutoModelForCausalLM.from_config(PhiConfig(**keys, **heads)))
    with pytest.raises(ValueError, match="LM head of PhiForCausalLM has a bias"):
        export_eagle3(decoder, Eagle3Head.build(decoder), tmp_path / "out", target="target")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "option", "message"),
    [
        ("eagle3", {"layer": 5}, "the option `layer` holds the keys of a config, got 5"),
        ("eagle3", {"vocabulary": -5}, r"vocabulary must be in \[0, 64\], got -5"),
        ("eagle3", {"embedding": 10}, "embedding must be 0, .* the target's 64 tokens, got 10"),
        ("dflash", {"windows": ["x"]}, "windows must hold whole numbers >= 1 or null, got 'x'"),
    ],
)
def test_an_option_that_cannot_be_is_named(target, kind, option, message):
    with pytest.raises(ValueError, match=message):
        build_head(Decoder(target), kind, 0, option)


def test_an_export_onto_a_full_disk_names_the_folder(tmp_path, target, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("selfspec.apps.export.eagle3.save_file", full)
    head = own_head(Decoder(target), "eagle3", 0)
    with pytest.raises(OSError, match=f"{tmp_path}/out could not be written: No space left"):
        export_eagle3(Decoder(target), head, tmp_path / "out", target="target")
    assert [*tmp_path.iterdir()] == []


# Files that do not fit


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"target_hidden_size": 48}, "hidden size 48, this one has 32"),
        ({"vocab_size": 100}, "vocabulary of 100 tokens and embeds 64, the target has 64"),
        ({"num_hidden_layers": 2}, "has 2 layers by num_hidden_layers .* tensors of 1"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, r"feature_layers must be in \[0, 4\]"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"fc.weight .* has shape \[32, 96\]"),
        *(
            ({key: said}, f"says {key} = {said}, .* say {held}")
            for key, said, held in [
                ("hidden_size", 48, WIDTH),
                ("intermediate_size", 41, INNER),
                ("num_key_value_heads", 4, KV_HEADS),
                ("num_attention_heads", 8, HEADS),
            ]
        ),
        ({"head_dim": 16}, "says num_attention_heads = 4, .* say 2"),
        ({"head_dim": 7}, "head_dim = 7, the head's q_proj and k_proj have 32 and 16 rows"),
        ({"draft_vocab_size": 23}, "says draft_vocab_size = 23, lm_head.weight .* has 24 rows"),
        ({"eagle_aux_hidden_state_layer_ids": "2,3"}, "list of whole numbers, got 2,3"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings .* whole number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps .* got 'small'"),
        ({"layer_types": ["sliding_attention"]}, "sliding window"),
        ({"hidden_act": "nonsense"}, "nonsense"),
        ({"eagle_config": "nonsense"}, "eagle_config in .* must hold keys, got .nonsense"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, target, config, message):
    folder = write_eagle3(tmp_path, eagle3_tensors(), eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    changed(folder, **config)
    with pytest.raises(ValueError, match=message):
        SelfSpecModel(target, heads=folder)


@pytest.mark.parametrize("name", ["fc.weight", "midlayer.self_attn.q_proj.weight", "norm.weight"])
def test_a_missing_tensor_is_named(tmp_path, target, name):
    tensors = eagle3_tensors()
    del tensors[name]
    folder = write_eagle3(tmp_path, tensors, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    with pytest.raises(ValueError, match=r"no head of a known format|lacks a tensor"):
        SelfSpecModel(target, heads=folder)


def test_other_formats_are_refused_by_name(tmp_path, target):
    write_speculators(tmp_path, eagle3_tensors(), speculators_model_type="xpress")
    with pytest.raises(ValueError, match="type 'xpress'; selfspec reads 'eagle3', 'peagle'"):
        SelfSpecModel(target, heads=tmp_path)
    write(tmp_path, {"architectures": ["BertModel"]}, {"a": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"no head of a known format.*BertModel"):
        SelfSpecModel(target, heads=tmp_path)


def test_a_truncated_file_and_a_draft_vocabulary_of_another_target(tmp_path, target):
    tensors = eagle3_tensors()
    folder = write_eagle3(tmp_path / "head", {**tensors, "d2t": torch.full((DRAFTS,), VOCAB)})
    changed(folder, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    with pytest.raises(ValueError, match=r"d2t .* maps 24 draft tokens to 64..87, which must be"):
        SelfSpecModel(target, heads=folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="may be truncated"):
        SelfSpecModel(target, heads=folder)


def test_a_pickle_is_converted_by_a_command_only(tmp_path, target):
    write_medusa(tmp_path / "theirs")
    folder = tmp_path / "pickled"
    folder.mkdir()
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    torch.save(tensors, folder / "medusa_lm_head.pt")
    shutil.copy(tmp_path / "theirs" / "config.json", folder)
    with pytest.raises(ValueError, match=r"is a pickle.*selfspec import heads"):
        SelfSpecModel(target, heads=folder)
    call("import", "heads", folder, tmp_path / "out")
    decoder = Decoder(target)
    (one,), (other,) = (load_heads(decoder, tmp_path / name) for name in ("theirs", "out"))
    assert all(torch.equal(w, other.state_dict()[name]) for name, w in one.state_dict().items())


class Runs:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return print, ("code of the file",)


def test_a_pickle_with_code_is_not_run(tmp_path, capsys):
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    torch.save({"a": Runs()}, folder / "pytorch_model.bin")
    done = call("import", "heads", folder, tmp_path / "out", code=1)
    assert "is not a file of plain tensors" in done.stderr
    assert "code of the file" not in done.output + capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["training_args.bin", "optimizer.pt", "rng_state.pth"])
def test_what_trainers_put_beside_a_pickle_is_left_out(tmp_path, name):
    folder = tmp_path / "pickled"
    tensors = write_medusa(folder)
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    torch.save({"state": {"step": 1}}, folder / name)
    call("import", "heads", folder, tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()


def sparse(path):
    torch.save({"fc.weight": torch.ones(2, 2).to_sparse()}, path)


@pytest.mark.parametrize("content", [b"", b"hello", sparse])
def test_a_damaged_pickle_is_named_in_one_line(tmp_path, content):
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(content) if isinstance(content, bytes) else content(path)
    done = call("import", "heads", tmp_path, tmp_path / "out", code=1)
    assert f"{path} " in done.stderr and "plain tensors" in done.stderr
