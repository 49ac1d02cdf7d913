"""Compiled layers: the same text, a bounded number of programs, and a way back."""

import json
import logging

import pytest
import torch
from cli_tools import PROMPT, call
from conftest import equal_to_generate, prompt, tiny_llama
from families import VOCAB, build
from head_tools import own_head
from peft import LoraConfig, get_peft_model
from torch._dynamo.testing import CompileCounter

from selfspec import DraftConfig, SelfSpecModel
from selfspec.decoder import Decoder
from selfspec.decoder.kernels import compiled

DRAFTS = (
    "none",
    {"exit_layer": 2, "num_draft_tokens": 1},
    {"exit_layer": 2, "num_draft_tokens": 4},
    "prompt_lookup",
)


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch):
    # pytest would format all that torch traces.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def programs(monkeypatch) -> CompileCounter:
    """Counts what is compiled; runs it as traced, without a C++ compiler."""
    counter = CompileCounter()
    monkeypatch.setattr(compiled, "BACKEND", counter)
    return counter


def writes_the_same(spec, *lengths, drafts=DRAFTS, vocab=VOCAB, new_tokens=14):
    ids, mask = (part.to(spec.decoder.device) for part in prompt(*lengths, vocab=vocab))
    equal_to_generate(spec, ids, mask, drafts, max_new_tokens=new_tokens)


def is_compiled(spec):
    return spec.decoder.gates.compiled.problem is None


# Sliding windows beside full attention; arguments by place, learned positions.
@pytest.mark.slow
@pytest.mark.parametrize(("family", "attention"), [("qwen3", "sdpa"), ("gpt2", "eager")])
def test_one_row_or_several_take_few_programs(family, attention, programs):
    spec = SelfSpecModel(build(family, attention), kernels="compiled")
    writes_the_same(spec, 6)
    writes_the_same(spec, 9, 5, 2)
    writes_the_same(spec, 3, 8, 4, 7, 5)
    writes_the_same(spec, 11, new_tokens=30)
    writes_the_same(spec, 12, 2, 6, 2, new_tokens=30)
    assert 2 <= programs.frame_count <= 10
    assert is_compiled(spec)


def test_a_heads_own_layer_is_compiled(programs, monkeypatch):
    target = tiny_llama("sometimes", dtype=torch.float32)
    head = own_head(Decoder(target), "fused", 0)
    spec = SelfSpecModel(target, heads=[head], kernels="compiled")
    ran = []
    monkeypatch.setattr(compiled.CompiledLayers, "_is_plain", lambda self, x: not ran.append(x))
    draft = {"head": "fused", "exit_layer": 0, "num_draft_tokens": 3}
    writes_the_same(spec, 6, drafts=(draft,), vocab=64)
    assert head.layer in ran and is_compiled(spec)


def test_the_draft_model_is_compiled_too(programs):
    other = tiny_llama("always", dtype=torch.float32, seed=3)
    spec = SelfSpecModel(tiny_llama(dtype=torch.float32), draft_model=other, kernels="compiled")
    small = spec.engine.draft_models.chosen(DraftConfig()).decoder
    assert small.gates.compiled is not None


def test_an_assistant_is_compiled_once_and_not_in_every_call(programs):
    other = tiny_llama("always", dtype=torch.float32, seed=3)
    spec = SelfSpecModel(tiny_llama(dtype=torch.float32), kernels="compiled")
    options = {"max_new_tokens": 6, "assistant_model": other}
    equal_to_generate(spec, prompt(6)[0], **options)
    compiled_once = programs.frame_count
    equal_to_generate(spec, prompt(6)[0], **options)
    assert programs.frame_count == compiled_once


def test_adapters_are_compiled(programs):
    config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    adapted = get_peft_model(tiny_llama("always", dtype=torch.float32), config).eval()
    spec = SelfSpecModel(adapted, kernels="compiled")
    writes_the_same(spec, 6, drafts=DRAFTS[:1], vocab=64)
    assert is_compiled(spec) and programs.frame_count > 0


@pytest.mark.slow
def test_the_command_line_compiles(programs, folder):
    options = ("--model", folder, "--draft", "exit_layer=2", "--max-new-tokens", "6", "--json")
    results = [
        call("generate", PROMPT, *options, *more) for more in ((), ("--kernels", "compiled"))
    ]
    plain, text = (json.loads(result.stdout)["results"][0]["text"] for result in results)
    assert text == plain and programs.frame_count > 0


def test_layers_that_are_skipped_in_part(programs):
    spec = SelfSpecModel(tiny_llama("sometimes", dtype=torch.float32), kernels="compiled")
    draft = {"drafter": "skip_sublayers", "skip": {"attention": [1], "mlp": [2]}}
    writes_the_same(spec, 6, drafts=(draft,), vocab=64)
    assert is_compiled(spec)


# The way back


def test_an_error_of_the_compiler_is_told_once(monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no working C++ compiler")

    monkeypatch.setattr(compiled, "BACKEND", broken)
    spec = SelfSpecModel(build("llama", "sdpa"), kernels="compiled")
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM are not compiled .*C\+\+") as told:
        writes_the_same(spec, 6)
        writes_the_same(spec, 9, 5)
    assert len(told) == 1


def test_more_programs_than_allowed_are_told(programs, monkeypatch):
    monkeypatch.setattr(compiled, "PROGRAMS", 1)
    spec = SelfSpecModel(build("llama", "sdpa"), kernels="compiled")
    with pytest.warns(UserWarning, match="not compiled .*Limit"):
        writes_the_same(spec, 6)
    assert programs.frame_count == 1


def test_hooks_of_between_calls_are_called(programs):
    spec, drafts = SelfSpecModel(build("llama", "sdpa"), kernels="compiled"), DRAFTS[::2]
    writes_the_same(spec, 6, drafts=drafts)
    seen = []
    mlp = spec.decoder.layers[3].mlp
    mlp.register_forward_hook(lambda *call: seen.append(call[1][0].shape[1]))
    with pytest.warns(UserWarning, match=r"hooks on LlamaDecoderLayer\.mlp"):
        writes_the_same(spec, 6, drafts=drafts)
    assert 1 in seen and 5 in seen  # passes of rounds, not only the prefill


def test_tables_of_masks_are_not_compiled(programs):
    with pytest.warns(UserWarning, match="tables of its own"):
        spec = SelfSpecModel(build("gpt_neo", "eager"), kernels="compiled")
    writes_the_same(spec, 6)
    assert programs.frame_count == 0


# By the real compiler


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("gemma2", "eager")])
@pytest.mark.parametrize("lengths", [(6,), (9, 5, 2)])
def test_compiled_float32_equals_the_models_own(family, attention, lengths):
    spec = SelfSpecModel(build(family, attention), kernels="compiled")
    writes_the_same(spec, *lengths)
    assert is_compiled(spec)
