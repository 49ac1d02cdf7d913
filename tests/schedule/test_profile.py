"""Profiles: read back as they were written, taken where they hold, left alone where they do not."""

import warnings

import pytest
import torch
from conftest import EXIT, greedy, prompt, tiny_llama
from head_tools import own_head
from transformers import GenerationConfig

from selfspec import DEMO_MODEL, DraftConfig, SelfSpecModel
from selfspec.heads import save_heads
from selfspec.schedule.profile import (
    PROFILE_NAME,
    Measured,
    Place,
    Profile,
    default_path,
    find_profile,
)

DRAFT = DraftConfig(exit_layer=3, num_draft_tokens=2)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def decoder_of(model):
    return SelfSpecModel(model).decoder


def profile_for(model, draft=DRAFT, **place):
    here = Place.of(decoder_of(model)).model_copy(update=place)
    return Profile(draft=draft, place=here)


def filled(model):
    chain = Measured(
        name="lens 2 × 3",
        draft=DraftConfig(head="lens", exit_layer=2, num_draft_tokens=3),
        tokens_per_second=11.5,
        speedup=1.2,
        acceptance_rate=0.5,
        mean_accepted_length=1.7,
    )
    plain = Measured(name="none", draft=DRAFT, tokens_per_second=9.5, speedup=1.0, equal=True)
    return profile_for(model).model_copy(
        update={
            "batch": 2,
            "screening": [chain],
            "validation": [chain, plain],
            "left_out": {"two_model": "no draft_model"},
        }
    )


def drafted(spec, **options):
    spec.generate(prompt(5)[0], max_new_tokens=9, do_sample=False, **options)
    return spec.last_trace


def test_a_profile_reads_back_as_it_was_written(tmp_path):
    profile = filled(tiny_llama())
    path = tmp_path / "deep" / "profile.json"
    profile.save(path)
    assert Profile.load(path) == profile
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_profile(tmp_path, monkeypatch):
    path, profile = tmp_path / "profile.json", filled(tiny_llama())
    profile.save(path)

    def fail(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr("pathlib.Path.write_text", fail)
    with pytest.raises(OSError, match="no space"):
        profile_for(tiny_llama()).save(path)
    assert Profile.load(path) == profile


@pytest.mark.parametrize("as_file", [False, True])
def test_generate_drafts_as_the_profile_says_unless_it_is_told(as_file, tmp_path):
    model = tiny_llama()
    given = profile_for(model)
    if as_file:
        given.save(tmp_path / "profile.json")
        given = tmp_path / "profile.json"
    spec = SelfSpecModel(model, profile=given)
    assert spec.default_draft == DRAFT
    assert drafted(spec) == drafted(SelfSpecModel(model), draft=DRAFT)
    other = {"exit_layer": 1, "num_draft_tokens": 4}
    assert drafted(spec, draft=other) == drafted(SelfSpecModel(model), draft=other)
    ids = prompt(5)[0]
    assert torch.equal(
        spec.generate(ids, max_new_tokens=9, do_sample=False), greedy(model, ids, max_new_tokens=9)
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_profile_is_used_as_it_was_made_greedily_or_sampling(temperature, sampled):
    model = tiny_llama()
    profile = profile_for(model).model_copy(update={"temperature": temperature})
    spec = SelfSpecModel(model, profile=profile)
    fits = sampled == (temperature > 0)
    assert spec.draft_for(sampled) == (DRAFT if fits else spec.engine.default_draft)

    def trace(**options):
        torch.manual_seed(0)
        spec.generate(prompt(5)[0], max_new_tokens=9, do_sample=sampled, **options)
        return spec.last_trace

    assert (trace() == trace(draft=DRAFT)) == fits


def test_a_call_samples_as_the_model_does_unless_it_is_told():
    model = tiny_llama()
    model.generation_config.do_sample = True
    sampling = profile_for(model).model_copy(update={"temperature": 1.0})
    spec, short = SelfSpecModel(model, profile=sampling), GenerationConfig(max_new_tokens=9)

    def trace(**options):
        torch.manual_seed(0)
        spec.generate(prompt(5)[0], generation_config=short, **options)
        return spec.last_trace

    assert trace() == trace(draft=DRAFT)
    assert trace(do_sample=False) != trace(do_sample=False, draft=DRAFT)


def saved(tmp_path, model):
    model.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_profile_beside_the_checkpoint_or_the_heads_is_found(tmp_path):
    model = tiny_llama(dtype=torch.float32)
    folder, heads = saved(tmp_path, model), tmp_path / "heads"
    assert SelfSpecModel.from_pretrained(folder).profile is None
    beside = profile_for(model)
    beside.save(default_path(decoder_of(model), folder))
    assert (folder / PROFILE_NAME).is_file()
    assert SelfSpecModel.from_pretrained(folder).profile == beside
    save_heads([own_head(decoder_of(model), "lens", EXIT)], decoder_of(model), heads)
    assert SelfSpecModel.from_pretrained(folder, heads).profile == beside
    nearer = profile_for(model, DraftConfig(exit_layer=EXIT, head="lens"))
    nearer.save(heads / PROFILE_NAME)
    assert SelfSpecModel.from_pretrained(folder, heads).profile == nearer
    assert SelfSpecModel.from_pretrained(folder, heads, profile=beside).profile == beside


@pytest.mark.parametrize("failed", [False, True])
def test_a_profile_that_did_not_try_a_head_is_ignored_with_one_warning(tmp_path, failed):
    """Else a head that is fitted after tuning would never draft."""
    model, lens = tiny_llama(dtype=torch.float32), f"lens {EXIT}"
    folder, heads = saved(tmp_path, model), tmp_path / "heads"
    save_heads([own_head(decoder_of(model), "lens", EXIT)], decoder_of(model), heads)
    shared = Measured(name=f"shared {EXIT} × 2", draft=DRAFT, tokens_per_second=1, speedup=1)
    before = profile_for(model).model_copy(update={"screening": [shared]})
    before.save(folder / PROFILE_NAME)
    assert SelfSpecModel.from_pretrained(folder).profile == before
    with pytest.warns(UserWarning, match=f"was made without the head {lens}; run") as seen:
        assert SelfSpecModel.from_pretrained(folder, heads).profile is None
    assert len(seen) == 1
    tried = f"{lens} × 2"
    also = (
        {"left_out": {tried: "why"}}
        if failed
        else {"screening": [shared, shared.model_copy(update={"name": tried})]}
    )
    after = before.model_copy(update=also)
    after.save(folder / PROFILE_NAME)
    assert SelfSpecModel.from_pretrained(folder, heads).profile == after


def test_where_nothing_can_be_written_the_profile_goes_to_the_users_cache(tmp_path):
    model = tiny_llama(dtype=torch.float32)
    decoder = decoder_of(model)
    for folder in (DEMO_MODEL, None, "some/id"):
        assert default_path(decoder, folder).is_relative_to(tmp_path / "cache" / "selfspec")
    assert find_profile(decoder, ["some/id"]) is None
    profile = profile_for(model)
    profile.save(default_path(decoder, None))
    assert SelfSpecModel.from_pretrained(saved(tmp_path, model)).profile == profile
    other = tiny_llama(dtype=torch.float32, seed=5)
    assert find_profile(decoder_of(other), []) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"device": "Abacus"}, "it was made for device 'Abacus', here it is"),
        ({"dtype": "bfloat16"}, "it was made for dtype 'bfloat16', here it is 'float64'"),
        ({"kernels": "compiled"}, "it was made for kernels 'compiled', here it is 'direct'"),
        ({"target": {}}, "it was made for another target: model_type is 'llama' here"),
    ],
)
def test_a_profile_of_another_place_is_ignored_with_one_warning(change, says, tmp_path):
    model = tiny_llama()
    profile = profile_for(model, **change)
    with pytest.warns(UserWarning, match="profile ignored: ") as seen:
        spec = SelfSpecModel(model, profile=profile)
    assert len(seen) == 1 and says in str(seen[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert drafted(spec) == drafted(SelfSpecModel(model))
    assert spec.profile is None


def test_weights_of_another_target_are_told_apart():
    profile = profile_for(tiny_llama(seed=1))
    with pytest.warns(UserWarning, match=r"the weights differ \(first in"):
        assert SelfSpecModel(tiny_llama(seed=2), profile=profile).profile is None


def test_a_profile_whose_head_is_not_there_is_ignored_with_one_warning():
    model = tiny_llama()
    profile = profile_for(model, DraftConfig(exit_layer=EXIT, head="lens"))
    with pytest.warns(UserWarning, match="its draft cannot be made: no 'lens' head") as seen:
        assert SelfSpecModel(model, profile=profile).profile is None
    assert len(seen) == 1


DAMAGED = {
    "cut short": ('{"draft": {', "is not valid JSON"),
    "no object": ("[1]", "must hold a JSON object, got a list"),
    "of tomorrow": ('{"format_version": 99}', "has format_version 99, this version reads 2"),
    "without version": ("{}", "has format_version None"),
    "incomplete": ('{"format_version": 2}', "place: Field required"),
    "unknown key": ('{"format_version": 2, "drafts": 1}', "did you mean 'draft'?"),
}


@pytest.mark.parametrize(("text", "says"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_profile_is_an_error_when_it_was_asked_for_and_a_warning_when_found(
    text, says, tmp_path
):
    folder = saved(tmp_path, tiny_llama(dtype=torch.float32))
    (folder / PROFILE_NAME).write_text(text)
    with pytest.raises(ValueError) as error:
        SelfSpecModel.from_pretrained(folder, profile=folder / PROFILE_NAME)
    assert says in str(error.value) and PROFILE_NAME in str(error.value)
    with pytest.warns(UserWarning, match="profile ignored: ") as seen:
        assert SelfSpecModel.from_pretrained(folder).profile is None
    assert len(seen) == 1


def test_a_profile_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no profile at .*; `selfspec tune` writes one"):
        SelfSpecModel(tiny_llama(), profile=tmp_path / "none.json")
