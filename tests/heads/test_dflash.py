"""DFlash, DSpark and DFlash2 heads: read, and drafting what their publishers' code would draft."""

import pytest
import torch
from cli_tools import call, one_object
from conftest import VOCAB, greedy, prompt, tiny_llama
from dflash_tools import (
    BLOCK,
    MASK_TOKEN,
    QWEN3,
    STREAMS,
    Published,
    dflash2_tensors,
    dflash_block,
    dflash_logits,
    dflash_tensors,
    markov_tensors,
    write_deepspec,
    write_speculators,
    write_transformers,
    write_z_lab,
)
from head_tools import own_head, record
from published import DRAFTS, EPS, changed, layer_tensors, residual_streams
from safetensors.torch import load_file

from selfspec import SelfSpecModel
from selfspec.apps.export import export_dflash
from selfspec.decoder import CACHE, Decoder
from selfspec.heads import draft_states, load_heads, save_heads, target_states

IDS, MASK = prompt(4, 9, 6)
NEW = 14


@pytest.fixture(scope="module")
def target():
    return tiny_llama("sometimes", rms_norm_eps=EPS)


def spark(markov_type, trimmed=False, **options):
    drafts = DRAFTS if trimmed else VOCAB
    tensors = {**dflash_tensors(trimmed=trimmed), **markov_tensors(markov_type, drafts)}
    return Published(tensors, **options)


SLIDING = {"window": 3}
HEADS = {
    "plain": (write_speculators, Published(dflash_tensors())),
    "trimmed": (write_speculators, Published(dflash_tensors(trimmed=True))),
    "z-lab": (write_z_lab, Published(dflash_tensors(depth=3))),
    "transformers": (write_transformers, Published(dflash_tensors())),
    "from anchor": (write_speculators, Published(dflash_tensors(), from_anchor=True)),
    "sliding": (write_speculators, Published(dflash_tensors(), **SLIDING)),
    "sliding both ways": (write_speculators, Published(dflash_tensors(), causal=False, **SLIDING)),
    "z-lab sliding": (write_z_lab, Published(dflash_tensors(), of_anchor=False, **SLIDING)),
    "z-lab both ways": (
        write_z_lab,
        Published(dflash_tensors(), of_anchor=False, causal=False, **SLIDING),
    ),
    "vanilla": (write_speculators, spark("vanilla", trimmed=True, from_anchor=True)),
    "gated": (write_speculators, spark("gated", from_anchor=True)),
    "rnn": (write_speculators, spark("rnn", trimmed=True, from_anchor=True)),
    "rnn fill-in": (write_speculators, spark("rnn")),
    "DeepSpec": (write_deepspec, spark("vanilla", from_anchor=True)),
    "DFlash2": (write_speculators, Published({**dflash_tensors(), **dflash2_tensors(taps=3)})),
}
ALGORITHMS = {"DFlash2": "dflash2"} | dict.fromkeys(
    ["vanilla", "gated", "rnn", "rnn fill-in"], "dspark"
)


def written(folder, name):
    write, head = HEADS[name]
    return write(folder, head, *([ALGORITHMS[name]] if name in ALGORITHMS else []))


@pytest.mark.matrix
@pytest.mark.parametrize("drafter", ["early_exit", "tree"])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_drafts_what_its_paper_says(monkeypatch, tmp_path, target, name, drafter):
    head = HEADS[name][1]
    spec, seen = SelfSpecModel(target, heads=written(tmp_path, name)), record(monkeypatch)
    options = {"attention_mask": MASK, "max_new_tokens": NEW}
    text = spec.generate(IDS, draft={"num_draft_tokens": 3, "drafter": drafter}, **options)
    assert torch.equal(text, greedy(target, IDS, MASK, max_new_tokens=NEW))
    assert {reading.step for reading in seen} == {0, 1, 2}
    ids = spec.heads[0].vocab_ids
    lm_head = head.tensors.get("lm_head.weight", target.lm_head.weight.detach())
    for reading in seen[::10]:
        known = len(reading.text) - reading.step
        streams, _ = residual_streams(target, reading.text[: known - 1], STREAMS)
        embedding = target.model.embed_tokens.weight.detach()
        hidden = dflash_block(head, embedding, reading.text[known - 1], streams)
        expected = dflash_logits(head, hidden, lm_head, reading.text[known - 1 :].tolist())
        logits = reading.logits[0] if ids is None else reading.logits[0, ids]
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [2048, 3], ids=["all", "sliding"])
@torch.no_grad()
def test_blocks_are_those_of_transformers_own_model(tmp_path, target, window):
    muse = pytest.importorskip(
        "transformers.models.muse_glimmer_assistant", reason="transformers lacks DFlash models"
    )
    from transformers.cache_utils import DFlashCache

    keys = {key: value for key, value in QWEN3.items() if key not in ("model_type", "vocab_size")}
    config = muse.MuseGlimmerAssistantConfig(
        **{**keys, "num_hidden_layers": 3},
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        sliding_window=window,
        block_size=BLOCK,
        mask_token_id=MASK_TOKEN,
        target_layer_ids=[layers - 1 for layers in STREAMS],
        attn_implementation="eager",
    )
    model = muse.MuseGlimmerAssistantModel(config).double().eval()
    for parameter in model.parameters():
        parameter += 0.2 * torch.randn(parameter.shape)
    model.save_pretrained(tmp_path)
    (head,), text = load_heads(Decoder(target), tmp_path), IDS[1:2]
    known = target_states(Decoder(target), text, None, head.input_layers)
    steps = [*draft_states(Decoder(target), head, known, BLOCK - 1)]
    for anchor in range(1, text.shape[1] - BLOCK + 1):
        block = torch.tensor([[int(text[0, anchor]), *[MASK_TOKEN] * (BLOCK - 1)]])
        streams = torch.cat([known.streams[layer][:, :anchor] for layer in STREAMS], dim=-1)
        cache = DFlashCache(config=config)
        cache.set_previous_accepted_tokens(anchor)
        embeds, places = target.model.embed_tokens(block), torch.arange(anchor + BLOCK)[None]
        output = model(
            embeds, streams, torch.ones_like(places), places, **{CACHE: cache}
        ).last_hidden_state
        own = torch.cat([head(s)[:, anchor + n : anchor + n + 1] for n, s in enumerate(steps)], 1)
        torch.testing.assert_close(own, output[:, 1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_a_published_head_is_saved_in_our_format(tmp_path, target, name):
    decoder = Decoder(target)
    (head,) = load_heads(decoder, written(tmp_path / "theirs", name))
    save_heads([head], decoder, tmp_path / "ours")
    (again,) = load_heads(decoder, tmp_path / "ours")
    assert head.options == again.options
    assert all(torch.equal(w, again.state_dict()[name]) for name, w in head.state_dict().items())


def test_copies_of_the_targets_embeddings_and_lm_head_are_not_held_twice(tmp_path, target):
    copies = {
        "embed_tokens.weight": target.model.embed_tokens.weight.detach().half(),
        "lm_head.weight": target.lm_head.weight.detach().half(),
    }
    head = spark("vanilla", from_anchor=True)
    head.tensors |= copies
    (own,) = load_heads(Decoder(target), write_deepspec(tmp_path / "copies", head))
    assert own.embed_tokens is None and own.readout is None
    head.tensors |= {name: 2 * tensor for name, tensor in copies.items()}
    (own,) = load_heads(Decoder(target), write_deepspec(tmp_path / "others", head))
    assert own.embed_tokens is not None and own.readout is not None


def test_factors_of_z_lab(tmp_path, target):
    plain, decoder = Published(dflash_tensors()), Decoder(target)
    nested = {"output_multiplier": 0.5, "final_logit_softcapping": 3.0}
    (one,) = load_heads(decoder, write_z_lab(tmp_path / "one", plain))
    (other,) = load_heads(decoder, write_z_lab(tmp_path / "other", plain, **nested))
    state = torch.randn(1, 2, 32, dtype=torch.float64)
    expected = 3 * torch.tanh(one.logits(decoder, state) / 6)
    torch.testing.assert_close(other.logits(decoder, state), expected)
    (wide,) = load_heads(decoder, write_z_lab(tmp_path / "wide", plain, input_embedding_scale=3.0))
    token = torch.tensor([[5]])
    assert torch.equal(wide.embed(decoder, token), 3 * one.embed(decoder, token))


SLIDES = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6}
SWA = {"use_swa": True, "swa_window_size": 6}
BOTH, NONE = [True, True], [False, False]


@pytest.mark.parametrize(
    ("top", "nested", "windows", "causal"),
    [
        (SLIDES, {}, [None, 6], [False, True]),
        ({**SLIDES, "is_causal": False}, {}, [None, 6], NONE),
        (SLIDES, {"causal": False}, [None, 6], NONE),
        ({**SLIDES, "is_causal": True}, {"causal": False}, [None, 6], BOTH),
        ({"is_causal": True}, {}, [None, None], BOTH),
        ({}, {"causal": True}, [None, None], BOTH),
        ({}, SWA, [6, 6], NONE),
        ({"layer_types": ["full_attention"] * 2}, SWA, [6, 6], NONE),
        ({"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}, {}, [None, 6],
         [False, True]),
        ({"use_sliding_window": True, "sliding_window": 6}, {}, [None, None], NONE),
    ],
)  # fmt: skip
def test_which_layers_slide_and_see_only_rows_before(
    tmp_path, target, top, nested, windows, causal
):
    head = Published(dflash_tensors(), keys={"is_causal": None, **top})
    (own,) = load_heads(Decoder(target), write_z_lab(tmp_path, head, **nested))
    assert (own.options["windows"] or [None, None]) == windows
    assert (own.options["causal"] or NONE) == causal


@pytest.mark.parametrize(
    ("top", "nested"),
    [
        ({"block_size": BLOCK}, {"block_size": None}),
        ({"vocab_size": None}, {}),
        ({"dspark_noise_token_id": MASK_TOKEN}, {"mask_token_id": None}),
    ],
)
def test_a_null_in_a_config_is_an_absent_key(tmp_path, target, top, nested):
    decoder, tensors = Decoder(target), dflash_tensors()
    (plain,) = load_heads(decoder, write_z_lab(tmp_path / "a", Published(tensors)))
    folder = write_z_lab(tmp_path / "b", Published(tensors, keys=top), **nested)
    (other,) = load_heads(decoder, folder)
    assert other.options == plain.options


# Written

EXPORTED = [name for name in HEADS if "z-lab s" not in name and "z-lab b" not in name]


@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_head_drafts_as_before(tmp_path, target, name):
    decoder = Decoder(target)
    (head,) = load_heads(decoder, written(tmp_path / "theirs", name))
    exported = export_dflash(decoder, head, tmp_path / "out", target="target")
    assert exported.algorithm == ALGORITHMS.get(name, "dspark" if name == "DeepSpec" else "dflash")
    (again,) = load_heads(decoder, tmp_path / "out")
    known, last = target_states(decoder, IDS[1:2], None, head.input_layers), IDS[1:2, -1:]
    states = (draft_states(decoder, each, known, 3) for each in (head, again))
    for depth, pair in enumerate(zip(*states, strict=True)):
        one, other = (
            each.draft_logits(decoder, state[:, -1:], depth, last)
            for each, state in zip((head, again), pair, strict=True)
        )
        torch.testing.assert_close(one, other)


def test_a_trimmed_head_is_exported_with_its_rows_of_the_lm_head(tmp_path, target):
    decoder = Decoder(target)
    head = own_head(decoder, "dflash", 0, trimmed=True)
    assert export_dflash(decoder, head, tmp_path / "out", target="target").vocabulary == VOCAB // 2
    (again,) = load_heads(decoder, tmp_path / "out")
    state = torch.randn(1, 2, 32, dtype=torch.float64)
    torch.testing.assert_close(head.logits(decoder, state), again.logits(decoder, state))


def test_maps_without_a_bias_beside_others_are_exported_with_zeros(tmp_path, target):
    maps = [f"self_attn.{name}_proj" for name in "qkv"]
    biased = layer_tensors(1, qwen=True, biases=maps)
    own = {f"layers.{i}.{m}.bias": biased[f"{m}.bias"] + i for i in range(2) for m in maps}
    tensors = {**dflash_tensors(), **own}
    decoder = Decoder(target)
    (head,) = load_heads(decoder, write_z_lab(tmp_path / "a", Published(tensors)))
    export_dflash(decoder, head, tmp_path / "out", target="target")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert not written["layers.1.self_attn.o_proj.bias"].any()
    (again,) = load_heads(decoder, tmp_path / "out")
    assert len(again.options["layer"]["biases"]) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 3.0}, "no such DFlash head: softcap=3.0"),
        ({"windows": [4], "causal": [True]}, "window_from_anchor=False"),
        ({"causal": [True]}, r"causal=\[True\]"),
        ({"selector_rank": 4}, "conv_kernel_size=0"),
    ],
)
def test_what_speculators_lacks_is_not_exported(tmp_path, target, options, message):
    decoder = Decoder(target)
    head = own_head(decoder, "dflash", 0, **options)
    with pytest.raises(ValueError, match=message):
        export_dflash(decoder, head, tmp_path / "out", target="target")
    assert not (tmp_path / "out").exists()


def test_the_command_that_exports(tmp_path):
    spec = SelfSpecModel(tiny_llama())
    spec.save_pretrained(tmp_path / "target")
    save_heads([own_head(spec.decoder, "dflash", 0)], spec.decoder, tmp_path / "heads")
    options = ["--model", tmp_path / "target", "--json"]
    told = call("export", "dflash", tmp_path / "out", *options, code=1).stderr
    assert "no dflash head here (heads: none); give the folder of one with --heads" in told
    facts = one_object(
        call("export", "dflash", tmp_path / "out", *options, "--heads", tmp_path / "heads")
    )
    assert facts["algorithm"] == "dflash" and facts["num_draft_tokens"] == 7
    guide = (tmp_path / "out/README.md").read_text()
    assert f'"model": "{tmp_path}/out", "num_speculative_tokens": 7' in guide


# Files that do not fit


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"aux_hidden_state_layer_ids": [2, 4, 4]}, r"fc.weight .* \[32, 64\]; .* 3 hidden states"),
        ({"aux_hidden_state_layer_ids": [2, 5]}, r"feature_layers must be in \[0, 4\]"),
        ({"aux_hidden_state_layer_ids": None}, "lacks the ids of the hidden states"),
        ({"mask_token_id": None}, "lacks the mask id"),
        ({"mask_token_id": VOCAB}, r"mask_token must be in \[0, 63\], got 64"),
        ({"block_size": 1}, r"block_size must be in \[2, "),
        ({"transformer_layer_config": None}, "lacks transformer_layer_config"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, target, keys, message):
    changed(write_speculators(tmp_path, Published(dflash_tensors())), **keys)
    with pytest.raises(ValueError, match=message):
        SelfSpecModel(target, heads=tmp_path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_hidden_layers": 3}, "num_hidden_layers 2, its config says 3"),
        ({"vocab_size": 100}, "vocabulary of 100 tokens, the target has 64"),
        ({"architectures": ["Gemma4DSparkModel"]}, "is a Gemma4DSparkModel; .* Qwen3's"),
        ({"dflash_config": {"attention_sink_bias": True}}, "has attention_sink_bias"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window is None"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 2}, "names 1 layers"),
        ({"intermediate_size": 41}, "intermediate_size 40, its config says 41"),
    ],
)
def test_what_does_not_fit_in_z_labs_layout_is_named(tmp_path, target, keys, message):
    changed(write_z_lab(tmp_path, Published(dflash_tensors())), **keys)
    with pytest.raises(ValueError, match=message):
        SelfSpecModel(target, heads=tmp_path)


def test_a_pickled_mask_embedding_is_refused(tmp_path, target):
    folder = write_z_lab(tmp_path, Published(dflash_tensors()))
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"mask embedding of its own in mask_embedding\.pt"):
        SelfSpecModel(target, heads=folder)


@pytest.mark.parametrize("name", ["fc.weight", "layers.1.mlp.up_proj.weight", "norm.weight"])
def test_a_missing_tensor_is_named(tmp_path, target, name):
    tensors = dflash_tensors()
    del tensors[name]
    with pytest.raises(ValueError, match="lacks a tensor"):
        SelfSpecModel(target, heads=write_speculators(tmp_path, Published(tensors)))


def test_the_block_is_as_long_as_it_was_trained(tmp_path, target):
    spec = SelfSpecModel(target, heads=write_speculators(tmp_path, Published(dflash_tensors())))
    spec.generate(IDS, attention_mask=MASK, max_new_tokens=NEW, draft={"num_draft_tokens": 9})
    longest = max(len(step.drafted) for row in spec.last_trace.rows for step in row)
    assert longest == BLOCK - 1
    assert spec.heads[0].options["mask_token"] == MASK_TOKEN
