"""The first layers of a target draft inside vLLM, on its own KV blocks.

Greedy tokens equal those of the target alone, drafts equal those of selfspec, and nothing is held
twice. Tiny targets run in a process of their own (`run_vllm.py`), the demo target is served.
"""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import torch
from conftest import tiny_llama
from distribution_tools import exact, p_values
from engine_tools import DRAFTS, NEW_TOKENS, VLLM, asked, counted_as_vllm_does, serving
from head_tools import own_head
from law_tools import p_value
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from selfspec import DEMO_MODEL, SelfSpecModel
from selfspec.heads import save_heads

pytestmark = VLLM
pytest_plugins = ["engine_fixtures"]

SCRIPT = Path(__file__).with_name("run_vllm.py")
DEPTH = 4
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# vLLM runs OLMo 2 with the layers of transformers, the others with its own.
FAMILIES = ("gemma", "glm4", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "stablelm")
PROMPTS = [[1, 5, 9, 100, 30], [7, 8, 9], [3, 77, 15, 200, 9, 12, 13, 14]]


def line(draft_model, options=""):
    """The command of the guide to serving, with this draft model."""
    settings = {"method": "draft_model", "model": draft_model, "num_speculative_tokens": DRAFTS}
    return f"vllm serve {DEMO_MODEL} --speculative-config '{json.dumps(settings)}' {options}"


@pytest.fixture(scope="module")
def demo():
    return SelfSpecModel.from_pretrained(DEMO_MODEL, dtype=torch.float32)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("kind", "exit_layer"),
    [("shared", 2), ("shared", 4), ("shared", 8), ("lens", 4), ("block", 4), ("fused", 0)],
)
def test_the_first_layers_draft(kind, exit_layer, devices, prompts, plain, demo):
    command = line(f"selfspec:@{kind}:{exit_layer}", f"--tensor-parallel-size {devices}")
    with serving(command) as address:
        written = asked(address, prompts)
    draft = {"head": kind, "exit_layer": exit_layer}
    own = counted_as_vllm_does(demo, prompts, NEW_TOKENS, DRAFTS, **draft)
    print("", f"vLLM: {written[1:]}; selfspec: {own[1:]}", sep="\n")  # noqa: T201
    assert written.tokens == plain == own.tokens
    for here, there in zip(written.accepted_at, own.accepted_at, strict=True):
        assert DRAFTS * here / written.drafted == pytest.approx(
            DRAFTS * there / own.drafted, abs=0.02
        )


@pytest.mark.parametrize("draft_model", ["selfspec:@shared:4", "selfspec:@block:4", "selfspec:"])
def test_requests_wait_return_and_find_their_prefixes(draft_model, prompts, plain):
    """In a cache that is too small, with prefill in pieces, and every prompt asked for twice."""
    small = "--kv-cache-memory-bytes 24000000 --max-num-batched-tokens 64"
    longest = max(range(len(prompts)), key=lambda number: len(prompts[number]))
    with serving(line(draft_model, f"{small} --enable-prefix-caching")) as address:
        first, second = asked(address, prompts), asked(address, prompts)
        # Alone, its blocks are still there when it is asked for again.
        alone = [asked(address, [prompts[longest]]) for _ in range(2)]
        hits, preempted = (
            counter(address, f"vllm:{name}_total")
            for name in ("prefix_cache_hits", "num_preemptions")
        )
    assert first.tokens == second.tokens == plain
    assert [answer.tokens for answer in alone] == 2 * [[plain[longest]]]
    assert hits > 0
    assert preempted > 0


def counter(address, name):
    with urlopen(f"{address}/metrics") as answer:
        (value,) = re.findall(rf"^{name}\S* (\S+)$", answer.read().decode(), re.MULTILINE)
    return float(value)


def test_requests_of_many_sorts_at_once(prompts, plain):
    """Stop strings, lengths, penalties and streams in one batch, each as without drafts."""
    odd = [
        {"max_tokens": 5},
        {"stop": [" the"]},
        {"repetition_penalty": 1.3},
        {"logprobs": 2},
        {"min_tokens": 20, "presence_penalty": 0.5},
        {"stream": True},
    ]
    answers = []
    for command in (f"vllm serve {DEMO_MODEL}", line("selfspec:")):
        with serving(command) as address, ThreadPoolExecutor(len(odd)) as pool:
            asked_at_once = pool.map(completed, [address] * len(odd), prompts, odd)
            answers.append(list(asked_at_once))
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == len(odd)


def completed(address, prompt, more):
    """The text of a completion, put together from its pieces if it is streamed."""
    options = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    body = json.dumps(options | more).encode()
    with urlopen(Request(f"{address}/v1/completions", body, headers)) as answer:
        if not more.get("stream"):
            return json.load(answer)["choices"][0]["text"]
        pieces = [row[6:] for row in answer.read().decode().splitlines() if row.startswith("data:")]
    return "".join(json.loads(piece)["choices"][0]["text"] for piece in pieces[:-1])


# Tiny targets


def run(folder, draft_model, prompts=PROMPTS, drafts=3, *, runner=1, **sampling):
    """What `run_vllm.py` prints."""
    words = [str(folder), draft_model, str(drafts), json.dumps(prompts), json.dumps(sampling)]
    command = [sys.executable, str(SCRIPT), *words]
    chosen = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": str(runner - 1)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, env=chosen)
    results = re.findall(r"^RESULT (.*)$", ended.stdout, re.MULTILINE)
    assert results, ended.stderr[-3000:]
    return json.loads(results[0])


def family(name, folder, loud=DEPTH // 2):
    """A tiny random checkpoint whose layers above the first few add little to what these write."""
    torch.manual_seed(0)
    own = {"sliding_window": None} if name in ("mistral", "mixtral", "phi3") else {}
    own |= {"num_local_experts": 4} if name == "mixtral" else {}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**SHAPE, **own)).float()
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 3 if weight.ndim > 1 else 1
        for weight in model.model.layers[loud:].parameters():
            weight *= 0.3 if weight.ndim > 1 else 1
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_every_architecture(name, tmp_path):
    folder = family(name, tmp_path)
    alone, drafted = (run(folder, draft_model) for draft_model in ("", "selfspec:@2"))
    spec = SelfSpecModel.from_pretrained(folder, dtype=torch.float32)
    own = counted_as_vllm_does(spec, PROMPTS, 32, 3, exit_layer=2)
    assert drafted["tokens"] == alone["tokens"] == own.tokens
    assert drafted["drafted"] == own.drafted
    assert drafted["accepted_at"] == own.accepted_at
    assert sum(own.accepted_at) > 0
    assert drafted["blocks"] == alone["blocks"]
    assert drafted["added"] == 0


def with_head(kind, exit_layer, tmp_path, trimmed=False, name="qwen3"):
    """A target, a head for it, the draft model that names it, and what selfspec writes with it."""
    folder = family(name, tmp_path / "target", loud=min(exit_layer, DEPTH // 2))
    spec = SelfSpecModel.from_pretrained(folder, dtype=torch.float32)
    decoder = spec.decoder
    head = own_head(decoder, kind, exit_layer, trimmed=trimmed, noise=0.02)
    save_heads([head], decoder, tmp_path / "heads")
    spec = SelfSpecModel.from_pretrained(folder, tmp_path / "heads", dtype=torch.float32)
    own = counted_as_vllm_does(spec, PROMPTS, 32, 3, exit_layer=exit_layer, head=kind)
    assert sum(own.accepted_at) > 0
    return folder, head, f"selfspec:{tmp_path / 'heads'}", own


@pytest.mark.parametrize("trimmed", [False, True], ids=["whole", "trimmed"])
@pytest.mark.parametrize(
    ("kind", "exit_layer"),
    [("shared", 1), ("lens", 2), ("lora", 2), ("block", 2), ("fused", 0), ("fused", 1)],
)
def test_every_kind_of_head(kind, exit_layer, trimmed, tmp_path):
    folder, head, draft_model, own = with_head(kind, exit_layer, tmp_path, trimmed)
    alone, drafted = run(folder, ""), run(folder, draft_model)
    assert drafted["tokens"] == alone["tokens"] == own.tokens
    assert drafted["drafted"] == own.drafted
    assert drafted["accepted_at"] == own.accepted_at
    layers = DEPTH if head.layer is None else DEPTH + 1
    assert drafted["blocks"] == alone["blocks"] * DEPTH // layers
    if head.layer is None:  # on a CPU, vLLM keeps the weights of a layer in a form of its own
        assert drafted["added"] == sum(weight.numel() for weight in head.parameters())


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton, which this runner needs")
@pytest.mark.parametrize(
    ("kind", "exit_layer"), [("shared", 1), ("lora", 2), ("block", 2), ("fused", 0), ("fused", 1)]
)
def test_the_second_model_runner_drafts_the_same(kind, exit_layer, tmp_path):
    """On a CPU, with its Triton kernels interpreted."""
    folder, head, draft_model, own = with_head(kind, exit_layer, tmp_path)
    drafted = run(folder, draft_model, runner=2)
    assert drafted["tokens"] == own.tokens
    assert drafted["drafted"] == own.drafted
    assert drafted["accepted_at"] == own.accepted_at
    assert head.layer is not None or drafted["added"] == sum(w.numel() for w in head.parameters())


def test_fewer_drafts_under_load(tmp_path):
    """By vLLM's schedule: inclusive ranges of requests, and drafts for each."""
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 8, 1]]}
    folder = family("qwen3", tmp_path)
    alone, always = run(folder, ""), run(folder, "selfspec:@2")
    scheduled = run(folder, "selfspec:@2", speculative=schedule)
    assert alone["tokens"] == always["tokens"] == scheduled["tokens"]
    rounds = 3 * 32 - sum(scheduled["accepted_at"])
    assert scheduled["drafted"] < 2 * rounds
    one = run(folder, "selfspec:@2", PROMPTS[:1], speculative=schedule)
    assert one["tokens"] == alone["tokens"][:1]
    assert one["drafted"] % 3 == 0 < one["accepted_at"][2]


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_sampled_tokens_follow_the_target(method, tmp_path):
    """Over many requests; how the drafts are drawn changes nothing."""
    shape = {"vocab_size": 12, "hidden_size": 128, "spread": 0.15}
    model = tiny_llama("sometimes", dtype=torch.float32, **shape)
    model.save_pretrained(tmp_path)
    warped = {"temperature": 1.2, "top_k": 0}
    requests = [[7, 7, 1]] * 6000
    drawn = {"draft_sample_method": method}
    written = run(tmp_path, "selfspec:@2", requests, 2, max_tokens=4, speculative=drawn, **warped)
    assert 0.2 < sum(written["accepted_at"]) / written["drafted"] < 0.97
    cells = torch.tensor(written["tokens"]) @ 12 ** torch.arange(3, -1, -1)
    counts = torch.bincount(cells, minlength=12**4).double().view([12] * 4)
    assert min(p_values(counts, exact(model, warped))) > 1e-3
    assert p_value(counts.sum((1, 2, 3)), torch.full((12,), 1 / 12)) < 1e-3  # it would see a fault


# Mistakes


@pytest.mark.parametrize(
    ("draft_model", "says"),
    [
        ("selfspec:@9", r"exit_layer must be in \[1, 3\], got 9"),
        ("selfspec:@block:2", r"no 'block' head was fitted at exit_layer 2"),
        ("selfspec:nowhere@2", r"no folder nowhere"),
        ("selfspec:@lense:2", r"unknown head kind: 'lense'"),
        (f"selfspec:{DEMO_MODEL}", r"were fitted to another target"),
    ],
)
def test_a_mistake_is_told_at_the_start(draft_model, says, tmp_path):
    tiny_llama("sometimes", dtype=torch.float32, hidden_size=128).save_pretrained(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=says):
        configured(tmp_path, draft_model)


def test_a_head_that_vllm_has_a_method_for_is_refused():
    with pytest.raises(ValueError, match="of the kind eagle3 do not draft in place"):
        configured(DEMO_MODEL, "selfspec:@eagle3:0")


def test_heads_of_the_same_shape_and_other_weights_are_refused(tmp_path):
    for name, seed in (("target", 0), ("other", 1)):
        model = tiny_llama(dtype=torch.float32, hidden_size=128, seed=seed)
        model.save_pretrained(tmp_path / name)
        decoder = SelfSpecModel(model).decoder
        save_heads([own_head(decoder, "lens", 2)], decoder, tmp_path / f"heads of {name}")
    configured(tmp_path / "target", f"selfspec:{tmp_path / 'heads of target'}")
    with pytest.raises(ValueError, match="the weights differ"):
        configured(tmp_path / "target", f"selfspec:{tmp_path / 'heads of other'}")


def test_an_untried_vllm_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    tiny_llama("sometimes", dtype=torch.float32, hidden_size=128).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"inside vLLM 0\.32, this is 0\.99\.0"):
        configured(tmp_path, "selfspec:@2")


def configured(folder, draft_model):
    """The engine's config; what `vllm serve` makes first."""
    from vllm.engine.arg_utils import EngineArgs

    settings = {"method": "draft_model", "model": draft_model, "num_speculative_tokens": 2}
    arguments = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", speculative_config=settings
    )
    return arguments.create_engine_config()
