"""Draft models of another tokenizer: outputs stay the target's, whatever the two share."""

from __future__ import annotations

import copy
import functools

import distribution_tools as distribution
import pytest
import torch
from conftest import equal_to_generate, greedy, prompt, requests_equal_to_generate, tiny_llama
from distribution_tools import follows
from distribution_tools import target as target
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from selfspec import DraftConfig, SelfSpecModel
from selfspec.drafters import draft_models
from selfspec.drafters.token_map import SharedTokens

DRAFT = {"drafter": "two_model", "num_draft_tokens": 4}
CORPUS = ["the cat is not on the other train", "a bear in an inn is that one", "stop it there"]
IDS, MASK = prompt(3, 8, 5)


@functools.cache  # training twice gives other ids
def sentencepiece(begins: bool = True) -> Tokenizer:
    """A tokenizer as SentencePiece's, trained on a few lines, which begins texts with <s>."""
    if begins:
        backend = Tokenizer.from_str(sentencepiece(begins=False).to_str())
        backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
        return backend
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    options = {"special_tokens": ["<unk>", "<s>"], "unk_token": "<unk>", "show_progress": False}
    backend.train_from_iterator(CORPUS, trainers.UnigramTrainer(vocab_size=30, **options))
    return backend


def letters(text: str, *more: str) -> Tokenizer:
    """A byte-level tokenizer of single letters, and special tokens."""
    backend = Tokenizer(models.BPE({letter: n for n, letter in enumerate(text)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(one, special=True) for one in more])
    return backend


def map_of(one: Tokenizer, other: Tokenizer) -> SharedTokens:
    sizes = (each.get_vocab_size() for each in (one, other))
    return SharedTokens(one, other, *sizes, torch.device("cpu"))


def shared(tokens: SharedTokens) -> dict[int, int]:
    """Draft ids by target ids."""
    logits = tokens.logits(torch.arange(tokens.draft_size).float())
    logits = tokens.vocabulary.spread(logits, -torch.inf)
    return {at: int(value) for at, value in enumerate(logits.tolist()) if value > -torch.inf}


def near_model(model, one: Tokenizer, other: Tokenizer, layers: int):
    """The first layers of a model with another tokenizer, and rows of the tokens both share."""
    size, words = other.get_vocab_size(), model.config.vocab_size
    pairs = shared(SharedTokens(one, other, words, size, model.device))
    config = copy.deepcopy(model.config)
    config.vocab_size, config.num_hidden_layers = size, layers
    config.layer_types = None
    near = type(model)(config).to(model.dtype).eval()
    weights = {name: part for name, part in model.state_dict().items() if part.shape[0] != words}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows, places = model.state_dict()[name][[*pairs]], torch.tensor([*pairs.values()])
        weights[name] = near.state_dict()[name].index_copy(0, places, rows)
    near.load_state_dict(weights, strict=False)
    return near


@pytest.fixture
def folders(tmp_path, tokenizer):
    """A target, and its first layers with another tokenizer."""
    backend = sentencepiece()
    model = tiny_llama("sometimes", tie_word_embeddings=False)
    near = near_model(model, tokenizer.backend_tokenizer, backend, 2)
    model.save_pretrained(tmp_path / "target")
    near.save_pretrained(tmp_path / "near")
    tokenizer.save_pretrained(tmp_path / "target")
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path / "near")
    return tmp_path


def test_tokens_are_shared_by_what_they_stand_for():
    byte_level = letters("abÃ©Ġ", "<s>", "<end>")
    other = Tokenizer(models.BPE({"▁": 0, "b": 1, "<0xC3>": 2, "<end>": 3, "é": 4}, []))
    other.pre_tokenizer, other.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    other.add_special_tokens([AddedToken("<s>", special=True)])
    # "é" is two tokens of one vocabulary; "<end>" is a special token of one of them only.
    assert shared(map_of(byte_level, other)) == {1: 1, 2: 2, 4: 0, 5: 5}


def test_a_text_is_read_as_the_draft_model_would_split_it(tokenizer):
    one, other = tokenizer.backend_tokenizer, sentencepiece()
    tokens, text = map_of(one, other), "the cat is not on the train"
    ids = one.encode(text).ids
    assert tokens.encode(ids, []) == other.encode(text).ids
    for cut in range(1, len(ids)):
        later = other.decode(tokens.encode(ids[cut:], ids[:cut]))
        # Metaspace puts a space before a text, also where this begins within a word.
        assert later.replace(" ", "") == one.decode(ids[cut:]).replace(" ", "")
    # Nothing is shorter than a token, and what is not text of either is still an id.
    strange = [int(one.token_to_id("<pad>")), int(one.token_to_id("Ċ"))]
    assert all(tokens.encode([each], ids) for each in strange)


def test_texts_begin_as_the_draft_models_tokenizer_begins_them():
    begins, bare = sentencepiece(), sentencepiece(begins=False)
    ids = bare.encode("the cat").ids
    assert map_of(bare, begins).encode(ids, []) == [1, *ids]
    assert map_of(begins, bare).encode([1, *ids], []) == ids
    assert map_of(begins, begins).encode([1, *ids], []) == [1, *ids]


@pytest.mark.matrix
@pytest.mark.parametrize("draft", [{}, {"schedule": "optimal"}, {"num_draft_tokens": 1}], ids=str)
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}], ids=str)
def test_greedy_text_is_the_targets_own(folders, draft, options):
    spec = SelfSpecModel.from_pretrained(
        folders / "target", draft_model=folders / "near", dtype=torch.float64
    )
    options = {"max_new_tokens": 30, **options}
    equal_to_generate(spec, IDS, MASK, draft=DRAFT | draft, **options)
    assert 0 < spec.last_stats.acceptance_rate < 1


def test_batches_and_seeds(folders):
    spec = SelfSpecModel.from_pretrained(
        folders / "target", draft_model=folders / "near", dtype=torch.float64
    )
    prompts = [row[mask > 0].tolist() for row, mask in zip(IDS, MASK, strict=True)]
    requests_equal_to_generate(spec, prompts, 10, draft=DRAFT)
    texts = []
    for drafter in ("two_model", "none"):
        seeded = torch.Generator().manual_seed(3)
        options = {"do_sample": True, "max_new_tokens": 20, "generator": seeded}
        coupled = {"drafter": drafter, "rule": "coupled", "num_draft_tokens": 3}
        texts.append(spec.generate(IDS[1:2], draft=coupled, **options))
    assert torch.equal(*texts)


@pytest.mark.matrix(share=3)
@pytest.mark.parametrize("rule", ["block", "token", "coupled"])
def test_sampled_text_follows_the_target(target, tmp_path, rule):
    tokenizers = letters("abcdefghijkl"), letters("xlkjihgfeyzab")
    both = target, near_model(target, *tokenizers, 1)
    for name, tokenizer, model in zip(("target", "near"), tokenizers, both, strict=True):
        model.save_pretrained(tmp_path / name)
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    draft = DraftConfig.of(
        DRAFT | {"draft_model": str(tmp_path / "near"), "num_draft_tokens": 2, "rule": rule}
    )
    follows(loaded, distribution.WARPED, draft, (0.2, 0.95), total=8_000)


def test_an_assistant_brings_its_tokenizer_as_in_transformers(folders, tokenizer):
    """Models that were made in memory have no folder to find it in."""
    backend = sentencepiece()
    assistant = tiny_llama(vocab_size=backend.get_vocab_size())
    own = PreTrainedTokenizerFast(tokenizer_object=backend)
    spec, options = SelfSpecModel(tiny_llama("sometimes")), {"max_new_tokens": 12}
    given = {"assistant_model": assistant, "tokenizer": tokenizer, "assistant_tokenizer": own}
    text = spec.generate(IDS, attention_mask=MASK, **given, **options)
    assert torch.equal(text, greedy(spec.model, IDS, MASK, **options))
    assert spec.last_stats.drafted > 0
    with pytest.raises(ValueError, match=r"vocabulary of .* pass tokenizer and"):
        spec.generate(IDS, assistant_model=assistant, assistant_tokenizer=own, **options)


def test_tokenizers_of_earlier_calls_are_not_kept_for_good():
    spec, assistant = SelfSpecModel(tiny_llama()), tiny_llama()
    for _ in range(12):
        pair = [
            PreTrainedTokenizerFast(tokenizer_object=letters(words)) for words in ("abc", "bca")
        ]
        spec.engine.beside(assistant, pair)
    assert draft_models._same_words.cache_info().currsize < 12


def test_vocabularies_that_share_nothing_are_refused():
    with pytest.raises(ValueError, match="share no token, so nothing can be drafted"):
        map_of(letters("abc"), letters("xyz"))


def test_a_text_that_outgrows_the_draft_model_is_still_the_targets_own(folders):
    """The draft model needs more tokens for it than the target does."""
    spec = SelfSpecModel.from_pretrained(
        folders / "target", draft_model=folders / "near", dtype=torch.float64
    )
    small = spec.engine.draft_models.chosen(DraftConfig.of(DRAFT)).decoder
    small.causal_lm.config.max_position_embeddings = 24
    equal_to_generate(spec, IDS, MASK, draft=DRAFT, max_new_tokens=40)
