"""Draws that belong to places: a seed gives one text, however it is drafted, and the right ones."""

from __future__ import annotations

import pytest
import torch
from conftest import prompt, tiny_llama
from distribution_tools import POINTWISE, WARPED, draws, exact
from distribution_tools import target as target
from drafter_tools import COUNT, SEED, draft, drawn_text
from families import ALL_ROWS, CASES_BY_FAMILY, LONG_ROW, model_of, prompts
from law_tools import p_value
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper

from selfspec import SelfSpecModel
from selfspec.drafters import DRAFTERS
from selfspec.sampling.coupled_noise import Noise

FAMILIES = ("llama", "gpt2", "gemma3_text", "mistral", "mixtral", "gpt_neox")


class Added(LogitsProcessor):
    """Adds the noise of places, so that the largest score is what is drawn there."""

    def __init__(self, ids: Tensor):
        source = torch.Generator().manual_seed(SEED)
        self.noise = Noise([ids.shape[1]] * len(ids), ids.device, source)

    def __call__(self, input_ids, scores):
        rows = range(len(input_ids))
        lengths = dict.fromkeys(rows, input_ids.shape[1])
        return scores + self.noise.ahead(rows, lengths, 1, scores.shape[-1])[:, 0]


def own_text(model, ids, mask, temperature=0.8, **options):
    """What the model's own `generate` draws with that noise."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature), Added(ids)])
    return model.generate(
        ids, attention_mask=mask, do_sample=False, logits_processor=processors, **options
    )


@pytest.mark.matrix
@pytest.mark.parametrize("rows", [LONG_ROW, ALL_ROWS], ids=["one row", "ragged"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_seed_gives_the_text_of_the_models_own_generate(name, rows):
    model = model_of(name, CASES_BY_FAMILY[name])
    tokens, mask = (part[rows] for part in prompts("left"))
    expected = own_text(model, tokens, mask, max_new_tokens=COUNT)
    for drafter in sorted(DRAFTERS):
        spec = SelfSpecModel(model, draft_model=model if drafter == "two_model" else None)
        how = draft(drafter, rule="coupled")
        assert torch.equal(drawn_text(spec, tokens, mask, how, max_new_tokens=COUNT), expected)


def test_another_seed_gives_another_text():
    spec, (ids, mask) = SelfSpecModel(tiny_llama()), prompt(6)
    texts = [
        spec.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            max_new_tokens=COUNT,
            generator=torch.Generator().manual_seed(seed),
            draft={"rule": "coupled"},
        )
        for seed in (1, 2)
    ]
    assert not torch.equal(*texts)


@pytest.mark.parametrize("drafter", ["early_exit", "tree", "prompt_lookup", "none"])
def test_processors_that_read_the_text_and_rows_that_end(drafter):
    model, (ids, mask) = tiny_llama(), prompt(9, 5, 2)
    options = {"repetition_penalty": 1.3, "eos_token_id": [3, 5, 9, 20], "max_new_tokens": 40}
    expected = own_text(model, ids, mask, 1.2, **options)
    assert len(set(((expected[:, 9:] == 0).sum(1)).tolist())) > 1  # rows end at other places
    how = {"drafter": drafter, "rule": "coupled"}
    assert torch.equal(drawn_text(SelfSpecModel(model), ids, mask, how, 1.2, **options), expected)


def test_a_row_does_not_depend_on_the_rows_beside_it():
    spec, (ids, mask) = SelfSpecModel(tiny_llama()), prompt(9, 5, 2)
    how = {"rule": "coupled"}
    alone = drawn_text(spec, ids[:1], mask[:1], how, max_new_tokens=COUNT)
    assert torch.equal(drawn_text(spec, ids, mask, how, max_new_tokens=COUNT)[:1], alone)


def test_a_drafter_that_is_the_target_is_always_right():
    model = tiny_llama()
    spec, (ids, mask) = SelfSpecModel(model, draft_model=model), prompt(6)
    drawn_text(spec, ids, mask, {"drafter": "two_model", "rule": "coupled"}, max_new_tokens=20)
    assert spec.last_stats.accepted == spec.last_stats.drafted > 0


def test_scores_are_those_of_the_target_without_noise():
    spec, (ids, mask) = SelfSpecModel(tiny_llama()), prompt(6)
    options = {"max_new_tokens": COUNT, "return_dict_in_generate": True, "output_scores": True}
    out = drawn_text(spec, ids, mask, {"rule": "coupled"}, **options)
    with torch.no_grad():
        logits = spec.model(out.sequences).logits[0, ids.shape[1] - 1 : -1] / 0.8
    assert torch.allclose(torch.cat(out.scores), logits.float(), atol=1e-5)


# The noise


def test_places_have_the_same_noise_however_many_are_asked_for():
    def ahead(*asked):
        noise, device = Noise([4], torch.device("cpu"), torch.Generator().manual_seed(1)), "cpu"
        return [noise.ahead([0], {0: length}, width, 7)[0].to(device) for length, width in asked]

    (long,) = ahead((4, 30))
    for asked in ([(4, 1), (5, 3), (9, 12)], [(4, 20), (4, 2), (20, 9)]):
        for (length, width), noise in zip(asked, ahead(*asked), strict=True):
            assert torch.equal(noise, long[length - 4 :][:width])
    assert len(set(long[:, 0].tolist())) == 30


@pytest.mark.matrix
@pytest.mark.parametrize("options", [POINTWISE, WARPED], ids=["pointwise", "prefix"])
@pytest.mark.parametrize("drafter", ["early_exit", "tree"])
def test_texts_of_many_seeds_follow_the_target(target, options, drafter):
    how = draft(drafter, exit_layer=1, num_draft_tokens=2, rule="coupled")
    counts, acceptance = draws(target, options, how, total=6_000)
    assert 0.05 < acceptance < 0.99
    assert p_value(counts, exact(target, options)) > 1e-3


def test_noise_that_two_places_share_would_be_seen(target, monkeypatch):
    ahead = Noise.ahead

    def shared(self, rows, lengths, width, vocab):
        even = [length - length % 2 for length in lengths]
        found = ahead(self, rows, even, width + 1, vocab)
        first = [lengths[row] % 2 for row in rows]
        places = torch.tensor([[(n + i) // 2 * 2 for i in range(width)] for n in first])
        return found.gather(1, places[..., None].expand(-1, -1, vocab))

    monkeypatch.setattr(Noise, "ahead", shared)
    how = draft("early_exit", exit_layer=1, num_draft_tokens=2, rule="coupled")
    counts, _ = draws(target, POINTWISE, how, total=6_000)
    assert p_value(counts, exact(target, POINTWISE)) < 1e-6
