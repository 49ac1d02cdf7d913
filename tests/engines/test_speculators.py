"""An exported EAGLE-3 head computes in the speculators library what it computes here."""

from importlib.util import find_spec

import pytest
import torch
from transformers import AutoTokenizer

from selfspec import DEMO_MODEL
from selfspec.decoder import Decoder
from selfspec.decoder.checkpoints import load_causal_lm
from selfspec.export import export_eagle3
from selfspec.heads import Eagle3Head, draft_states, target_states

pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("default"),  # those of other people's code are no errors here
    pytest.mark.skipif(
        find_spec("speculators") is None,
        reason="speculators is not installed; `make test-engines` installs it",
    ),
]

STEPS = 3
FLAGS = {
    "plain": {},
    "norm before residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "norm of each stream": {"fc_norm": True},
    "normed output": {"norm_output": True},
}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@torch.no_grad()
def test_logits_are_those_of_speculators(tmp_path, flags, kind):
    from speculators.models.eagle3 import (  # imports much
        Eagle3DraftModel,
        Eagle3SpeculatorConfig,
    )

    decoder = Decoder(load_causal_lm(DEMO_MODEL, dtype=torch.float32))
    layer = {**Eagle3Head.build(decoder).options["layer"], "model_type": kind}
    head = Eagle3Head.build(decoder, layer=layer, feature_layers=[4, 8, 16], **flags)
    for parameter in head.parameters():
        parameter += 0.05 * torch.randn(parameter.shape)
    head.trim(decoder, torch.arange(0, decoder.vocab_size, 3))
    export_eagle3(decoder, head, tmp_path / "out", target=str(DEMO_MODEL))
    folder = tmp_path / "out/speculators"
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(folder, config=config).eval()
    model.embed_tokens.weight.copy_(decoder.causal_lm.get_input_embeddings().weight)

    text = "It was a dark and stormy night, and the rain fell in torrents."
    tokens = AutoTokenizer.from_pretrained(DEMO_MODEL)(text, return_tensors="pt").input_ids
    known = target_states(decoder, tokens, None, head.input_layers)
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, output: found.append(output))
    streams = torch.cat([known.streams[layer] for layer in head.feature_layers], dim=-1)[:, :-1]
    model(streams, tokens[:, 1:], torch.zeros_like(tokens[:, 1:]), ttt_steps=STEPS)
    for step, state in enumerate(draft_states(decoder, head, known, STEPS)):
        logits = head.logits(decoder, state)[:, step + 1 :]
        torch.testing.assert_close(found[step][:, : logits.shape[1]], logits, rtol=1e-3, atol=1e-3)
