"""`docs/covered.md` lists whatever transformers has, and every row of it is true."""

import inspect
import re
from functools import partial

import pytest
import torch
from conftest import EXIT, ROOT, TINY, VOCAB, greedy, prompt, tiny_llama
from families import build as build_family
from peft import LoraConfig, PolyConfig, PromptTuningConfig, get_peft_model
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    CompileConfig,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    KimiLinearConfig,
    LlamaModel,
    LogitsProcessorList,
    MambaConfig,
    MaxTimeCriteria,
    RecurrentGemmaConfig,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
    TemperatureLogitsWarper,
    TextStreamer,
)
from transformers.generation.continuous_batching.continuous_api import ContinuousMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama4 import Llama4ForCausalLM, Llama4TextConfig

from selfspec import SelfSpecModel
from selfspec.decoder import CACHE

PAGE = (ROOT / "docs/covered.md").read_text(encoding="utf-8")
IDS, MASK = prompt(6, 4)
DRAFT = {"exit_layer": EXIT}


def table(section):
    """The rows of a section's table: what is covered, by name."""
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| (?!-)(.+?) \| (yes|no|refused|no effect) \|", text, re.MULTILINE)
    assert found and len(dict(found)) == len(found)
    return {name.strip("`"): covered for name, covered in found}


ARGUMENTS = table("Arguments of `generate`")
KEYWORDS = table("Inputs and other keywords of `generate`")
OPTIONS = table("Options of `GenerationConfig`")
BATCH = table("Arguments of `generate_batch`")
KINDS = table("Kinds of models")


def parameters(function):
    names = list(inspect.signature(function).parameters)
    return [name for name in names if name not in ("self", "kwargs")]


def test_the_page_lists_whatever_transformers_has():
    assert list(ARGUMENTS) == parameters(GenerationMixin.generate)
    assert list(BATCH) == parameters(ContinuousMixin.generate_batch)
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert sorted(OPTIONS) == list(OPTIONS) == sorted(fields - {"transformers_version"})


# A value of each option that is no default.
VALUES = {
    "assistant_confidence_threshold": 0.2,
    "assistant_early_exit": 2,
    "assistant_ensemble_weight": 0.5,
    "assistant_lookbehind": 4,
    "bad_words_ids": [[5], [7, 9]],
    "begin_suppress_tokens": [4, 9],
    "bos_token_id": 3,
    "cache_config": {"backend": "quanto"},
    "cache_implementation": "static",
    "compile_config": CompileConfig(),
    "constraints": [],
    "continuous_batching_config": ContinuousBatchingConfig(),
    "decoder_start_token_id": 2,
    "disable_compile": True,
    "diversity_penalty": 0.5,
    "do_sample": True,
    "dola_layers": "high",
    "early_stopping": True,
    "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.5,
    "eos_token_id": list(range(20)),
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "exponential_decay_length_penalty": (3, 1.4),
    "force_words_ids": [[5]],
    "forced_bos_token_id": 5,
    "forced_eos_token_id": 9,
    "guidance_scale": 1.5,
    "is_assistant": True,
    "length_penalty": 2.0,
    "low_memory": True,
    "max_cache_len": 64,
    "max_length": 14,
    "max_matching_ngram_size": 3,
    "max_new_tokens": 7,
    "max_time": 60.0,
    "min_length": 10,
    "min_new_tokens": 4,
    "min_p": 0.3,
    "no_repeat_ngram_size": 1,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "num_beam_groups": 2,
    "num_beams": 2,
    "num_return_sequences": 2,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_logits": True,
    "output_scores": True,
    "pad_token_id": 1,
    "penalty_alpha": 0.6,
    "prefill_chunk_size": 3,
    "prompt_lookup_num_tokens": 3,
    "remove_invalid_values": True,
    "renormalize_logits": True,
    "repetition_penalty": 1.4,
    "return_dict_in_generate": True,
    "sequence_bias": [[[17], 4.0]],
    "speculation_type": "dflash",
    "stop_strings": ["a"],
    "suppress_tokens": list(range(20)),
    "target_lookbehind": 4,
    "temperature": 0.5,
    "token_healing": True,
    "top_h": 0.4,
    "top_k": 3,
    "top_p": 0.5,
    "typical_p": 0.5,
    "use_cache": False,
    "use_mtp": True,
    "watermarking_config": {"bias": 2.5},
}
NEED_MORE = {"exponential_decay_length_penalty": {"eos_token_id": 9}}
SAMPLED = {
    *("do_sample", "epsilon_cutoff", "eta_cutoff", "min_p", "num_return_sequences"),
    *("temperature", "top_h", "top_k", "top_p", "typical_p"),
}


@pytest.fixture
def target():
    return tiny_llama("sometimes")


def assert_alike(target, given):
    """The text, or when sampling the first distribution, is the model's own."""
    spec = SelfSpecModel(target)
    if not given.get("do_sample"):
        kept = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        own = target.generate(IDS, **given)
        out = spec.generate(IDS, draft=DRAFT, **given)
        whole = spec.generate(IDS, draft=DRAFT, **{**given, **kept})
        texts = own, out, whole
        own, out, whole = (t if isinstance(t, torch.Tensor) else t.sequences for t in texts)
        assert torch.equal(out, own) and torch.equal(whole, own)
        return
    given = {**given, "return_dict_in_generate": True, "output_scores": True}
    own, out = target.generate(IDS, **given), spec.generate(IDS, draft=DRAFT, **given)
    assert out.sequences.shape == own.sequences.shape
    torch.testing.assert_close(out.scores[0], own.scores[0])


@pytest.mark.parametrize("name", OPTIONS)
def test_options_do_what_the_page_says(target, tokenizer, name):
    tokenizer.padding_side, tokenizer.bos_token = "left", "A"
    given = {"attention_mask": MASK, "do_sample": name in SAMPLED, "max_new_tokens": 6}
    given |= {name: VALUES[name], **NEED_MORE.get(name, {})}
    if name in ("stop_strings", "token_healing"):
        given["tokenizer"] = tokenizer
    if name == "max_length":
        del given["max_new_tokens"]
    if OPTIONS[name] != "refused":
        assert_alike(target, given)
        return
    spec = SelfSpecModel(target)
    for where in (given, {**given, "generation_config": GenerationConfig(**{name: VALUES[name]})}):
        if "generation_config" in where:
            del where[name]
        with pytest.raises(ValueError, match=name):
            spec.generate(IDS, draft=DRAFT, **where)


def test_an_option_without_effect_has_none(target):
    """Each of them leaves the text of a call without it."""
    own = greedy(target, IDS, MASK, max_new_tokens=6)
    spec = SelfSpecModel(target)
    given = {"attention_mask": MASK, "do_sample": False, "max_new_tokens": 6, "draft": DRAFT}
    for name, covered in OPTIONS.items():
        if covered == "no effect":
            assert torch.equal(spec.generate(IDS, **given, **{name: VALUES[name]}), own), name


# Arguments and other keywords


def lora(**options):
    torch.manual_seed(1)
    options = {"r": 4, "target_modules": ["q_proj", "down_proj"], **options}
    config = LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **options)
    return get_peft_model(tiny_llama("sometimes"), config, adapter_name="one").eval()


GIVEN = {
    "inputs": IDS,
    "generation_config": GenerationConfig(repetition_penalty=1.5),
    "logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.5)]),
    "stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(60.0)]),
    "prefix_allowed_tokens_fn": lambda row, text: [(3 * int(text[-1]) + i) % VOCAB for i in (1, 5)],
    "synced_gpus": True,
    "assistant_model": tiny_llama(seed=1),
    "negative_prompt_ids": IDS.flip(1),
    "negative_prompt_attention_mask": MASK,
    "custom_generate": lambda *args, **options: IDS,
    "input_ids": IDS,
    "attention_mask": MASK,
    "labels": IDS,
    "position_ids": torch.arange(6)[None].expand(2, -1),
    "inputs_embeds": torch.zeros(2, 6, 32, dtype=torch.float64),
    "token_type_ids": torch.zeros_like(IDS),
    "trust_remote_code": True,
    "adapter_names": ["one", "__base__"],
    "alora_offsets": [2, None],
}


def given_for(name, tokenizer):
    made = {
        "streamer": lambda: TextStreamer(tokenizer),
        "cache": DynamicCache,
        "past_key_values": DynamicCache,
        "tokenizer": lambda: tokenizer,
        "assistant_tokenizer": lambda: tokenizer,
    }
    return made[name]() if name in made else GIVEN[name]


@pytest.mark.parametrize("name", [*ARGUMENTS, *KEYWORDS])
def test_arguments_do_what_the_page_says(target, tokenizer, name):
    covered = {**ARGUMENTS, **KEYWORDS}[name]
    value = given_for(name, tokenizer)
    one = {"assistant_model", "streamer"}  # for one row in transformers
    rows = slice(0, 1) if name in one else slice(None)
    given = {"input_ids": IDS[rows], "attention_mask": MASK[rows], "max_new_tokens": 6, name: value}
    given |= {"do_sample": False}
    if name.startswith("negative_prompt"):
        given |= {"guidance_scale": 1.5, "negative_prompt_ids": GIVEN["negative_prompt_ids"]}
    if name == "inputs":
        del given["input_ids"]
    model = target
    if name in ("adapter_names", "alora_offsets"):
        more = {"alora_invocation_tokens": [3]} if name == "alora_offsets" else {}
        model = lora(**more)
    spec = SelfSpecModel(model)
    draft = None if name == "assistant_model" else DRAFT
    if covered == "refused":
        with pytest.raises(ValueError, match=name):
            spec.generate(draft=draft, **given)
        return
    caches = ("cache", "past_key_values")  # of transformers 5.24, and before
    own = model.generate(**{CACHE if key in caches else key: given[key] for key in given})
    given[name] = given_for(name, tokenizer)  # a streamer or a cache of its own
    assert torch.equal(spec.generate(draft=draft, **given), own)


@pytest.mark.parametrize("name", BATCH)
def test_arguments_of_batches_do_what_the_page_says(target, name):
    values = {
        "inputs": iter([[1, 2, 3]]),
        "generation_config": GenerationConfig(repetition_penalty=1.5),
        "continuous_batching_config": ContinuousBatchingConfig(),
        "record_timestamps": True,
        "progress_bar": True,
        "persistent_manager": True,
        "warmup": False,
    }
    given = {"inputs": [[1, 2, 3]], "max_new_tokens": 5, "do_sample": False, name: values[name]}
    spec = SelfSpecModel(target)
    if BATCH[name] == "refused":
        with pytest.raises(ValueError, match=name):
            spec.generate_batch(**given)
        return
    config = given.get("generation_config")
    own = greedy(target, torch.tensor([[1, 2, 3]]), max_new_tokens=5, generation_config=config)
    assert spec.generate_batch(**given)["req_0"].generated_tokens == own[0, 3:].tolist()


# Kinds of models


def of_config(config):
    return AutoModelForCausalLM.from_config(config)


def with_flash():
    model = tiny_llama()
    model.config._attn_implementation = "flash_attention_2"
    return model


def with_own_attention():
    AttentionInterface.register("covered", sdpa_attention_forward)
    AttentionMaskInterface.register("covered", sdpa_mask)
    return tiny_llama(attn_implementation="covered")


def llama4():
    config = Llama4TextConfig(**TINY, intermediate_size_mlp=48, num_local_experts=2, head_dim=8)
    return Llama4ForCausalLM(config)


def virtual_tokens():
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return get_peft_model(tiny_llama(dtype=torch.float32), config)


def poly():
    where = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    return get_peft_model(tiny_llama(dtype=torch.float32), PolyConfig(r=4, n_tasks=2, **where))


def encoder_decoder():
    config = T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    return T5ForConditionalGeneration(config)


MAMBA = MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2)
GRIFFIN = RecurrentGemmaConfig(**TINY, lru_width=32, attention_window_size=8)
KIMI = KimiLinearConfig(
    **TINY, pad_token_id=0, layer_types=["linear_attention", "full_attention"] * 2
)
family = partial(partial, build_family, attention="sdpa")
MODELS = {  # how the kinds of the page begin
    "decoder-only": family("llama"),
    "sliding windows": family("mistral"),
    "recurrent layers": family("falcon_h1"),
    "mixture of experts": family("mixtral"),
    "position biases": partial(build_family, "bloom", "eager"),
    "adapters in the layers": lora,
    "activated LoRA": partial(lora, alora_invocation_tokens=[3]),
    "encoder-decoder": encoder_decoder,
    "no attention": partial(of_config, MAMBA),
    "states outside": partial(of_config, GRIFFIN),
    "recurrent kernels": partial(of_config, KIMI),
    "chunked attention": llama4,
    "flash attention": with_flash,
    "attentions of your own": with_own_attention,
    "no LM head": lambda: LlamaModel(tiny_llama().config),
    "prompt tuning": virtual_tokens,
    "PEFT tuners": poly,
}


@pytest.mark.filterwarnings("ignore")  # the families' own, while they are built
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_models_are_as_the_page_says(kind):
    (make,) = (make for name, make in MODELS.items() if kind.startswith(name))
    model = make()
    if KINDS[kind] == "refused":
        with pytest.raises(ValueError):
            SelfSpecModel(model)
        return
    ids, mask = prompt(6, 4, vocab=61)
    given = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    own = model.generate(input_ids=ids, **given)
    assert torch.equal(SelfSpecModel(model).generate(ids, draft=DRAFT, **given), own)
