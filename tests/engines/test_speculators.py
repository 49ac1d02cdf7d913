"""An exported head computes in the speculators library what it computes here."""

from importlib.util import find_spec

import pytest
import torch
from transformers import AutoTokenizer

from selfspec import DEMO_MODEL
from selfspec.apps.export import export_dflash, export_eagle3
from selfspec.decoder import Decoder
from selfspec.decoder.checkpoints import load_causal_lm
from selfspec.heads import DFlashHead, Eagle3Head, draft_states, target_states

pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("default"),  # those of other people's code are no errors here
    pytest.mark.skipif(
        find_spec("speculators") is None,
        reason="speculators is not installed; `make test-engines` installs it",
    ),
]

# Both sides compute in float64 (norms and rotary embeddings are in float32 all the same), so that
# only the computation can differ: in float32 the order of sums alone moves a logit by 1e-5.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
STEPS = 3
FLAGS = {
    "plain": {},
    "norm before residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "norm of each stream": {"fc_norm": True},
    "normed output": {"norm_output": True},
}


@torch.no_grad()
def disturb(head):
    """Add noise to every parameter."""
    for parameter in head.parameters():
        parameter += 0.05 * torch.randn(parameter.shape)


def known_text(decoder, head):
    """The target's hidden states over a sentence."""
    text = "It was a dark and stormy night, and the rain fell in torrents."
    tokens = AutoTokenizer.from_pretrained(DEMO_MODEL)(text, return_tensors="pt").input_ids
    return target_states(decoder, tokens, None, head.input_layers)


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@torch.no_grad()
def test_logits_are_those_of_speculators(tmp_path, flags, kind):
    from speculators.models.eagle3 import (  # imports much
        Eagle3DraftModel,
        Eagle3SpeculatorConfig,
    )

    decoder = Decoder(load_causal_lm(DEMO_MODEL, dtype=torch.float64))
    layer = {**Eagle3Head.build(decoder).options["layer"], "model_type": kind}
    head = Eagle3Head.build(decoder, layer=layer, feature_layers=[4, 8, 16], **flags)
    disturb(head)
    head.trim(decoder, torch.arange(0, decoder.vocab_size, 3))
    export_eagle3(decoder, head, tmp_path / "out", target=str(DEMO_MODEL))
    folder = tmp_path / "out/speculators"
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(folder, config=config).double().eval()
    model.embed_tokens.weight.copy_(decoder.causal_lm.get_input_embeddings().weight)

    known = known_text(decoder, head)
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, output: found.append(output))
    streams = torch.cat([known.streams[layer] for layer in head.feature_layers], dim=-1)[:, :-1]
    tokens = known.tokens[:, 1:]
    model(streams, tokens, torch.zeros_like(tokens), ttt_steps=STEPS)
    for step, state in enumerate(draft_states(decoder, head, known, STEPS)):
        logits = head.logits(decoder, state)[:, step + 1 :]
        torch.testing.assert_close(found[step][:, : logits.shape[1]], logits, **CLOSE)


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@torch.no_grad()
def test_a_p_eagle_heads_logits_are_those_of_speculators(monkeypatch, tmp_path, flags, kind):
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle import core
    from speculators.models.peagle.config import PEagleSpeculatorConfig

    decoder = Decoder(load_causal_lm(DEMO_MODEL, dtype=torch.float64))
    layer = {**Eagle3Head.build(decoder).options["layer"], "model_type": kind}
    parallel = {"parallel": True, "mask_token": 9, "num_hidden_layers": 2}
    head = Eagle3Head.build(decoder, layer=layer, feature_layers=[4, 8, 16], **parallel, **flags)
    disturb(head)
    head.trim(decoder, torch.arange(0, decoder.vocab_size, 3))
    export_eagle3(decoder, head, tmp_path / "out", target=str(DEMO_MODEL))
    folder = tmp_path / "out/speculators"
    config = PEagleSpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = core.PEagleDraftModel.from_pretrained(folder, config=config).double().eval()
    model.embed_tokens.weight.copy_(decoder.causal_lm.get_input_embeddings().weight)

    known = known_text(decoder, head)
    pairs = known.tokens.shape[1] - 1
    anchors = torch.cat([torch.arange(pairs - depth) for depth in range(STEPS)])
    depths = torch.cat([torch.full((pairs - depth,), depth) for depth in range(STEPS)])
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **kwargs: (anchors, depths))
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, output: found.append(output[0]))
    streams = torch.cat([known.streams[layer] for layer in head.feature_layers], dim=-1)[:, :-1]
    model(
        streams,
        known.tokens[:, 1:],
        torch.zeros(1, pairs, dtype=torch.long),
        loss_mask=torch.ones(1, pairs),
        verifier_last_hidden_states=known.normed[:, :-1],
        num_depths=STEPS,
        loss_config=resolve_loss_config("kl_div", "eager"),
    )
    for step, state in enumerate(draft_states(decoder, head, known, STEPS)):
        logits = head.logits(decoder, state)[0, step + 1 :]
        torch.testing.assert_close(found[0][depths == step], logits, **CLOSE)


SPARK = {"confidence": True, "confidence_with_markov": True, "markov": 8}
DFLASH = {
    "plain": ("dflash", {}),
    "sliding": ("dflash", {"windows": [None, 4], "causal": [False, True]}),
    "sliding both ways": ("dflash", {"windows": [None, 4], "causal": [False, False]}),
    "vanilla": ("dspark", {**SPARK, "sample_from_anchor": True}),
    "gated": ("dspark", {**SPARK, "sample_from_anchor": True, "markov_type": "gated"}),
    "rnn": ("dspark", {**SPARK, "sample_from_anchor": True, "markov_type": "rnn"}),
    "rnn fill-in": ("dspark", {**SPARK, "markov_type": "rnn"}),
    "DFlash2": ("dflash2", {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 8}),
}


@pytest.mark.parametrize("name", DFLASH)
@torch.no_grad()
def test_a_dflash_heads_logits_are_those_of_speculators(tmp_path, name):
    algorithm, options = DFLASH[name]
    decoder = Decoder(load_causal_lm(DEMO_MODEL, dtype=torch.float64))
    shape = {"num_hidden_layers": 2, "block_size": 6, "mask_token": 9, "window_from_anchor": True}
    head = DFlashHead.build(decoder, feature_layers=[4, 8, 16], **shape, **options)
    disturb(head)
    if algorithm != "dflash2":
        head.trim(decoder, torch.arange(0, decoder.vocab_size, 3))
    exported = export_dflash(decoder, head, tmp_path / "out", target=str(DEMO_MODEL))
    assert exported.algorithm == algorithm
    model = load_speculator(tmp_path / "out", algorithm)
    model.embed_tokens.weight.copy_(decoder.causal_lm.get_input_embeddings().weight)
    if head.vocab_ids is None:
        model.lm_head.weight.copy_(decoder.lm_head_weight)

    known, anchor, block = known_text(decoder, head), 5, head.block_size
    tokens = known.tokens
    here = torch.zeros(tokens.shape)
    here[0, anchor] = 1
    streams = torch.cat([known.streams[layer] for layer in head.feature_layers], dim=-1)
    documents = torch.zeros_like(tokens)
    hidden, logits, *_ = model._backbone_forward(
        streams, tokens, here, known.normed, documents, max_anchors=1
    )
    first = head.first_row
    before = tokens[:, anchor : anchor + block - first]
    previous = torch.cat([before[:, :first], before], dim=1)
    if algorithm == "dspark":
        bias = model.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden)
        logits = logits + bias
        read = torch.cat([hidden, model.markov_head.prev_embeddings(previous)], dim=-1)
        odds = model.confidence_head(read)
    if algorithm == "dflash2":
        ids, scores = model.candidate_selector.select(logits, hidden, previous)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, ids, scores)
    for step, state in enumerate(draft_states(decoder, head, known, block)):
        place = slice(anchor + step, anchor + step + 1)
        own = head.draft_logits(decoder, state[:, place], step, tokens[:, place])
        row = slice(step + first, step + first + 1)
        torch.testing.assert_close(own, logits[:, row], **CLOSE)
        if algorithm == "dspark":
            mine = head.acceptance_odds(state[:, place], tokens[:, place])
            torch.testing.assert_close(mine, odds[:, row], **CLOSE)


def load_speculator(folder, algorithm):
    """A model of the speculators library, from its files."""
    from importlib import import_module

    core = import_module(f"speculators.models.{algorithm}.core")
    config = import_module(f"speculators.models.{algorithm}.config")
    name = {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash2"}[algorithm]
    read = getattr(config, f"{name}SpeculatorConfig").from_pretrained(folder)
    read.transformer_layer_config._attn_implementation = "eager"
    return getattr(core, f"{name}DraftModel").from_pretrained(folder, config=read).double().eval()
