"""A smaller model drafts: every text stays the target's, and the two models stay in step."""

import contextlib
import json
import threading

import distribution_tools as distribution
import pytest
import torch
from conftest import (
    VOCAB,
    equal_to_generate,
    greedy,
    prompt,
    requests_equal_to_generate,
    tiny_llama,
)
from distribution_tools import follows
from distribution_tools import target as target
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation.streamers import BaseStreamer

from selfspec import DraftConfig, SelfSpecModel
from selfspec.drafters import draft_models
from selfspec.drafters.token_map import SharedTokens

IDS, MASK = prompt(3, 8, 5)
DRAFT = {"drafter": "two_model", "num_draft_tokens": 4}


@pytest.fixture(scope="module")
def model():
    return tiny_llama("sometimes")


@pytest.fixture(scope="module")
def small(model):
    """The target's first layers: sometimes right."""
    made = tiny_llama(num_hidden_layers=2)
    made.load_state_dict(model.state_dict(), strict=False)
    return made


@pytest.mark.parametrize("rule", ["block", "token"])
def test_the_target_itself_is_always_accepted(model, rule):
    spec = SelfSpecModel(model, draft_model=model)
    for k in (1, 3, 6):
        spec.generate(
            IDS,
            attention_mask=MASK,
            do_sample=True,
            repetition_penalty=1.2,
            max_new_tokens=25,
            generator=torch.Generator().manual_seed(k),
            draft=DRAFT | {"num_draft_tokens": k, "rule": rule},
        )
        assert spec.last_stats.acceptance_rate == 1


def test_a_long_text_is_read_in_pieces(model, monkeypatch):
    monkeypatch.setattr("selfspec.drafters.two_model._CHUNK", 3)
    spec = SelfSpecModel(model, draft_model=model)
    equal_to_generate(spec, IDS, MASK, max_new_tokens=20, draft=DRAFT)
    assert spec.last_stats.acceptance_rate == 1


@pytest.mark.parametrize("positions", [6, 12])  # fewer than the prompt has, or than the text
def test_a_text_that_outgrows_the_smaller_model(model, positions):
    shape = GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=positions)
    spec = SelfSpecModel(model, draft_model=GPT2LMHeadModel(shape).double().eval())
    equal_to_generate(spec, IDS, MASK, max_new_tokens=20, draft=DRAFT)
    assert bool(spec.last_stats.drafted) == (positions > IDS.shape[1])


# Where the smaller model comes from


def test_a_checkpoint_is_loaded_once_with_the_targets_dtype(model, small, tmp_path, monkeypatch):
    small.save_pretrained(tmp_path)
    model_in_float = tiny_llama("sometimes", dtype=torch.float32)
    loaded, load = [], draft_models.load_causal_lm

    def noting(path, **options):
        loaded.append(load(path, **options))
        return loaded[-1]

    monkeypatch.setattr(draft_models, "load_causal_lm", noting)
    spec = SelfSpecModel(model_in_float)
    draft = DRAFT | {"draft_model": str(tmp_path)}
    options = {"attention_mask": MASK, "max_new_tokens": 12}
    texts = [spec.generate(IDS, draft=draft, **options) for _ in range(2)]
    assert torch.equal(*texts)
    assert [one.dtype for one in loaded] == [torch.float32]
    model.save_pretrained(tmp_path / "target")
    SelfSpecModel.from_pretrained(tmp_path / "target", draft_model=tmp_path)
    assert [one.dtype for one in loaded] == [torch.float32, torch.float64]


def test_a_call_may_bring_an_assistant_of_its_own(model, small):
    spec = SelfSpecModel(model, draft_model=small)
    options = {"attention_mask": MASK, "max_new_tokens": 12}
    for assistant, certain in ((None, False), (model, True), (None, False)):
        spec.generate(IDS, draft=DRAFT, assistant_model=assistant, **options)
        assert (spec.last_stats.acceptance_rate == 1) == certain
    spec.generate(IDS, draft={"num_draft_tokens": 2}, assistant_model=model, **options)
    assert spec.last_stats.acceptance_rate == 1


@pytest.fixture
def passes(model):
    """Passes of the target, as they come."""
    seen = []
    handle = model.model.register_forward_pre_hook(lambda *_: seen.append(1))
    yield seen
    handle.remove()


def t5():
    shape = {"vocab_size": VOCAB, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1}
    return T5ForConditionalGeneration(T5Config(**shape, num_heads=2, pad_token_id=0))


REFUSED = [
    (lambda: {}, "needs a smaller model, got none; pass assistant_model"),
    (
        lambda: {"assistant_model": tiny_llama(vocab_size=60)},
        "draft model LlamaForCausalLM has a vocabulary of 60 tokens, the target LlamaForCausalLM "
        "one of 64, and their tokenizers are not both known; load",
    ),
    (lambda: {"assistant_model": t5()}, "draft model: T5.* encoder-decoder"),
    (
        lambda: {"assistant_model": tiny_llama(), "assistant_tokenizer": 1},
        "tokenizer and assistant_tokenizer have to be .*, got int",
    ),
    (
        lambda: {"assistant_model": tiny_llama(), "draft": {"drafter": "early_exit"}},
        "assistant_model and drafter='early_exit' exclude each",
    ),
    (
        lambda: {"assistant_model": tiny_llama(), "draft": {"draft_model": "small"}},
        "assistant_model and draft_model exclude each",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: str(value)[:20])
def test_what_cannot_draft_is_refused_before_any_pass(model, passes, options, message):
    with pytest.raises(ValueError, match=message):
        SelfSpecModel(model).generate(IDS, attention_mask=MASK, **{"draft": DRAFT, **options()})
    assert passes == []


def test_a_checkpoint_that_is_not_there(model, passes, tmp_path):
    spec = SelfSpecModel(model)
    with pytest.raises(OSError, match="nowhere"):
        spec.generate(IDS, draft=DRAFT | {"draft_model": str(tmp_path / "nowhere")})
    with pytest.raises(TypeError, match="got str"):
        spec.generate(IDS, assistant_model=str(tmp_path))
    assert passes == []


def test_tokenizers_that_number_their_words_otherwise_are_told_apart(model, tokenizer, tmp_path):
    for name in ("target", "alike", "other"):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    file = tmp_path / "other" / "tokenizer.json"
    words = json.loads(file.read_text())
    vocab = words["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(words))
    for name in ("alike", "other"):
        spec = SelfSpecModel.from_pretrained(tmp_path / "target", draft_model=tmp_path / name)
        tokens = spec.engine.draft_models.chosen(DraftConfig.of(DRAFT)).tokens
        assert isinstance(tokens, SharedTokens) == (name == "other")


def test_two_models_may_draft_for_each_other_at_the_same_time(model, small):
    ids, _ = prompt(8)
    begun = threading.Barrier(2, timeout=60)

    class Meeting(BaseStreamer):
        """Waits for the other thread while a round of this one is over."""

        def put(self, value):
            with contextlib.suppress(threading.BrokenBarrierError):
                begun.wait(timeout=1)

        def end(self):
            pass

    texts: dict[int, torch.Tensor] = {}

    def write(place, writing, drafting):
        spec = SelfSpecModel(writing, draft_model=drafting)
        texts[place] = spec.generate(ids, max_new_tokens=16, draft=DRAFT, streamer=Meeting())

    pairs = ((model, small), (small, model))
    threads = [
        threading.Thread(target=write, args=(place, *pair), daemon=True)
        for place, pair in enumerate(pairs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(texts) == 2, "the threads wait for each other"
    for place, (writing, _) in enumerate(pairs):
        assert torch.equal(texts[place], greedy(writing, ids, max_new_tokens=16))


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_a_broken_draft_model_is_never_followed(model, do_sample):
    broken = tiny_llama(seed=1)
    with torch.no_grad():
        broken.model.layers[0].mlp.down_proj.weight.fill_(torch.nan)
    spec = SelfSpecModel(model, draft_model=broken)
    options = {"attention_mask": MASK, "max_new_tokens": 12, "do_sample": do_sample}
    text = spec.generate(IDS, draft=DRAFT, **options)
    assert text.shape == (len(IDS), IDS.shape[1] + 12)
    if not do_sample:
        assert torch.equal(text, greedy(model, IDS, MASK, max_new_tokens=12))


# Vocabularies of one tokenizer that are padded to different sizes


@pytest.fixture(scope="module")
def padded():
    """A target of 80 rows, and the same model with fewer and with more of them."""
    models = {
        rows: tiny_llama(vocab_size=rows, num_hidden_layers=2, tie_word_embeddings=False)
        for rows in (64, 80, 96)
    }
    weights = models[96].state_dict()
    for rows, smaller in models.items():
        cut = {n: w[:rows] if "embed" in n or "lm_head" in n else w for n, w in weights.items()}
        smaller.load_state_dict(cut)
    return models


@pytest.fixture(scope="module")
def saved(padded, tmp_path_factory):
    """Their folders; the tokenizer has 64 words."""
    root = tmp_path_factory.mktemp("padded")
    for rows, one in padded.items():
        one.save_pretrained(root / str(rows))
    return root


@pytest.fixture
def folders(saved, tokenizer):
    for folder in saved.iterdir():
        tokenizer.save_pretrained(folder)
    return saved


WIDE_IDS = IDS + 20 * (IDS > 40)  # with tokens of the padding


@pytest.mark.parametrize("draft", [{}, {"schedule": "optimal"}, {"num_draft_tokens": 1}], ids=str)
@pytest.mark.parametrize("rows", [64, 96])
def test_other_padding_drafts_the_tokens_that_both_have(folders, padded, rows, draft):
    spec = SelfSpecModel.from_pretrained(
        folders / "80", draft_model=folders / str(rows), dtype=torch.float64
    )
    # The last token is forced, and only the target has it.
    options = {"max_new_tokens": 24, "forced_eos_token_id": 70}
    text = equal_to_generate(spec, WIDE_IDS, MASK, draft=DRAFT | draft, **options)
    drafted = [t for row in spec.last_trace.rows for step in row for t in step.drafted]
    assert drafted and {*drafted} <= {*range(min(rows, 80)), 70}
    assert max(text[0, IDS.shape[1] :]) >= 64, "the target writes tokens of its padding"
    if rows == 96:
        assert spec.last_stats.acceptance_rate == 1


@pytest.mark.parametrize("rows", [64, 96])
def test_other_padding_in_batches_and_with_a_seed(folders, rows):
    spec = SelfSpecModel.from_pretrained(
        folders / "80", draft_model=folders / str(rows), dtype=torch.float64
    )
    prompts = [row[mask > 0].tolist() for row, mask in zip(WIDE_IDS, MASK, strict=True)]
    requests_equal_to_generate(spec, prompts, 10, draft=DRAFT)
    coupled = {"rule": "coupled", "num_draft_tokens": 3}
    texts = [
        spec.generate(
            WIDE_IDS[1:2],
            do_sample=True,
            max_new_tokens=20,
            generator=torch.Generator().manual_seed(3),
            draft=coupled | {"drafter": drafter},
        )
        for drafter in ("two_model", "none")
    ]
    assert torch.equal(*texts)


@pytest.mark.matrix
@pytest.mark.parametrize("rows", [distribution.VOCAB - 4, distribution.VOCAB + 4])
def test_sampled_text_of_other_padding_follows_the_target(target, tmp_path, rows):
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    other = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": rows}
    near = tiny_llama(dtype=torch.float32, spread=0.4, seed=20, **shape, **other)
    for name, one in (("target", target), ("near", near)):
        one.save_pretrained(tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    draft = DraftConfig(drafter="two_model", draft_model=str(tmp_path / "near"), num_draft_tokens=2)
    follows(loaded, distribution.WARPED, draft, total=8_000)


def test_other_padding_needs_tokenizers_to_compare(folders):
    (folders / "64" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"64 tokens, the target .* one of 80, .*tokenizer\.json"):
        SelfSpecModel.from_pretrained(folders / "80", draft_model=folders / "64")
