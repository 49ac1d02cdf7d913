"""Exits and heads draft in vLLM and in transformers; every greedy token is the target's own.

`make test-engines` runs this in an environment of its own. `make test` leaves it out, because vLLM
is gigabytes and decides itself which transformers it takes.
"""

import json
import re

import pytest
import torch
from conftest import ROOT
from engine_tools import (
    DRAFTS,
    NEW_TOKENS,
    VLLM,
    Written,
    asked,
    assisted,
    counted_as_vllm_does,
    serving,
)
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Qwen2Config
from typer.testing import CliRunner

from selfspec import DEMO_MODEL, DraftConfig, SelfSpecModel
from selfspec.apps.cli import commands
from selfspec.apps.export import export_dflash, export_eagle3
from selfspec.decoder import Decoder
from selfspec.decoder.checkpoints import load_causal_lm
from selfspec.heads import DFlashHead, Eagle3Head, draft_states, target_states

pytestmark = VLLM
pytest_plugins = ["engine_fixtures"]

EXIT = 4
PAGE = ROOT / "docs/serving.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The draft model that `selfspec export` makes of the demo target."""
    out = tmp_path_factory.mktemp("export") / "draft"
    options = ["--head", "block", "--exit-layer", str(EXIT), "-k", str(DRAFTS)]
    result = CliRunner().invoke(commands, ["export", "hf-draft", str(out), *options])
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture(scope="module")
def own(prompts):
    """What selfspec writes with the exit that was folded."""
    spec = SelfSpecModel.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    draft = DraftConfig(exit_layer=EXIT, head="block", num_draft_tokens=DRAFTS)
    written = Written([], 0, [0] * DRAFTS)
    for prompt in prompts:
        output = spec.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, draft=draft)
        stats = spec.last_stats
        accepted = [*stats.accepted_at, *[0] * DRAFTS][:DRAFTS]
        written = Written(
            [*written.tokens, output[0, len(prompt) :].tolist()],
            written.drafted + stats.drafted,
            [a + b for a, b in zip(written.accepted_at, accepted, strict=True)],
        )
    return written


def launch(folder):
    """The line for vLLM on the page beside the draft."""
    (line,) = launches(folder / "README.md")
    return line


def launch_in_parallel(folder):
    """The line for several devices in the guide to serving, with this target and draft."""
    (line,) = [line for line in launches(PAGE) if "--tensor-parallel-size 2" in line]
    return line.replace("path/to/target", str(DEMO_MODEL)).replace('"draft"', f'"{folder}"')


def launches(page):
    text = page.read_text(encoding="utf-8")
    return re.findall(r"```bash\n(vllm serve .*?)\n```", text, re.DOTALL)


# vLLM


@pytest.mark.parametrize("line", [launch, launch_in_parallel], ids=["alone", "tensor_parallel"])
def test_vllm_writes_what_the_target_writes(line, prompts, folder, plain, own, request):
    with serving(line(folder)) as address:
        written = asked(address, prompts)
    told = [f"{who.acceptance_rate:.3f} of {who.drafted} drafts" for who in (written, own)]
    way = request.node.callspec.id
    print("", f"accepted in vLLM, {way}: {told[0]}; in selfspec: {told[1]}", sep="\n")  # noqa: T201
    assert written.tokens == plain
    # An engine drafts the full number even where fewer tokens are left to write.
    assert written.acceptance_rate == pytest.approx(own.acceptance_rate, abs=0.02)


# Heads of their own: EAGLE-3, and multi-token prediction


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory):
    """What `selfspec export eagle3` makes of the demo target's head."""
    out = tmp_path_factory.mktemp("export") / "eagle3"
    result = CliRunner().invoke(commands, ["export", "eagle3", str(out), "-k", str(DRAFTS)])
    assert result.exit_code == 0, result.output
    return out


@pytest.mark.parametrize("layout", ["speculators", "eagle3"])
@pytest.mark.parametrize("devices", [1, 2])
def test_vllm_drafts_with_an_eagle3_head(eagle3, layout, devices, prompts, plain):
    line = launch(eagle3).replace(f"{eagle3}/speculators", f"{eagle3}/{layout}")
    with serving(f"{line} --tensor-parallel-size {devices}") as address:
        written = asked(address, prompts)
    spec = SelfSpecModel.from_pretrained(DEMO_MODEL, heads=eagle3 / layout, dtype=torch.float32)
    own = counted_as_vllm_does(spec, prompts, NEW_TOKENS, DRAFTS, exit_layer=0)
    print("", f"vLLM: {written[1:]}; selfspec: {own[1:]}", sep="\n")  # noqa: T201
    assert written.tokens == plain == own.tokens
    assert own.drafted == written.drafted
    assert own.accepted_at == written.accepted_at


# Heads that draft in one pass, fitted for a few steps so that some drafts are right

# DSpark is missing: vLLM's runner for CPUs refuses it.
ONE_PASS = {
    "P-EAGLE": (Eagle3Head, export_eagle3, {"parallel": True, "num_hidden_layers": 2}),
    "DFlash": (DFlashHead, export_dflash, {"num_hidden_layers": 2, "block_size": DRAFTS + 1}),
}


def fitted(decoder, head, texts, passes=4):
    """Fit a head to the very texts that it will draft, so that few steps are enough."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3)
    for tokens in texts * passes:
        text = torch.tensor([tokens])
        known = target_states(decoder, text, None, head.input_layers)
        probs, loss = decoder.unembed(known.normed).softmax(-1), 0.0
        for depth, state in enumerate(draft_states(decoder, head, known, DRAFTS)):
            logits = head.draft_logits(decoder, state, depth, text)[:, depth + 1 :]
            loss = loss + cross_entropy(logits.flatten(0, 1), probs[0, depth + 1 :])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.eval().requires_grad_(False)


@pytest.mark.parametrize("name", ONE_PASS)
def test_vllm_drafts_with_a_head_that_drafts_in_one_pass(tmp_path, name, prompts, plain):
    head_type, export, options = ONE_PASS[name]
    decoder = Decoder(load_causal_lm(DEMO_MODEL, dtype=torch.float32))
    decoder.causal_lm.requires_grad_(False)
    texts = [prompt + text for prompt, text in zip(prompts, plain, strict=True)]
    head = fitted(decoder, head_type.build(decoder, feature_layers=[4, 8, 12], **options), texts)
    out = tmp_path / "head"
    with torch.inference_mode():
        export(decoder, head, out, target=str(DEMO_MODEL))
    with serving(launch(out)) as address:
        written = asked(address, prompts)
    spec = SelfSpecModel(decoder.causal_lm, heads=[head])
    own = counted_as_vllm_does(spec, prompts, NEW_TOKENS, DRAFTS, exit_layer=0)
    print("", f"vLLM: {written[1:]}; selfspec: {own[1:]}", sep="\n")  # noqa: T201
    assert own.tokens == plain and written.tokens == plain
    assert min(written.accepted_at[:2]) > 0
    assert (written.drafted, written.accepted_at) == (own.drafted, own.accepted_at)


MIMO_CODE = """
from transformers import Qwen2Config, Qwen2ForCausalLM

class MiMoConfig(Qwen2Config):
    model_type = "mimo"

class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MiMoConfig
"""


@pytest.fixture(scope="module")
def mimo(tmp_path_factory):
    """A random checkpoint in MiMo's layout, whose code comes with it as in the published one."""
    folder = tmp_path_factory.mktemp("mimo")
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 6144}
    config = Qwen2Config(**shape, **heads, max_position_embeddings=512, bos_token_id=None)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # so that the layer's drafts are sometimes right
        model.model.layers[2].self_attn.o_proj.weight.mul_(0.1)
        model.model.layers[2].mlp.down_proj.weight.mul_(0.1)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    root, width = "model.mtp_layers.0.", shape["hidden_size"]
    last = "model.layers.2."
    layer = {n.replace(last, root): t.clone() for n, t in tensors.items() if n.startswith(last)}
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    around = {f"{root}{name}.weight": torch.ones(width) for name in norms}
    projection = torch.cat([0.2 * torch.eye(width), torch.eye(width)], dim=1)
    around[f"{root}input_proj.weight"] = projection  # the hidden state first, then the embedding
    save_file({**tensors, **layer, **around}, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    known = json.loads(path.read_text()) | {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "num_nextn_predict_layers": 1,
        "auto_map": {
            "AutoConfig": "modeling_mimo.MiMoConfig",
            "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
        },
    }
    path.write_text(json.dumps(known))
    (folder / "modeling_mimo.py").write_text(MIMO_CODE)
    return folder


def test_vllm_drafts_with_a_multi_token_prediction_layer(mimo, prompts):
    """vLLM's MiMo drafts one token a round."""
    settings = json.dumps({"method": "mtp", "num_speculative_tokens": 1})
    options = "--trust-remote-code --skip-tokenizer-init"
    with serving(f"vllm serve {mimo} {options} --speculative-config '{settings}'") as address:
        written = asked(address, prompts)
    spec = SelfSpecModel.from_pretrained(mimo, dtype=torch.float32, trust_remote_code=True)
    own = counted_as_vllm_does(spec, prompts, NEW_TOKENS, 1, exit_layer=0)
    plain = [
        spec.model.generate(torch.tensor([p]), max_new_tokens=NEW_TOKENS, do_sample=False)[0]
        for p in prompts
    ]
    print("", f"vLLM: {written[1:]}; selfspec: {own[1:]}", sep="\n")  # noqa: T201
    assert own.tokens == [text[len(p) :].tolist() for p, text in zip(prompts, plain, strict=True)]
    assert written.tokens == own.tokens
    assert written.acceptance_rate == pytest.approx(own.acceptance_rate, abs=0.02)


# transformers and selfspec


def test_an_assistant_writes_what_the_target_writes(prompts, folder, plain):
    assert assisted(prompts, folder) == plain


def test_selfspec_writes_what_the_target_writes(plain, own):
    assert own.tokens == plain
