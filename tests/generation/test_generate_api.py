"""`generate` has the signature and the meaning of transformers' `generate`."""

import copy
from functools import partial

import pytest
import torch
from conftest import EXIT, TINY, VOCAB, equal_to_generate, greedy, prompt, tiny_llama
from drafter_tools import DRAFTS
from head_tools import own_head
from transformers import (
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessorList,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
    pipeline,
)
from transformers.generation.logits_process import TemperatureLogitsWarper

from selfspec import DEMO_MODEL, DraftConfig, SelfSpecModel
from selfspec.decoder import CACHE, Decoder
from selfspec.decoder.cache import SlotCache, take_row
from selfspec.generation.loop import SpecOutput
from selfspec.schedule.stats import PARTS, Stats, Trace

DRAFT = DraftConfig(exit_layer=EXIT, num_draft_tokens=4)
target = tiny_llama("sometimes")
spec = SelfSpecModel(target)
BATCHES = pytest.mark.parametrize("lengths", [(1,), (6,), (4, 1, 9)], ids=str)


@pytest.fixture(scope="module")
def windowed():
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = MistralConfig(**TINY, **ends, sliding_window=7, initializer_range=0.3)
    return MistralForCausalLM(config).double().eval()


def ours(ids, mask=None, model=spec, **options):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, draft=DRAFT, **options)


# What comes back


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("how", ["early_exit", "tree"])
@pytest.mark.parametrize("penalty", [1.0, 1.3], ids=["pointwise", "prefix"])
@BATCHES
def test_scores_and_logits_are_those_of_plain_decoding(lengths, dtype, how, penalty):
    model = tiny_llama("sometimes", dtype=dtype)
    ids, mask = prompt(*lengths)
    options = {
        "max_new_tokens": 12,
        "repetition_penalty": penalty,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    own = greedy(model, ids, mask, **options)
    out = SelfSpecModel(model).generate(ids, attention_mask=mask, draft=DRAFTS[how], **options)
    assert out.stats.accepted > 0
    assert torch.equal(own.sequences, out.sequences)
    assert len(out.scores) == len(out.logits) == 12
    tolerance = {"rtol": 1e-6, "atol": 1e-6 if dtype == torch.float64 else 1e-3}
    torch.testing.assert_close(out.scores, own.scores, **tolerance)
    torch.testing.assert_close(out.logits, own.logits, **tolerance)
    assert all(step.dtype == torch.float32 for step in out.scores + out.logits)


def test_a_dictionary_has_transformers_fields_and_ours():
    ids, _ = prompt(5)
    out = ours(ids, max_new_tokens=9, return_dict_in_generate=True)
    assert isinstance(out, SpecOutput)
    assert out.scores is None and out.logits is None
    assert isinstance(out.stats, Stats) and out.stats is spec.last_stats
    assert isinstance(out.trace, Trace) and out.trace is spec.last_trace
    assert out.trace.tokens() == out.sequences[0, 5:].tolist()
    assert isinstance(ours(ids, max_new_tokens=9), torch.Tensor)


@BATCHES
def test_the_cache_that_comes_back_holds_what_a_plain_pass_would(lengths):
    ids, mask = prompt(*lengths)
    out = ours(ids, mask, max_new_tokens=11, return_dict_in_generate=True)
    cache = out.past_key_values
    assert isinstance(cache, SlotCache)
    assert cache.lengths == [length + 10 for length in lengths]
    for row, length in enumerate(lengths):
        text = out.sequences[row, ids.shape[1] - length : -1][None]
        plain = target(text, use_cache=True).past_key_values
        for (keys, values), layer in zip(take_row(cache, row), plain.layers, strict=True):
            torch.testing.assert_close(keys, layer.keys[0])
            torch.testing.assert_close(values, layer.values[0])


def test_what_comes_back_may_be_changed_in_place_and_go_through_autograd():
    ids, _ = prompt(5)
    cache = DynamicCache(config=target.config)
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    out = ours(ids, max_new_tokens=9, past_key_values=cache, **options)
    held = [part for keys, values, _ in cache for part in (keys, values)]
    for tensor in (out.sequences, *out.scores, *out.logits, *held):
        tensor.zero_()
    (out.scores[0] * torch.ones(VOCAB, requires_grad=True)).sum().backward()


def test_rows_that_ended_early_get_their_cache_back_too():
    ids, mask = prompt(4, 1, 9)
    text = greedy(target, ids, mask, max_new_tokens=20)[:, 9:]
    eos = int(text[0, 3])
    out = ours(ids, mask, max_new_tokens=20, eos_token_id=eos, return_dict_in_generate=True)
    emitted = [len(out.trace.tokens(row)) for row in range(3)]
    assert emitted[0] == text[0].tolist().index(eos) + 1
    lengths = [n + e - 1 for n, e in zip((4, 1, 9), emitted, strict=True)]
    assert out.past_key_values.lengths == lengths


# What goes in


def test_both_names_of_the_prompt():
    ids, mask = prompt(4, 6)
    options = {"attention_mask": mask, "max_new_tokens": 6, "draft": DRAFT}
    assert torch.equal(spec.generate(ids, **options), spec.generate(input_ids=ids, **options))


PROCESSORS = [
    {"repetition_penalty": 1.5},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 7, "eos_token_id": list(range(1, 40))},
    {"bad_words_ids": [[5], [7, 9], [12, 3, 8]]},
    {"sequence_bias": [[[17], 4.0], [[8, 20], 6.0]]},
    {"exponential_decay_length_penalty": (3, 1.3), "eos_token_id": 9},
    {"forced_eos_token_id": 9, "eos_token_id": 9},
    {"suppress_tokens": [4, 8, 15], "begin_suppress_tokens": [16, 23, 42]},
    {"prefix_allowed_tokens_fn": lambda row, text: [(3 * int(text[-1]) + i) % 64 for i in (1, 5)]},
    {"suppress_tokens": [], "begin_suppress_tokens": []},
    {"encoder_repetition_penalty": 1.3},
    {"renormalize_logits": True, "remove_invalid_values": True},
    {"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.5)])},
]


@pytest.mark.matrix
@pytest.mark.parametrize("options", PROCESSORS, ids=lambda o: next(iter(o)))
@pytest.mark.parametrize("lengths", [(6,), (4, 2, 9)], ids=str)
def test_every_processor_keeps_its_meaning(options, lengths):
    ids, mask = prompt(*lengths)
    options = {"max_new_tokens": 14, **options}
    assert torch.equal(ours(ids, mask, **options), greedy(target, ids, mask, **options))


@pytest.mark.parametrize("token", [VOCAB, VOCAB + 1])
def test_a_forced_token_that_the_model_lacks_is_an_error_as_in_transformers(token):
    ids, _ = prompt(1)
    for option in ("forced_bos_token_id", "forced_eos_token_id"):
        options = {"max_new_tokens": 1, option: token}
        for run in (ours, partial(greedy, target)):
            with pytest.raises(IndexError, match=f"index {token} is out of bounds"):
                run(ids, **options)


# Sampling


def test_a_seeded_generator_makes_the_call_reproducible():
    ids, mask = prompt(4, 6, 2)
    options = {"do_sample": True, "max_new_tokens": 16, "temperature": 1.3}
    before = torch.get_rng_state()
    first, again, other = (
        ours(ids, mask, generator=torch.Generator().manual_seed(seed), **options)
        for seed in (3, 3, 4)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("draft", [DRAFT, "none"], ids=["drafts", "none"])
def test_the_global_seed_makes_the_call_reproducible(draft):
    ids, _ = prompt(4)
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(spec.generate(ids, do_sample=True, max_new_tokens=16, draft=draft))
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])


def test_sampling_from_the_best_token_alone_is_greedy():
    ids, mask = prompt(4, 6, 2)
    own = greedy(target, ids, mask, max_new_tokens=12)
    out = ours(ids, mask, do_sample=True, top_k=1, num_return_sequences=2, max_new_tokens=12)
    assert torch.equal(out, own.repeat_interleave(2, dim=0))


def test_right_padding_with_several_sequences_a_row():
    ids, mask = prompt(4, 6)
    right, right_mask = ids.clone(), mask.clone()
    right[0], right_mask[0] = ids[0].roll(-2), mask[0].roll(-2)
    out = ours(right, right_mask, do_sample=True, top_k=1, num_return_sequences=2, max_new_tokens=7)
    own = greedy(target, ids, mask, max_new_tokens=7)
    assert torch.equal(out[:, 6:], own[:, 6:].repeat_interleave(2, dim=0))
    assert torch.equal(out[:, :6], right.repeat_interleave(2, dim=0))
    # The number may also come from the config.
    config = GenerationConfig(do_sample=True, num_return_sequences=3, max_new_tokens=4)
    out = ours(right, right_mask, generation_config=config)
    assert torch.equal(out[:, :6], right.repeat_interleave(3, dim=0))


# Turns of a conversation


def conversation(model, cache_of, turns=3, lengths=(5,)):
    """Several turns with a cache handed on; each equals the turn without any cache."""
    rows = [row[-n:].tolist() for row, n in zip(prompt(*lengths)[0], lengths, strict=True)]
    wrapped, cache = SelfSpecModel(model), None
    for turn in range(turns):
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        options = {"max_new_tokens": 6 + turn, "eos_token_id": 9}
        without = greedy(model, ids, mask, **options)
        cache = cache_of(turn, cache)
        out = ours(
            ids, mask, wrapped, past_key_values=cache, return_dict_in_generate=True, **options
        )
        assert torch.equal(out.sequences, without)
        if cache is not None:
            assert out.past_key_values is cache
        cache = out.past_key_values
        added = prompt(*(3 + row + turn for row in range(len(rows))), seed=turn + 5)[0]
        for row, text in enumerate(rows):
            text += wrapped.last_trace.tokens(row) + added[row, -3 - row - turn :].tolist()
    return cache


@pytest.mark.matrix(share=1)
@pytest.mark.parametrize("far", [False, True], ids=["", "beyond a sliding window"])
@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        *((SlotCache, lengths) for lengths in ((5,), (1,), (4, 1, 9))),
        *((DynamicCache, lengths) for lengths in ((5,), (1,))),
    ],
    ids=str,
)
def test_turns_with_a_cache(windowed, kind, far, lengths):
    model = windowed if far else target
    fresh = DynamicCache(config=model.config) if kind is DynamicCache else None
    own = conversation(model, lambda turn, cache: cache or fresh, lengths=lengths)
    assert type(own) is kind


def test_plain_decoding_goes_on_from_our_dynamic_cache_and_we_from_its():
    ids, _ = prompt(5)
    cache = DynamicCache(config=target.config)
    text = ours(ids, max_new_tokens=6, past_key_values=cache)
    assert cache.get_seq_length() == 10
    for generate in (greedy, lambda _, ids, **options: ours(ids, **options)) * 2:
        text = torch.cat([text, torch.tensor([[7, 21]])], dim=1)
        without = greedy(target, text, max_new_tokens=5)
        text = generate(target, text, max_new_tokens=5, **{CACHE: cache})
        assert torch.equal(text, without)
        assert cache.get_seq_length() == text.shape[1] - 1


@pytest.mark.parametrize("name", ["cache", "past_key_values"])  # of transformers 5.24, and before
def test_cached_tokens_are_not_run_again(watch, name):
    ids, mask = prompt(8, 5)
    out = ours(ids, mask, max_new_tokens=6, return_dict_in_generate=True)
    watch(spec)  # checks that prefill runs what the cache does not hold, and nothing else
    text = torch.cat([out.sequences, torch.tensor([[3, 4], [5, 6]])], dim=1)
    mask = torch.cat([mask, torch.ones(2, 8, dtype=torch.long)], dim=1)
    again = ours(text, mask, max_new_tokens=6, **{name: out.past_key_values})
    assert torch.equal(again, greedy(target, text, mask, max_new_tokens=6))


def test_turns_close_to_the_last_learned_position():
    """A short row's padding in a block never asks for a position that the model has not."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_head=4, n_layer=4, n_positions=32, initializer_range=0.3
    )
    model = GPT2LMHeadModel(config).double().eval()
    rows = prompt(26, 2)
    wrapped = SelfSpecModel(model)
    first = ours(*rows, wrapped, max_new_tokens=2, return_dict_in_generate=True, pad_token_id=0)
    added = prompt(1, 20, seed=3)[0]
    text = torch.zeros(2, 29, dtype=torch.long)
    text[0] = torch.cat([first.sequences[0], added[0, -1:]])
    text[1, -24:] = torch.cat([first.sequences[1, 24:], added[1]])
    mask = (torch.arange(29) >= torch.tensor([[0], [5]])).long()
    options = {"max_new_tokens": 3, "pad_token_id": 0}
    out = ours(text, mask, wrapped, past_key_values=first.past_key_values, **options)
    assert torch.equal(out, greedy(model, text, mask, **options))


# What is refused, before anything runs


@pytest.fixture
def passes(monkeypatch):
    """Counts forward passes of the target."""
    seen = []
    handles = [
        module.register_forward_pre_hook(lambda module, args: seen.append(type(module).__name__))
        for module in (target, target.model, target.lm_head, *target.model.layers)
    ]
    yield seen
    for handle in handles:
        handle.remove()


def refused(passes, match, error=ValueError, **options):
    ids, mask = prompt(4, 6)
    given = {"attention_mask": mask, "max_new_tokens": 5, "draft": DRAFT, **options}
    if "inputs_embeds" not in options:
        given = {"input_ids": ids, **given}
    with pytest.raises(error, match=match):
        spec.generate(**{name: value for name, value in given.items() if value is not None})
    assert passes == []


UNCOVERED = [
    ({"num_beams": 3}, "beam"),
    ({"num_beams": 2, "do_sample": True}, "beam"),
    ({"num_beams": 0}, "^num_beams=0: beam"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive"),
    ({"custom_generate": lambda *a, **k: None}, "custom_generate"),
    ({"dola_layers": "high"}, "DoLa"),
    ({"prompt_lookup_num_tokens": 3}, "prompt_lookup"),
    ({"output_attentions": True, "return_dict_in_generate": True}, "attentions"),
    ({"output_hidden_states": True, "return_dict_in_generate": True}, "hidden_states"),
    ({"cache_implementation": "static"}, "cache_implementation"),
    ({"cache_implementation": "paged"}, "cache_implementation"),
    ({"cache_implementation": "quantized"}, "kv_cache_dtype='int8'"),
    ({"generation_config": GenerationConfig(cache_implementation="quantized")}, "leave it unset"),
    ({"inputs_embeds": torch.zeros(2, 6, 32, dtype=torch.float64)}, "inputs_embeds"),
    ({"position_ids": torch.arange(6)[None].expand(2, -1) + 3}, "position_ids"),
    ({"synced_gpus": True}, "synced_gpus: processes that share weights"),
    *(({"prefill_chunk_size": size}, f"from 1 on, got {size};") for size in (0, -1, 2.5)),
]


BAD_DRAFTS = [
    ({"exit_layer": 0}, r"exit_layer must be in \[1, 3\], got 0"),
    ({"exit_layer": 4}, r"exit_layer must be in \[1, 3\], got 4; the model has 4 layers"),
    ({"exit_layer": 99}, "got 99"),
    ({"exit_layer": -1}, "exit_layer"),
    ({"num_draft_tokens": 0}, "at least 1, got 0"),
    ({"num_draft_tokens": -3}, "at least 1, got -3"),
    ({"head": "lense"}, "did you mean 'lens'"),
    ({"head": "lens"}, r"no 'lens' head was fitted \(fitted: none\)"),
    ({"head": "eagle3"}, "no 'eagle3' head was fitted"),
    ({"head": "lens", "exit_layer": 2}, "no 'lens' head was fitted at exit_layer 2"),
    ({"head": "eagle3", "exit_layer": 2}, "exit_layer must be 0, got 2"),
    ({"exit_leyer": 2}, "did you mean 'exit_layer'"),
    ("early_exits", "did you mean 'early_exit'"),
]


ONES = torch.ones(2, 6, dtype=torch.long)
BAD_PROMPTS = [
    *(({"input_ids": torch.zeros(s, dtype=torch.long)}, "empty prompt") for s in ((1, 0), (0, 5))),
    ({"attention_mask": ONES * torch.tensor([[1], [0]])}, "empty prompt"),
    ({"input_ids": ONES[0], "attention_mask": None}, "shape"),
    ({"input_ids": ONES[None], "attention_mask": None}, "shape"),
    *(({"input_ids": ONES * token}, r"in \[0, 63\]") for token in (-1, VOCAB, VOCAB + 100)),
    (dict(zip(("input_ids", "attention_mask"), prompt(129, 3), strict=True)), "the model 128 pos"),
    *(
        ({"attention_mask": (torch.arange(shape[1]) >= padding).long().expand(shape)}, "mask")
        for shape in ((2, 4), (2, 9), (1, 6), (3, 6), (2, 6, 6))
        for padding in (0, 1)
        if len(shape) == 2 or not padding
    ),
    *(
        ({"attention_mask": torch.tensor([row, [1] * 6])}, "one side")
        for row in ([1, 1, 0, 1, 1, 1], [0, 1, 0, 1, 1, 1], [1, 0, 1, 1, 0, 0])
    ),
]


@pytest.mark.parametrize(
    ("options", "match"),
    [*UNCOVERED, *(({"draft": draft}, match) for draft, match in BAD_DRAFTS), *BAD_PROMPTS],
    ids=lambda o: next(iter(o), ""),
)
def test_what_cannot_be_run(passes, options, match):
    refused(passes, match, **options)


@pytest.mark.parametrize("draft", [3, ["early_exit"], 2.5])
def test_drafts_of_a_wrong_type(passes, draft):
    refused(passes, "DraftConfig, a dict or a drafter's name", error=TypeError, draft=draft)


def test_caches_that_do_not_fit(passes):
    slots = spec.decoder.new_slots(3)
    refused(passes, "holds 3 rows, the prompt has 2", past_key_values=slots)
    refused(passes, "two names of one argument", past_key_values=slots, cache=slots)
    slots = spec.decoder.new_slots(2)
    slots.lengths = [4, 2]
    refused(passes, "row 0 has 4 tokens, but the cache already holds 4", past_key_values=slots)
    filled = DynamicCache(config=target.config)
    for index in range(4):
        filled.update(*torch.zeros(2, 2, 2, 3, 8, dtype=torch.float64), index)
    refused(
        passes, "DynamicCache for 2 rows", past_key_values=filled, attention_mask=prompt(4, 6)[1]
    )
    static = StaticCache(config=target.config, max_cache_len=30)
    one = torch.ones(1, 6, dtype=torch.long)
    options = {"input_ids": one, "attention_mask": one}
    refused(passes, "StaticCache", past_key_values=static, **options)
    refused(passes, "rows", past_key_values=filled, **options)


@pytest.mark.parametrize("kind", ["slots", "dynamic"])
@pytest.mark.parametrize("layers", [2, 6])
def test_caches_of_other_models(passes, kind, layers):
    other = SelfSpecModel(tiny_llama(num_hidden_layers=layers))
    ids = torch.ones(1, 3, dtype=torch.long)
    given = {} if kind == "slots" else {"past_key_values": DynamicCache()}
    out = other.generate(ids, max_new_tokens=2, return_dict_in_generate=True, **given)
    one = torch.ones(1, 6, dtype=torch.long)
    message = f"cache holds {layers} layers, the model has 4; past_key_values must come from this"
    options = {"input_ids": one, "attention_mask": one}
    refused(passes, message, past_key_values=out.past_key_values, **options)


@pytest.mark.parametrize("copied", [False, True])
def test_a_cache_of_before_a_cast_is_refused_until_the_model_is_cast_back(copied):
    spec, ids = SelfSpecModel(tiny_llama()), prompt(5)[0]
    options = {"max_new_tokens": 4, "do_sample": False}
    out = spec.generate(ids, return_dict_in_generate=True, **options)
    cache = copy.deepcopy(out.past_key_values) if copied else out.past_key_values
    spec.model.float()
    with pytest.raises(ValueError, match="cast or moved after past_key_values were computed"):
        spec.generate(out.sequences, past_key_values=cache, **options)
    spec.model.double()
    text = spec.generate(out.sequences, past_key_values=cache, **options)
    assert torch.equal(text, greedy(spec.model, out.sequences, max_new_tokens=4))


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", [DRAFT, "none"], ids=["drafts", "none"])
@pytest.mark.parametrize("where", ["everywhere", "deep", "one token"])
def test_nan_logits(where, do_sample, draft):
    model = tiny_llama()
    with torch.no_grad():
        if where == "one token":
            model.lm_head.weight[5] = float("nan")
        else:
            layer = model.model.layers[0 if where == "everywhere" else 3]
            layer.mlp.down_proj.weight.fill_(float("nan"))
    ids, mask = prompt(4, 6)
    wrapped = SelfSpecModel(model)
    with pytest.raises(ValueError, match="NaN"):
        wrapped.generate(
            ids, attention_mask=mask, draft=draft, do_sample=do_sample, max_new_tokens=5
        )


@pytest.mark.parametrize("draft", [DRAFT, "none"], ids=["drafts", "none"])
def test_invalid_logits_are_removed_if_that_is_asked_for(draft):
    model, (ids, mask) = tiny_llama(), prompt(4, 6)
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    options = {"max_new_tokens": 12, "remove_invalid_values": True}
    equal_to_generate(SelfSpecModel(model), ids, mask, [draft], **options)


@pytest.mark.parametrize("draft", [DRAFT, "none"], ids=["drafts", "none"])
def test_infinite_logits_cannot_be_sampled(draft):
    """An overflow in float16 makes +inf first, and NaN of the probabilities."""
    model = tiny_llama()
    overflow = torch.zeros(VOCAB, dtype=torch.float64)
    overflow[5] = torch.inf
    model.lm_head.register_forward_hook(lambda module, args, logits: logits + overflow)
    ids, mask = prompt(4, 6)
    with pytest.raises(ValueError, match="logits"):
        SelfSpecModel(model).generate(
            ids, attention_mask=mask, draft=draft, do_sample=True, max_new_tokens=5
        )


def test_the_clocks_of_all_parts_run():
    ids, mask = prompt(6, 4)
    options = {"attention_mask": mask, "max_new_tokens": 12, "return_dict_in_generate": True}
    stats = spec.generate(ids, draft=DRAFT, **options).stats
    assert all(seconds > 0 for seconds in stats.seconds.values())
    assert stats.time_split["rest"] > 0
    assert sum(stats.time_split.values()) == pytest.approx(1)


def test_what_a_prefill_takes_is_in_no_other_part():
    head = own_head(Decoder(target), "fused", EXIT)  # it reads the prompt, too
    stats = (
        SelfSpecModel(target, heads=[head])
        .generate(prompt(6)[0], max_new_tokens=1, draft=DRAFT, return_dict_in_generate=True)
        .stats
    )
    assert stats.seconds["prefill"] > 0
    assert not any(stats.seconds[part] for part in PARTS)


@pytest.mark.parametrize(
    "place",
    [
        lambda spec: spec.generate,
        lambda spec: partial(spec.generate, draft=DRAFT),
        lambda spec: lambda *given, **options: spec.generate(*given, **options),
    ],
    ids=["method", "partial", "function"],
)
def test_it_may_take_the_place_of_the_models_own_generate(place):
    """For those who are given the model and call its `generate`."""
    model, (ids, mask) = tiny_llama(), prompt(4, 7)
    own, spec = greedy(model, ids, mask, max_new_tokens=8), SelfSpecModel(model)
    model.generate = place(spec)
    assert torch.equal(greedy(model, ids, mask, max_new_tokens=8), own)
    (output,) = spec.generate_batch([ids[1].tolist()], max_new_tokens=8).values()
    assert output.generated_tokens == own[1, -8:].tolist()


@pytest.mark.parametrize("batch_size", [1, 2])
def test_in_a_pipeline_it_stands_for_its_model(batch_size):
    spec = SelfSpecModel.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    options = {"max_new_tokens": 12, "do_sample": False, "batch_size": batch_size}
    ours, theirs = (
        pipeline("text-generation", model=model, tokenizer=tokenizer, device=spec.device)
        for model in (spec, spec.model)
    )
    spoken, own = (
        pipe(["It was a dark", "She said to him that"], **options) for pipe in (ours, theirs)
    )
    assert spoken == own and spec.last_stats.drafted > 0
    assert repr(ours) == repr(theirs).replace(type(spec.model).__name__, type(spec).__name__)
    assert spec.config is spec.model.config and spec.dtype == torch.float32
    assert spec.name_or_path == str(DEMO_MODEL)  # as LangChain asks
