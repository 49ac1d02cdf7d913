"""The law of every drafter: greedy text is the model's own, on any family, under any schedule."""

import pytest
import torch
from conftest import VOCAB, greedy, prompt, tiny_llama
from drafter_tools import CHAINS, DRAFTS, draft
from families import build
from transformers import AutoModelForCausalLM, AutoTokenizer

from selfspec import DEMO_MODEL, SelfSpecModel
from selfspec.drafters import DRAFTERS, Drafter, register_drafter
from selfspec.sampling import Draft
from selfspec.sampling.draft import Tree


def test_every_way_to_draft_is_here():
    assert set(DRAFTERS) >= {*CHAINS, "auto", "lookahead", "none", "prompt_lookup", "tree"}


@pytest.mark.parametrize("drafter", sorted(set(DRAFTERS) - {*CHAINS, "none"}))
@pytest.mark.parametrize("schedule", ["confidence", "optimal"])
def test_a_schedule_that_is_not_asked_is_refused(drafter, schedule):
    spec = SelfSpecModel(tiny_llama())
    with pytest.raises(ValueError, match=f"'{drafter}' does not use it; leave it out, or"):
        spec.generate(prompt(4)[0], draft=draft(drafter, schedule=schedule))


@pytest.mark.parametrize("drafter", ["lookahead", "prompt_lookup", "skip_sublayers", "two_model"])
@pytest.mark.parametrize("exit_key", [{"exit_layer": 2}, {"head": "shared"}])
def test_an_exit_that_would_not_draft_is_refused(drafter, exit_key):
    spec = SelfSpecModel(tiny_llama(), draft_model=tiny_llama())
    with pytest.raises(ValueError, match=f"is for drafts from an exit, and '{drafter}' has none"):
        spec.generate(prompt(4)[0], draft=draft(drafter, **exit_key))


@pytest.mark.parametrize("drafter", sorted(set(DRAFTERS) - {"two_model", "none"}))
def test_a_draft_model_that_would_not_draft_is_refused(drafter):
    spec = SelfSpecModel(tiny_llama())
    with pytest.raises(ValueError, match=f"'small' is for .*, got drafter='{drafter}'"):
        spec.generate(prompt(4)[0], draft=draft(drafter, draft_model="small"))


@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon_alibi"])
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ("lookahead", "siblings cannot have one position; use a drafter"),
        ("tree", "cannot have one position; use a drafter that makes"),
        ("skip_sublayers", "name the sublayers to skip"),
        ({"exit_layer": 2, "window": 3}, "biases attention by the index of a key"),
    ],
)
def test_families_whose_bias_counts_keys_refuse_trees_and_windows(family, options, match):
    spec = SelfSpecModel(build(family, "eager"))
    with pytest.raises(ValueError, match=match):
        spec.generate(prompt(4)[0], draft=options, max_new_tokens=2)


@pytest.fixture(scope="module")
def demo():
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    ids = tokenizer("The old man looked out of the window, and", return_tensors="pt").input_ids
    return model, ids, greedy(model, ids, max_new_tokens=20, pad_token_id=0)


@pytest.mark.matrix(share=3)
@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
def test_on_the_demo_target(drafter, demo):
    model, ids, expected = demo
    spec = SelfSpecModel(model, DEMO_MODEL, draft_model=model if drafter == "two_model" else None)
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(spec.generate(ids, draft=draft(drafter), **options), expected)


def test_a_renamed_drafter_is_refused_with_its_new_name():
    spec = SelfSpecModel(tiny_llama())
    with pytest.raises(ValueError, match="'layer_skip' was renamed: 'skip_sublayers'"):
        spec.generate(prompt(4)[0], draft="layer_skip", max_new_tokens=2)


# Drafters of one's own


def made(monkeypatch, answer):
    """A registered drafter that answers `propose(state, limit)`, and a model to draft for."""

    class Own(Drafter):
        name = "own"

        @classmethod
        def from_config(cls, engine, config):
            return cls()

        def propose(self, state, limit):
            return answer(state, limit)

    monkeypatch.setitem(DRAFTERS, "own", Own)
    return SelfSpecModel(tiny_llama())


def ones(*shape):
    return torch.ones(shape, dtype=torch.long)


FAULTY = {
    "a tensor": (lambda state, limit: ones(2, 3), "returned Tensor, expected a Draft"),
    "one row": (lambda state, limit: Draft(ones(3)), r"of shape \(3,\), expected \[rows, n\]"),
    "other rows": (lambda state, limit: Draft(ones(1, 3)), r"\(1, 3\), .* with rows = 2"),
    "a list": (lambda state, limit: Draft([[1], [1]]), "tokens as list, .* see `Draft.of`"),
    "another device": (
        lambda state, limit: Draft(ones(2, 3).to("meta")),
        "tokens on meta, expected cpu",
    ),
    "a tree": (
        lambda state, limit: Draft(ones(2, 1), tree=Tree(ones(2, 1) * 0, 1, 1)),
        "returned a tree; set `makes_trees",
    ),
    "other counts": (
        lambda state, limit: Draft(ones(2, 3), counts=ones(1)),
        r"counts tensor\(\[1\]\), expected .* rows = 2",
    ),
    "floats": (lambda state, limit: Draft(ones(2, 3).float()), "of dtype torch.float32"),
    "too many": (lambda state, limit: Draft(ones(2, limit + 1)), "returned 5 .* limit = 4"),
    "other probs": (
        lambda state, limit: Draft(ones(2, 3), probs=torch.ones(2, VOCAB)),
        r"probs of shape \(2, 64\), expected \[rows, n, vocab\]",
    ),
    "probs of another vocabulary": (
        lambda state, limit: Draft(ones(2, 3), probs=torch.ones(2, 3, VOCAB - 1)),
        r"probs of shape \(2, 3, 63\), .* vocab = 64",
    ),
    "too deep": (
        lambda state, limit: Draft(ones(2, 3), depth=9, hidden=torch.ones(2, 1, 1)),
        "depth=9, expected 0 to",
    ),
    "other states": (
        lambda state, limit: Draft(ones(2, 3), depth=1, hidden=torch.ones(2, 5, 32)),
        r"hidden states of shape \(2, 5, 32\), .* m from 1 to 4",
    ),
    "no states": (lambda state, limit: Draft(ones(2, 3), depth=1), "depth=1 and no hidden states"),
    "unknown": (lambda state, limit: Draft(ones(2, 3) * VOCAB), r"token 64, .* ids in \[0, 63\]"),
    "negative": (lambda state, limit: Draft(-ones(2, 3)), r"token -1, expected token ids"),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_what_is_wrong_with_a_draft_is_said_by_the_drafters_name(monkeypatch, fault):
    answer, message = FAULTY[fault]
    spec = made(monkeypatch, answer)
    ids, mask = prompt(4, 4)
    with pytest.raises(ValueError, match=r"the drafter 'own' \(.*Own\) .*" + message):
        spec.generate(ids, attention_mask=mask, draft="own", max_new_tokens=6)


@pytest.mark.parametrize("drafter", ["early_exit", "tree", "auto"])
@pytest.mark.parametrize("sample", [False, True])
def test_an_lm_head_may_be_wider_than_the_config_says(drafter, sample):
    """As after embeddings were padded without telling the config."""
    model, vocab, double = tiny_llama(), VOCAB + 8, torch.float64
    model.set_input_embeddings(torch.nn.Embedding(vocab, 32, dtype=double))
    model.set_output_embeddings(torch.nn.Linear(32, vocab, bias=False, dtype=double))
    spec, (ids, mask) = SelfSpecModel(model), prompt(6)
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": sample}

    def written(draft):
        torch.manual_seed(0)
        return spec.generate(ids, **options, draft={"drafter": draft, "rule": "coupled"})

    assert written(drafter).equal(written("none"))


def test_a_drafter_that_is_defined_again_replaces_itself_and_no_other(monkeypatch):
    monkeypatch.setitem(DRAFTERS, "again", None)
    monkeypatch.delitem(DRAFTERS, "again")
    parts = {"name": "again", "from_config": classmethod(lambda cls, *_: cls()), "propose": None}
    first, second = (type("Again", (Drafter,), parts) for _ in range(2))
    register_drafter(first)
    assert register_drafter(second) is DRAFTERS["again"]
    other = type("Other", (Drafter,), parts)
    with pytest.raises(ValueError, match=r"already registered by .*Again; give Other"):
        register_drafter(other)


@pytest.mark.parametrize(
    ("bases", "parts", "message"),
    [
        ((), {"name": "part"}, "Part is not a drafter; make it a subclass of Drafter"),
        ((Drafter,), {"propose": None}, "Part lacks from_config, name; a drafter has"),
    ],
)
def test_a_class_that_is_no_whole_drafter_is_not_registered(bases, parts, message):
    with pytest.raises(ValueError, match=message):
        register_drafter(type("Part", bases, parts))


def test_a_function_is_no_drafter():
    with pytest.raises(ValueError, match="append is not a drafter; make it a subclass of Drafter"):
        register_drafter(append)


def test_a_config_that_makes_no_drafter_is_named(monkeypatch):
    monkeypatch.setattr(DRAFTERS["tree"], "from_config", lambda engine, config: None)
    with pytest.raises(ValueError, match=r"ExitTree.from_config returned NoneType, expected"):
        SelfSpecModel(tiny_llama()).generate(prompt(4)[0], draft="tree", max_new_tokens=2)


def test_an_unknown_drafter_may_be_one_that_is_not_imported():
    spec = SelfSpecModel(tiny_llama())
    with pytest.raises(ValueError, match=r"unknown drafter: 'mine'; .* import the module"):
        spec.generate(prompt(4)[0], draft="mine", max_new_tokens=2)


def append(state):
    state.context.text[0].append(1)


def overwrite(state):
    state.pending.fill_(1)


@pytest.mark.parametrize("change", [append, overwrite])
def test_watching_sees_a_drafter_that_changes_the_tokens_so_far(monkeypatch, watch, change):
    def answer(state, limit):
        change(state)
        return Draft(ones(1, 2))

    spec = made(monkeypatch, answer)
    watch(spec)
    with pytest.raises(AssertionError, match="'own' changed the tokens so far"):
        spec.generate(prompt(4)[0], draft="own", max_new_tokens=6, do_sample=False)


APART = {
    **{name: DRAFTS[name] for name in ("skip_sublayers", "halves", "clasp")},
    "fewer bits": draft("early_exit", exit_layer=4, precision="int8"),
    "fewer keys": draft("tree", exit_layer=2, window=3),
}


@pytest.mark.parametrize("how", APART)
def test_watching_lets_drafts_run_layers_that_verification_runs_again(watch, how):
    spec = SelfSpecModel(tiny_llama("sometimes"))
    watched = watch(spec)
    spec.generate(prompt(9)[0], draft=APART[how], max_new_tokens=24, do_sample=False)
    assert watched.rounds > 1 and spec.last_stats.drafted > 0


def test_watching_sees_a_pass_too_many(monkeypatch, watch):
    def answer(state, limit):
        spec.engine.shallow(state, state.pending, 1, 0)
        return Draft(ones(1, 2))

    spec = made(monkeypatch, answer)
    watch(spec)
    with pytest.raises(AssertionError, match=r"layer 0 ran over \[1, 3\] tokens, expected \[3\]"):
        spec.generate(prompt(4)[0], draft="own", max_new_tokens=6)
