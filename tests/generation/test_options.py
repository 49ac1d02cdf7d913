"""Options are merged as transformers merges them, and judged afterwards."""

import inspect
from itertools import product

import pytest
import torch
from conftest import EXIT, greedy, prompt, tiny_llama
from families import CASES_BY_FAMILY, model_of
from transformers import DynamicCache, GenerationConfig, GenerationMixin

from selfspec import SelfSpecModel
from selfspec.decoder import CACHE
from selfspec.decoder.cache import SlotCache

DRAFTS = pytest.mark.parametrize(
    "draft",
    [
        {"drafter": "early_exit", "exit_layer": EXIT},
        {"drafter": "tree", "exit_layer": EXIT},
        "none",
        None,
    ],
    ids=["early_exit", "tree", "none", "default"],
)
BATCHES = pytest.mark.parametrize("lengths", [(6,), (4, 1, 9), (5, 5)], ids=str)


@pytest.fixture
def target():
    return tiny_llama("sometimes")


def right_padded(ids, mask):
    """The same rows, with their padding on the right."""
    shifts = (mask == 0).sum(-1).tolist()
    return torch.stack([row.roll(-by) for row, by in zip(ids, shifts, strict=True)])


# An option, a value that changes the text, and one that is neutral.
MERGED = [
    ("repetition_penalty", 1.7, 1.0),
    ("no_repeat_ngram_size", 1, 0),
    ("suppress_tokens", list(range(20)), None),
    ("max_new_tokens", 3, 9),
]
PLACES = list(product([False, True], repeat=3))


def placed(model, name, value, neutral, places):
    """The arguments of a call that has an option in its keywords, its config or the model's."""
    call, config, own = places
    if own:
        setattr(model.generation_config, name, value if not (call or config) else neutral)
    options = {"max_new_tokens": 9} if name != "max_new_tokens" or not any(places) else {}
    if call:
        options[name] = value
    if config:
        options["generation_config"] = GenerationConfig(**{name: neutral if call else value})
    return options


@pytest.mark.matrix
@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize(("name", "value", "neutral"), MERGED, ids=lambda v: str(v)[:12])
def test_a_call_comes_before_its_config_and_this_before_the_models(
    target, name, value, neutral, places
):
    options = {**placed(target, name, value, neutral, places), "do_sample": False}
    ids, mask = prompt(4, 9)
    own = target.generate(ids, attention_mask=mask, **options)
    for draft in ({"exit_layer": EXIT}, "none"):
        out = SelfSpecModel(target).generate(ids, attention_mask=mask, draft=draft, **options)
        assert torch.equal(out, own)


# What a checkpoint may ask for and a call take back.
OVERRIDDEN = [
    ("cache_implementation", "static", "dynamic"),
    ("cache_implementation", "quantized", "dynamic"),
    ("num_beams", 3, 1),
    ("force_words_ids", [[5]], None),
    ("constraints", [], None),
    ("penalty_alpha", 0.6, None),
    ("dola_layers", "high", None),
    ("prompt_lookup_num_tokens", 3, None),
    ("assistant_early_exit", 2, None),
    ("use_mtp", True, False),
    ("output_attentions", True, False),
    ("output_hidden_states", True, False),
]


@pytest.mark.parametrize(("name", "value", "neutral"), OVERRIDDEN, ids=lambda v: str(v)[:12])
def test_what_is_refused_wherever_it_stands_is_refused_only_if_it_is_left(
    target, name, value, neutral
):
    ids, _ = prompt(6)
    own, spec = greedy(target, ids, max_new_tokens=4), SelfSpecModel(target)
    options = {"max_new_tokens": 4, "do_sample": False}
    for given in ({name: value}, {"generation_config": GenerationConfig(**{name: value})}):
        with pytest.raises(ValueError, match=name):
            spec.generate(ids, **options, **given)
        with pytest.raises(ValueError, match=name):
            spec.generate_batch(ids.tolist(), **options, **given)
    setattr(target.generation_config, name, value)
    with pytest.raises(ValueError, match=name):
        spec.generate(ids, **options)
    assert torch.equal(spec.generate(ids, **options, **{name: neutral}), own)
    outputs = spec.generate_batch(ids.tolist(), **options, **{name: neutral})
    assert outputs["req_0"].generated_tokens == own[0, 6:].tolist()


@pytest.mark.matrix
@DRAFTS
@pytest.mark.parametrize("where", ["model", "config", "call"])
def test_a_hybrid_cache_counts_as_unset_and_without_a_cache_its_kind_means_nothing(
    target, where, draft
):
    ids, mask = prompt(4, 9)
    own = greedy(target, ids, mask, max_new_tokens=6)
    for named in ({"cache_implementation": "hybrid"}, {"cache_implementation": "static"}):
        options = {"max_new_tokens": 6, "do_sample": False}
        if "static" in named.values():
            named |= {"use_cache": False}
        if where == "model":
            target.generation_config.update(**named)
        elif where == "config":
            options["generation_config"] = GenerationConfig(**named)
        else:
            options |= named
        out = SelfSpecModel(target).generate(ids, attention_mask=mask, draft=draft, **options)
        assert torch.equal(out, own)


# Arguments


def test_arguments_stand_where_transformers_has_them():
    ours = list(inspect.signature(SelfSpecModel.generate).parameters.values())
    theirs = list(inspect.signature(GenerationMixin.generate).parameters.values())
    for mine, own in zip(ours, theirs[:-1], strict=False):
        assert (mine.name, mine.default, mine.kind) == (own.name, own.default, own.kind)
    rest = ours[len(theirs) - 1 :]
    assert all(mine.kind in (mine.KEYWORD_ONLY, mine.VAR_KEYWORD) for mine in rest)


def every_default():
    signature = inspect.signature(GenerationMixin.generate).parameters
    defaults = {name: p.default for name, p in signature.items() if p.default is not p.empty}
    tokenizers = {"tokenizer": None, "assistant_tokenizer": None, "trust_remote_code": None}
    inputs = {"inputs_embeds": None, "position_ids": None, "past_key_values": None}
    given = {**defaults, **tokenizers, **inputs, **GenerationConfig().to_diff_dict()}
    return {n: given[n] for n in given if n not in ("inputs", "transformers_version")}


NEUTRAL = {
    "every default": {**every_default(), "synced_gpus": False},
    "what a collator adds": {"labels": torch.zeros(1, dtype=torch.long)},
    # As in transformers, contrastive search needs more than one candidate.
    "a mode that is switched off": {"penalty_alpha": 0.6, "top_k": 1},
}


@pytest.mark.matrix
@DRAFTS
@BATCHES
@pytest.mark.parametrize("given", NEUTRAL.values(), ids=NEUTRAL)
def test_what_says_nothing_may_be_passed(target, lengths, given, draft):
    ids, mask = prompt(*lengths)
    own = greedy(target, ids, mask, max_new_tokens=6)
    options = {**given, "attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(SelfSpecModel(target).generate(ids, draft=draft, **options), own)


@pytest.mark.matrix
@BATCHES
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.int64])
def test_token_ids_of_any_integer_type_come_back_in_64_bits(target, dtype, lengths):
    ids, mask = prompt(*lengths)
    spec = SelfSpecModel(target)
    for tokens in (ids, right_padded(ids, mask)):
        out = spec.generate(tokens.to(dtype), max_new_tokens=5, do_sample=False)
        assert out.dtype == torch.int64
        assert torch.equal(out, spec.generate(tokens, max_new_tokens=5, do_sample=False))


@pytest.mark.parametrize(
    "given",
    [[[1, 2]], [1, 2], "text", {"input_ids": [[1]]}, torch.ones(1, 3), torch.ones(1, 3).bool()],
    ids=["rows", "row", "text", "dict", "floats", "bools"],
)
def test_a_prompt_is_a_tensor_of_integers(target, given):
    with pytest.raises(TypeError, match="input_ids must be"):
        SelfSpecModel(target).generate(given, max_new_tokens=2)
    with pytest.raises(TypeError, match="attention_mask must be a tensor"):
        SelfSpecModel(target).generate(prompt(3)[0], attention_mask=[[1, 1, 1]])
    with pytest.raises(TypeError, match=r"generator must be a torch\.Generator, got 5; for a seed"):
        SelfSpecModel(target).generate(prompt(3)[0], generator=5)


def passing(*_, **__):
    """A function in the place of a list of functions."""


# Options with values that no option of their kind can have, and what is expected.
MISTYPED = [
    ("generation_config", {"max_new_tokens": 3}, r"a GenerationConfig, .* GenerationConfig\("),
    ("stopping_criteria", passing, "a list of functions"),
    ("logits_processor", passing, "a list of functions"),
    ("logits_processor", [5], "a list of functions"),
    ("prefix_allowed_tokens_fn", [1, 2], "a function"),
    ("max_new_tokens", "3", "a number"),
    ("top_p", "0.9", "a number"),
    ("max_time", "1", "a number"),
    ("num_return_sequences", None, "a number, got None"),
    ("max_length", None, "a number, got None"),
    ("do_sample", "no", "true or false"),
    ("eos_token_id", "a", "a token id or a list of them"),
    ("pad_token_id", [3], "a token id"),
    ("suppress_tokens", 5, "a list of token ids"),
    ("exponential_decay_length_penalty", (2,), "two numbers"),
    ("stop_strings", [5], "a string or a list of strings"),
    ("watermarking_config", 5, "a WatermarkingConfig"),
    ("tokenizer", "folder", "a tokenizer"),
    ("negative_prompt_ids", [[3, 4]], "a tensor"),
    ("past_key_values", [], "a cache"),
    ("streamer", print, "a streamer"),
]


@pytest.mark.parametrize(("name", "value", "expected"), MISTYPED, ids=lambda v: str(v)[:20])
def test_a_value_of_another_type_is_refused_by_name_wherever_it_stands(
    target, name, value, expected
):
    ids, _ = prompt(3)
    spec, message = SelfSpecModel(target), f"{name} must be {expected}"
    with pytest.raises(TypeError, match=message):
        spec.generate(ids, **{name: value})
    with pytest.raises((TypeError, ValueError), match=name):
        spec.generate_batch(ids.tolist(), **{name: value})
    config = GenerationConfig()
    if hasattr(config, name) and value is not None:
        setattr(config, name, value)
        with pytest.raises(TypeError, match=message):
            spec.generate(ids, config)
        spec.generation_config = config
        with pytest.raises(TypeError, match=message):
            spec.generate(ids)


# Values of other types that mean what they look like.
TYPED = [
    {"max_new_tokens": torch.tensor(5)},
    {"max_new_tokens": float("inf"), "max_time": 0},
    {"max_new_tokens": 5, "max_length": None},
    {"max_new_tokens": 5, "eos_token_id": torch.tensor([60, 61])},
    {"max_new_tokens": 5, "eos_token_id": (60, 61), "pad_token_id": torch.tensor(3)},
    {"max_new_tokens": 5, "suppress_tokens": range(20)},
    {"max_new_tokens": 5, "suppress_tokens": {49, 60}, "do_sample": 0},
]


@pytest.mark.parametrize("options", TYPED, ids=str)
def test_numbers_and_token_ids_may_be_of_any_type_of_their_kind(target, options):
    ids, mask = prompt(4, 9)
    own = target.generate(ids, attention_mask=mask, **options)
    out = SelfSpecModel(target).generate(ids, attention_mask=mask, draft="none", **options)
    assert torch.equal(out, own)


# Padding, caches and healing


@pytest.mark.matrix
@DRAFTS
@BATCHES
def test_a_mask_is_inferred_for_padding_on_either_side(target, lengths, draft):
    ids, mask = prompt(*lengths)
    spec, options = SelfSpecModel(target), {"max_new_tokens": 7, "do_sample": False}
    own = target.generate(ids, **options)
    assert torch.equal(spec.generate(ids, draft=draft, **options), own)
    right = right_padded(ids, mask)
    out = spec.generate(right, draft=draft, **options)
    assert torch.equal(out[:, : ids.shape[1]], right)
    assert torch.equal(out[:, ids.shape[1] :], own[:, ids.shape[1] :])


def test_a_token_that_ends_texts_is_no_padding(target):
    """transformers then infers nothing: every token is real."""
    ids, mask = prompt(4, 9)
    right, options = right_padded(ids, mask), {"max_new_tokens": 7, "eos_token_id": [0, 63]}
    ones = torch.ones_like(ids)
    assert torch.equal(
        SelfSpecModel(target).generate(right, do_sample=False, **options),
        greedy(target, right, ones, **options),
    )


@pytest.mark.matrix
@DRAFTS
@BATCHES
@pytest.mark.parametrize("where", ["call", "model"])
def test_without_a_cache_none_is_returned(target, where, lengths, draft):
    ids, mask = prompt(*lengths)
    options = {"max_new_tokens": 5, "return_dict_in_generate": True, "do_sample": False}
    if where == "call":
        options["use_cache"] = False
    else:
        target.generation_config.use_cache = False
    own = target.generate(ids, attention_mask=mask, **options)
    out = SelfSpecModel(target).generate(ids, attention_mask=mask, draft=draft, **options)
    assert own.past_key_values is out.past_key_values is None
    assert torch.equal(out.sequences, own.sequences)


@pytest.mark.matrix
@DRAFTS
@BATCHES
@pytest.mark.parametrize("form", ["with layers", "without", "emptied"])
def test_an_empty_cache_is_as_good_as_none(target, form, lengths, draft):
    ids, mask = prompt(*lengths)
    cache = DynamicCache(config=target.config) if form != "without" else DynamicCache()
    if form == "emptied":
        target(ids, **{CACHE: cache})
        cache.crop(-ids.shape[1])
    own = greedy(target, ids, mask, max_new_tokens=6)
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    spec = SelfSpecModel(target)
    out = spec.generate(ids, attention_mask=mask, past_key_values=cache, draft=draft, **options)
    assert torch.equal(out.sequences, own)
    even = len(set(lengths)) == 1
    assert (out.past_key_values is cache) == even
    assert cache.get_seq_length() == (own.shape[1] - 1 if even else 0)
    assert even or isinstance(out.past_key_values, SlotCache)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "falcon_h1", "lfm2"])
def test_rows_of_one_length_go_on_from_a_dynamic_cache(name):
    """Turn after turn, ours and the model's own, beyond a sliding window and with states."""
    model = model_of(name, CASES_BY_FAMILY.get(name, "sdpa"))
    spec, cache = SelfSpecModel(model), DynamicCache(config=model.config)
    text = prompt(5, 5, 5, vocab=61)[0].clamp(min=2)
    for turn in range(3):
        options = {"max_new_tokens": 5, "attention_mask": torch.ones_like(text)}
        options |= {"do_sample": False, "eos_token_id": None}
        expected = model.generate(text, **options)
        out = spec.generate(text, past_key_values=cache, draft={"exit_layer": 2}, **options)
        assert torch.equal(out, expected)
        assert cache.get_seq_length() == out.shape[1] - 1
        text = torch.cat([out, prompt(2, 2, 2, seed=turn, vocab=61)[0].clamp(min=2)], dim=1)


def test_rows_that_end_apart_leave_a_dynamic_cache_as_it_was(target):
    ids = prompt(5, 5)[0]
    free = greedy(target, ids, max_new_tokens=8)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": int(free[0, 7])}
    assert int(free[0, 7]) not in free[1, 5:8]
    cache, spec = DynamicCache(config=target.config), SelfSpecModel(target)
    expected = target.generate(ids, **options)
    for _ in range(2):
        out = spec.generate(ids, past_key_values=cache, draft={"exit_layer": EXIT}, **options)
        assert torch.equal(out, expected) and cache.get_seq_length() == 0


def test_a_mask_that_counts_on_more_than_the_cache_holds_is_refused(target):
    ids, mask = prompt(4)[0], torch.ones(1, 9, dtype=torch.long)
    with pytest.raises(ValueError, match="row 0 has 9 tokens by its attention_mask"):
        SelfSpecModel(target).generate(
            ids, attention_mask=mask, past_key_values=DynamicCache(), max_new_tokens=3
        )


@pytest.mark.matrix
@DRAFTS
@pytest.mark.parametrize("texts", [["the cat an"], ["the cat an", "the hat on"]], ids=["1", "2"])
@pytest.mark.parametrize("where", ["call", "config"])
def test_token_healing_rewrites_the_prompt_as_transformers_does(
    target, tokenizer, where, texts, draft
):
    tokenizer.padding_side, tokenizer.bos_token = "left", "A"
    inputs = dict(tokenizer(texts, return_tensors="pt", padding=True))
    inputs.pop("token_type_ids", None)
    options = {"tokenizer": tokenizer, "max_new_tokens": 6, "do_sample": False}
    if where == "call":
        options["token_healing"] = True
    else:
        options["generation_config"] = GenerationConfig(token_healing=True)
    own = target.generate(**inputs, **options)
    out = SelfSpecModel(target).generate(**inputs, draft=draft, **options)
    assert torch.equal(out, own)


def test_what_needs_the_tokenizer_says_so(target):
    ids, _ = prompt(4)
    for option in ({"token_healing": True}, {"stop_strings": ["a"]}):
        with pytest.raises(ValueError, match=f"{next(iter(option))} needs? the tokenizer"):
            SelfSpecModel(target).generate(ids, max_new_tokens=2, **option)
