"""Nothing is left on the model, whatever passes; and what cannot be run is refused at once."""

import sys
import threading
import warnings
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from conftest import (
    BIASES_IN_BLOCKS,
    EXIT,
    TINY,
    VOCAB,
    equal_to_generate,
    gates,
    greedy,
    paused,
    prompt,
    tiny_llama,
)
from peft import (
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
)
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    Cache,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    KimiLinearConfig,
    Lfm2Config,
    LlamaModel,
    LogitsProcessor,
    LogitsProcessorList,
    MambaConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation.streamers import BaseStreamer

from selfspec import DraftConfig, SelfSpecModel
from selfspec.decoder.gates import Shadows

DRAFT = DraftConfig(exit_layer=EXIT, num_draft_tokens=4)
IDS, MASK = prompt(4, 7)


class Nth:
    """Raises at its n-th call."""

    def __init__(self, n, error):
        self.left, self.error = iter(range(n - 1)), error

    def tick(self):
        if next(self.left, None) is None:
            raise self.error


class Processor(Nth, LogitsProcessor):
    def __call__(self, input_ids, scores):
        self.tick()
        return scores


class Criterion(Nth, StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        self.tick()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Streamer(Nth, BaseStreamer):
    def put(self, value):
        self.tick()

    def end(self):
        self.tick()


def state(model):
    """Every attribute, hook and buffer that a pass could leave behind."""
    return {
        name: (set(module.__dict__), {k: id(v) for k, v in module._buffers.items()})
        for name, module in model.named_modules()
    }


def snapshot(model):
    """Text, scores and logits of plain decoding and of one plain pass, and the modules' state."""
    out = greedy(
        model, IDS, MASK, max_new_tokens=8, return_dict_in_generate=True, output_logits=True
    )
    return out.sequences, torch.stack(out.logits), model(IDS, attention_mask=MASK).logits


def unchanged(model, before, attributes):
    assert gates(model) == []
    assert state(model) == attributes
    for now, then in zip(snapshot(model), before, strict=True):
        assert torch.equal(now, then)  # to the bit


@pytest.fixture
def model():
    return tiny_llama("sometimes")


# Exceptions


@pytest.mark.matrix
@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["error", "^C"])
@pytest.mark.parametrize("call", [1, 2, 5, 12])
@pytest.mark.parametrize("where", ["processor", "criterion", "streamer"])
def test_an_exception_of_the_callers_code_leaves_the_model_as_it_was(model, where, call, error):
    before, attributes = snapshot(model), state(model)
    given = {
        "processor": ("logits_processor", LogitsProcessorList([Processor(call, error)])),
        "criterion": ("stopping_criteria", StoppingCriteriaList([Criterion(call, error)])),
        "streamer": ("streamer", Streamer(call, error)),
    }
    name, value = given[where]
    spec = SelfSpecModel(model)
    with pytest.raises(type(error)):
        spec.generate(IDS, attention_mask=MASK, max_new_tokens=20, draft=DRAFT, **{name: value})
    unchanged(model, before, attributes)
    again = spec.generate(IDS, attention_mask=MASK, max_new_tokens=8, draft=DRAFT)
    assert torch.equal(again, before[0])


@pytest.mark.matrix
@pytest.mark.parametrize("call", [1, 2, 3, 9])
@pytest.mark.parametrize("place", ["embed", "shallow", "deep", "norm", "head"])
def test_ctrl_c_inside_the_model_leaves_it_as_it_was(model, place, call):
    before, attributes = snapshot(model), state(model)
    module = {
        "embed": model.model.embed_tokens,
        "shallow": model.model.layers[0].mlp,
        "deep": model.model.layers[3].self_attn,
        "norm": model.model.norm,
        "head": model.lm_head,
    }[place]
    nth = Nth(call, KeyboardInterrupt())
    handle = module.register_forward_hook(lambda *_: nth.tick())
    spec = SelfSpecModel(model)
    with pytest.raises(KeyboardInterrupt):
        spec.generate(IDS, attention_mask=MASK, max_new_tokens=40, draft=DRAFT)
    handle.remove()
    unchanged(model, before, attributes)
    again = spec.generate(IDS, attention_mask=MASK, max_new_tokens=8, draft=DRAFT)
    assert torch.equal(again, before[0])


@contextmanager
def interrupted(function, line):
    """Ctrl-C before the n-th line that runs inside a function."""
    nth = Nth(line, KeyboardInterrupt())

    def trace(frame, event, _):
        if event == "line":
            nth.tick()
        return trace

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: trace if frame.f_code is function.__code__ else None)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("line", range(1, 16))
def test_ctrl_c_while_the_model_is_put_back_leaves_it_as_it_was(model, line):
    before, attributes = snapshot(model), state(model)
    spec = SelfSpecModel(model)
    with pytest.raises(KeyboardInterrupt), interrupted(Shadows.undo, line):
        spec.generate(IDS, attention_mask=MASK, max_new_tokens=2, draft=DRAFT)
    unchanged(model, before, attributes)


def test_a_call_that_ends_well_leaves_the_model_as_it_was(model):
    before, attributes = snapshot(model), state(model)
    config = model.config.to_dict(), model.generation_config.to_dict()
    spec = SelfSpecModel(model)
    assert state(model) == attributes  # wrapping alone changes nothing either
    spec.generate(IDS, attention_mask=MASK, max_new_tokens=8, draft=DRAFT)
    unchanged(model, before, attributes)
    assert (model.config.to_dict(), model.generation_config.to_dict()) == config


def test_a_model_with_causal_tables_of_its_own_gets_them_back():
    torch.manual_seed(0)
    config = GPTNeoConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=5,
        max_position_embeddings=64,
    )
    model = GPTNeoForCausalLM(config).double().eval()
    before, attributes = snapshot(model), state(model)
    spec = SelfSpecModel(model)
    with pytest.raises(RuntimeError):
        streamer = Streamer(3, RuntimeError("boom"))
        spec.generate(IDS, attention_mask=MASK, draft=DRAFT, max_new_tokens=9, streamer=streamer)
    unchanged(model, before, attributes)


def test_an_interrupted_call_says_how_far_it_came(model):
    spec = SelfSpecModel(model)
    with pytest.raises(RuntimeError):
        streamer = Streamer(4, RuntimeError("boom"))
        spec.generate(IDS[1:], draft=DRAFT, max_new_tokens=30, streamer=streamer)
    assert spec.last_stats.rounds == 2
    assert len(spec.last_trace.tokens()) == spec.last_stats.emitted


# The model stays usable meanwhile


def test_the_models_own_forward_works_inside_a_call(model):
    """A processor may ask the model itself, as guidance does."""
    alone = model(IDS, attention_mask=MASK).logits
    seen = []

    class Asking(LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.append(torch.equal(model(IDS, attention_mask=MASK).logits, alone))
            return scores

    asking = LogitsProcessorList([Asking()])
    equal_to_generate(SelfSpecModel(model), IDS, MASK, max_new_tokens=6, logits_processor=asking)
    assert seen and all(seen)


def test_a_call_inside_a_call(model):
    spec, other = SelfSpecModel(model), SelfSpecModel(model)
    own = greedy(model, IDS, MASK, max_new_tokens=6)
    texts = []

    class Nested(BaseStreamer):
        def put(self, value):
            for inner in (spec, other):
                texts.append(inner.generate(IDS, attention_mask=MASK, max_new_tokens=6))

        def end(self):
            pass

    texts.append(spec.generate(IDS, attention_mask=MASK, max_new_tokens=6, streamer=Nested()))
    assert len(texts) > 4 and all(torch.equal(text, own) for text in texts)
    assert gates(model) == []


def run_in_threads(*jobs):
    results, errors = [None] * len(jobs), []

    def work(index):
        try:
            results[index] = jobs[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not errors, errors
    return results


def test_decoding_in_threads(model):
    spec = SelfSpecModel(model)
    prompts = [prompt(3 + row, seed=row)[0] for row in range(4)]
    jobs = [lambda ids=ids: spec.generate(ids, max_new_tokens=12, draft=DRAFT) for ids in prompts]
    for ids, text in zip(prompts, run_in_threads(*jobs), strict=True):
        assert torch.equal(text, greedy(model, ids, max_new_tokens=12))
    assert gates(model) == []


def test_two_wrappers_of_one_model_in_threads(model):
    own = greedy(model, IDS, MASK, max_new_tokens=20)

    def job():
        return SelfSpecModel(model).generate(
            IDS, attention_mask=MASK, max_new_tokens=20, draft=DRAFT
        )

    assert all(torch.equal(text, own) for text in run_in_threads(*[job] * 4))
    assert gates(model) == []


def test_plain_decoding_in_another_thread_is_not_gated(model):
    """A pass over some layers, interrupted at any place, is invisible to other threads."""
    spec, alone = SelfSpecModel(model), model(IDS, attention_mask=MASK).logits
    with paused(model.model.layers[1].mlp, spec.generate, IDS[1:, -1:], draft=DRAFT):
        meanwhile = model(IDS, attention_mask=MASK).logits
    assert torch.equal(meanwhile, alone)


def test_a_model_may_be_wrapped_while_another_thread_is_inside_a_pass(model):
    """What a wrapper learns of the model is not what a pass has put in its place."""
    with paused(model.lm_head, SelfSpecModel(model).generate, IDS[1:], draft=DRAFT):
        spec = SelfSpecModel(model)
    equal_to_generate(spec, IDS, MASK, max_new_tokens=20, draft=DRAFT)


# A drafter equal to the target


@pytest.mark.matrix
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2}
        | ({"bad_words_ids": [[5], [7, 9]]} if BIASES_IN_BLOCKS else {}),
    ],
    ids=["alone", "penalty", "n-grams"],
)
def test_a_drafter_equal_to_the_target_is_always_accepted(options, k, do_sample):
    """Sampled too, and with processors that read the prefix: p and q are the same numbers."""
    spec = SelfSpecModel(tiny_llama("always"))
    warp = {"do_sample": True, "temperature": 0.8, "top_p": 0.9} if do_sample else {}
    spec.generate(
        IDS,
        attention_mask=MASK,
        draft=DraftConfig(exit_layer=EXIT, num_draft_tokens=k),
        max_new_tokens=1 + 4 * (k + 1),
        generator=torch.Generator().manual_seed(0),
        **warp,
        **options,
    )
    stats = spec.last_stats
    assert stats.acceptance_rate == 1
    assert stats.acceptance_by_position == [1] * k
    assert stats.mean_accepted_length == k + 1
    for row in range(2):
        # Prefill writes the first token.
        assert spec.last_trace.origins(row) == ["plain", *[*["accepted"] * k, "bonus"] * 4]


# PEFT


def lora(base, **options):
    torch.manual_seed(1)
    config = LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        **options,
    )
    return get_peft_model(base, config).eval()


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}], ids=["lora", "head"])
def test_a_lora_model_writes_what_its_own_generate_writes(options):
    bare = greedy(tiny_llama("sometimes"), IDS, MASK, max_new_tokens=10)
    model = lora(tiny_llama("sometimes"), **options)
    own = model.generate(input_ids=IDS, attention_mask=MASK, max_new_tokens=10, do_sample=False)
    spec = SelfSpecModel(model)
    text = spec.generate(IDS, attention_mask=MASK, max_new_tokens=10, draft=DRAFT)
    assert torch.equal(text, own) and not torch.equal(text, bare)
    with model.disable_adapter():
        text = spec.generate(IDS, attention_mask=MASK, max_new_tokens=10, draft=DRAFT)
        assert torch.equal(text, bare)
    assert gates(model) == []


def test_a_model_with_device_hooks_on_every_module_keeps_them(model):
    # What `device_map` leaves behind: a forward of its own on each module.
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    before = {name: module.forward for name, module in model.named_modules()}
    equal_to_generate(SelfSpecModel(model), IDS, MASK, max_new_tokens=12, draft=DRAFT)
    assert all(module.forward == before[name] for name, module in model.named_modules())


class Int8Linear(torch.nn.Module):
    """A linear layer whose weight is stored in eight bits, as quantization libraries make them."""

    def __init__(self, linear):
        super().__init__()
        self.scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight / self.scale).round().to(torch.int8))

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) * self.scale).T


def test_quantized_linear_layers_are_run_as_they_are(model):
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Int8Linear(getattr(layer.self_attn, name)))
    equal_to_generate(SelfSpecModel(model), IDS, MASK, max_new_tokens=12, draft=DRAFT)


@pytest.mark.parametrize("config", [PromptTuningConfig, PrefixTuningConfig])
def test_virtual_tokens_are_refused(config):
    adapted = get_peft_model(
        tiny_llama(dtype=torch.float32), config(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    with pytest.raises(ValueError, match="adds virtual tokens"):
        SelfSpecModel(adapted)


# Models that cannot draft for themselves


def build(config):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these families' own
        return AutoModelForCausalLM.from_config(config)


def test_an_encoder_decoder_is_refused():
    config = T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder"):
        SelfSpecModel(T5ForConditionalGeneration(config))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2), "recurrent state"),
        (
            RwkvConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, context_length=32),
            "recurrent state",
        ),
        (
            RecurrentGemmaConfig(**TINY, lru_width=32, attention_window_size=8),
            "outside transformers' cache",
        ),
        (
            KimiLinearConfig(
                **TINY, pad_token_id=0, layer_types=["linear_attention", "full_attention"] * 2
            ),
            "KimiLinearDeltaAttention, whose kernel selfspec does not know"
            if hasattr(Cache, "get_conv_state")
            else "with transformers 5.21 or newer",
        ),
    ],
    ids=["mamba", "rwkv", "recurrent_gemma", "kimi_linear"],
)
def test_states_that_selfspec_cannot_keep_are_refused(config, reason):
    model = build(config)
    with pytest.raises(ValueError, match=reason) as refusal:
        SelfSpecModel(model)
    assert type(model).__name__ in str(refusal.value)


def test_hybrids_of_an_older_transformers_are_refused(monkeypatch):
    """Before 5.21 the cache has no method by which a layer reads its state."""
    model = build(Lfm2Config(**TINY, layer_types=["conv", "full_attention"] * 2))
    monkeypatch.delattr(Cache, "get_conv_state", raising=False)
    monkeypatch.setattr("selfspec.decoder.families.is_mixer", lambda module: False)
    with pytest.raises(ValueError, match=r"^Lfm2ForCausalLM has .* transformers 5\.21 or newer"):
        SelfSpecModel(model)


def test_a_model_without_an_lm_head_is_refused():
    bare = LlamaModel(tiny_llama().config)
    with pytest.raises(ValueError, match="no LM head; load the model with AutoModelForCausalLM"):
        SelfSpecModel(bare)


def test_what_is_no_causal_lm_is_refused():
    with pytest.raises(TypeError, match="must be a transformers PreTrainedModel, got Linear"):
        SelfSpecModel(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"got str; SelfSpecModel\.from_pretrained loads one"):
        SelfSpecModel("path/to/model")


@pytest.mark.parametrize(
    ("wrapper", "path"),
    [
        (torch.nn.DataParallel, "module"),
        (torch.nn.Sequential, "0"),
        (partial(torch.compile, backend="eager"), "_orig_mod"),
        (SelfSpecModel, "model"),
        (lambda model: SimpleNamespace(task="text-generation", model=model), "model"),  # a pipeline
    ],
)
def test_what_wraps_a_model_is_refused_with_the_place_of_the_model(wrapper, path):
    with pytest.raises(TypeError, match=rf"pass the one inside it, its attribute {path}$"):
        SelfSpecModel(wrapper(tiny_llama()))


def test_pipeline_stages_are_refused():
    model = tiny_llama()
    model.config.distributed_config = SimpleNamespace(pp_size=2)
    with pytest.raises(ValueError, match=r"split into 2 pipeline stages.*with tensor parallelism"):
        SelfSpecModel(model)


def test_weights_in_shards_of_processes_with_texts_of_their_own(tmp_path, monkeypatch):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = tiny_llama(dtype=torch.float32)
        spec = SelfSpecModel(model)  # as the training does, which runs passes and no rounds
        fully_shard(model)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda *group: 2)
        with pytest.raises(ValueError, match=r"in shards: .*would wait for one another"):
            spec.generate(torch.tensor([[3, 4]]), max_new_tokens=3)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_attention_without_a_mask_per_row_is_refused(model, kind, monkeypatch):
    monkeypatch.setattr(model.config, "_attn_implementation_internal", kind)
    with pytest.raises(ValueError, match=f"{kind}.*attn_implementation='sdpa'"):
        SelfSpecModel(model)
