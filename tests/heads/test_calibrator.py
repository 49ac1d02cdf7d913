"""Calibrators: their features, their fit, and how well they are calibrated."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from selfspec.heads import Calibrator
from training.exits.calibrate import (
    FEWEST,
    expected_calibration_error,
    fit_calibrator,
    reliability,
)

WEIGHT = torch.tensor([0.4, 0.7, -0.3, -0.25])


def scores(rows=6, vocab=40, seed=0, spread=3.0) -> Tensor:
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def drafts(count=4000, seed=0) -> tuple[Tensor, Tensor]:
    """Features of random drafts at four depths, and their true probabilities of acceptance."""
    parts = scores(count, seed=seed).chunk(4)
    features = torch.cat([Calibrator.features(part, depth) for depth, part in enumerate(parts)])
    return features, (features @ WEIGHT + 0.2).sigmoid()


def outcomes(probability: Tensor, seed=1) -> Tensor:
    coins = torch.rand(len(probability), generator=torch.Generator().manual_seed(seed))
    return (coins < probability).float()


# Features


def test_features_are_what_they_are_called():
    given_scores = scores()
    first, margin, entropy, depth = Calibrator.features(given_scores, 3).unbind(-1)
    probs = given_scores.softmax(-1)
    top = probs.sort(descending=True).values
    torch.testing.assert_close(first.exp(), top[:, 0])
    torch.testing.assert_close(margin.exp(), top[:, 0] / top[:, 1])
    torch.testing.assert_close(entropy, -(probs * probs.log()).sum(-1))
    assert (depth == 3).all()


def test_tokens_that_could_not_be_drafted_change_nothing():
    open_scores = scores()
    shut = torch.cat([open_scores, torch.full((6, 9), -torch.inf)], -1)
    torch.testing.assert_close(Calibrator.features(shut, 1), Calibrator.features(open_scores, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shut", [-torch.inf, -3e4])
def test_a_one_hot_distribution_has_finite_features(dtype, shut):
    one_hot = torch.full((2, 40), shut, dtype=dtype)
    one_hot[:, 7] = 0.0
    features = Calibrator.features(one_hot, 0)
    assert features.dtype == torch.float32
    torch.testing.assert_close(features, torch.tensor([[0.0, 20.0, 0.0, 0.0]]).expand(2, -1))


# Probabilities


def test_without_a_fit_it_is_the_top_token_against_the_second():
    top = scores().softmax(-1).sort(descending=True).values
    torch.testing.assert_close(Calibrator()(scores(), 5), top[:, 0] / (top[:, 0] + top[:, 1]))


@given(st.integers(0, 1000), st.floats(0, 100), st.integers(0, 500))
@settings(deadline=None, max_examples=30)
def test_a_probability_is_above_0_and_below_1(seed, spread, depth):
    fitted = fit_calibrator(*separable())
    for calibrator in (fitted, Calibrator()):
        found = calibrator(scores(seed=seed, spread=spread), depth)
        assert found.shape == (6,)
        assert ((found > 0) & (found < 1)).all()


@pytest.mark.parametrize("depth", [0, 2, 9])
def test_the_confidence_in_a_greedy_draft_is_what_the_calibrator_gives(depth):
    for calibrator in (Calibrator(), fit_calibrator(*drafts())):
        drafted_from = torch.cat([scores(), scores(spread=300.0), scores(spread=0.01)])
        expected = calibrator(drafted_from, depth)
        found = calibrator.confidence()(drafted_from[:, None], None, depth)
        torch.testing.assert_close(torch.tensor(found), expected)


def test_a_sampled_draft_is_as_sure_as_two_draws_are_to_agree():
    probs = torch.tensor([[[0.5, 0.3, 0.2]], [[1.0, 0.0, 0.0]], [[torch.nan] * 3]])
    found = Calibrator().confidence()(probs.log(), probs, 0)
    assert found == pytest.approx([0.38, 1.0, 0.0])


def test_a_draft_of_scores_that_are_nan_is_sure_to_be_rejected():
    for calibrator in (Calibrator(), fit_calibrator(*drafts())):
        (chance,) = calibrator.confidence()(torch.full((1, 1, 9), torch.nan), None, 0)
        assert chance < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_and_calibrator_may_be_in_half_precision(dtype):
    calibrator = fit_calibrator(*drafts())
    low = scores().to(dtype)
    expected = calibrator(low.float(), 2)
    torch.testing.assert_close(calibrator(low, 2), expected)
    # The calibrator's own tensors are rounded when a model is cast.
    torch.testing.assert_close(calibrator.to(dtype)(low, 2), expected, atol=0.05, rtol=0)


def test_depths_beyond_those_seen_are_taken_for_the_deepest():
    calibrator = fit_calibrator(*drafts())
    found = [calibrator(scores(), depth) for depth in range(7)]
    assert torch.equal(found[3], found[6])
    assert (found[0] > found[3]).all()


def test_it_is_all_in_its_state(tmp_path):
    fitted = fit_calibrator(*drafts())
    assert not list(fitted.parameters())
    save_file(fitted.state_dict(), tmp_path / "calibrator.safetensors")
    again = Calibrator()
    again.load_state_dict(load_file(tmp_path / "calibrator.safetensors"))
    assert torch.equal(again(scores(), 1), fitted(scores(), 1))


# The fit


def test_a_fit_finds_the_law_that_the_outcomes_follow():
    features, truth = drafts(20_000)
    fitted = fit_calibrator(features, outcomes(truth))
    unseen, law = drafts(4000, seed=9)
    assert (fitted.probability(unseen) - law).abs().mean() < 0.02


def test_expected_outcomes_as_labels_give_the_law_with_less_text():
    features, truth = drafts(400)
    unseen, law = drafts(4000, seed=9)
    soft = (fit_calibrator(features, truth).probability(unseen) - law).abs().mean()
    hard = (fit_calibrator(features, outcomes(truth)).probability(unseen) - law).abs().mean()
    assert soft < hard


def test_a_fit_is_where_the_loss_has_no_slope():
    """There the mean prediction is the mean outcome, whatever the features."""
    features, truth = drafts()
    accepted = outcomes(truth)
    found = fit_calibrator(features, accepted).probability(features)
    torch.testing.assert_close(found.mean(), accepted.mean(), atol=1e-3, rtol=0)


@torch.inference_mode()
def test_a_fit_is_the_same_again_and_needs_no_gradients():
    one, two = (fit_calibrator(*drafts()).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_unseen_drafts_are_better_calibrated_than_by_their_own_probability():
    features, truth = drafts()
    fitted = fit_calibrator(features, outcomes(truth))
    unseen, law = drafts(seed=9)
    accepted = outcomes(law, seed=2)
    own, calibrated = unseen[:, 0].exp(), fitted.probability(unseen)
    assert expected_calibration_error(calibrated, accepted) < 0.05
    assert expected_calibration_error(own, accepted) > 0.05
    assert sum(b.drafts for b in reliability(calibrated, accepted)) == len(unseen)


def separable() -> tuple[Tensor, Tensor]:
    features, _ = drafts(400)
    return features, (features[:, 1] > features[:, 1].median()).float()


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_drafts_of_one_fate_give_laplaces_rule(label):
    features, _ = drafts(400)
    found = fit_calibrator(features, torch.full((400,), label)).probability(features)
    expected = (400 * label + 1) / 402
    torch.testing.assert_close(found, torch.full((400,), expected), atol=2e-3, rtol=0)


def test_drafts_that_a_feature_tells_apart_give_a_finite_fit():
    features, accepted = separable()
    fitted = fit_calibrator(features, accepted)
    assert all(value.isfinite().all() for value in fitted.state_dict().values())
    assert ((fitted.probability(features) > 0.5) == (accepted > 0.5)).float().mean() > 0.97


def test_a_feature_that_never_changes_has_no_say():
    features, truth = drafts()
    features[:, 3] = 0
    fitted = fit_calibrator(features, outcomes(truth))
    assert fitted.weight[3] == 0
    assert torch.equal(fitted(scores(), 0), fitted(scores(), 4))


@pytest.mark.parametrize(
    ("features", "accepted", "message"),
    [
        (torch.zeros(FEWEST - 1, 4), torch.zeros(FEWEST - 1), "at least 32 .* got 31; .* text"),
        (torch.zeros(0, 4), torch.zeros(0), "got 0"),
        (torch.zeros(99, 3), torch.zeros(99), r"\[n, 4\] .* got \(99, 3\)"),
        (torch.zeros(99, 4), torch.zeros(98), r"got \(99, 4\) and \(98,\)"),
        (torch.full((99, 4), torch.nan), torch.zeros(99), "features must be finite"),
        (torch.zeros(99, 4), torch.full((99,), 1.5), r"in \[0, 1\], got 1.5 to 1.5"),
        (torch.zeros(99, 4), torch.full((99,), torch.nan), r"in \[0, 1\]"),
    ],
)
def test_what_cannot_be_fitted_is_refused(features, accepted, message):
    with pytest.raises(ValueError, match=message):
        fit_calibrator(features, accepted)


# Calibration error


def test_bins_share_out_the_predictions():
    predicted = torch.tensor([0.0, 0.05, 0.5, 0.55, 1.0])
    accepted = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    low, middle, high = reliability(predicted, accepted, bins=10)
    assert low == pytest.approx((0.025, 0.5, 2))
    assert middle == pytest.approx((0.525, 0.5, 2))
    assert high == pytest.approx((1.0, 1.0, 1))
    error = (2 * 0.475 + 2 * 0.025) / 5
    assert expected_calibration_error(predicted, accepted, 10) == pytest.approx(error)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1), st.integers(1, 20))
def test_an_error_is_between_that_of_the_means_and_that_of_every_draft(pairs, bins):
    predicted = torch.tensor([p for p, _ in pairs], dtype=torch.float64)
    accepted = torch.tensor([float(a) for _, a in pairs], dtype=torch.float64)
    error = expected_calibration_error(predicted, accepted, bins)
    assert error >= abs(float(predicted.mean() - accepted.mean())) - 1e-9
    assert error <= float((predicted - accepted).abs().mean()) + 1e-9
    assert sum(b.drafts for b in reliability(predicted, accepted, bins)) == len(pairs)


def test_the_truth_has_little_error_and_its_contrary_much():
    _, truth = drafts(20_000)
    accepted = outcomes(truth)
    assert expected_calibration_error(truth, accepted) < 0.02
    assert expected_calibration_error(1 - truth, accepted) > 0.1
    assert math.isclose(expected_calibration_error(accepted, accepted), 0)


def test_no_drafts_have_no_error():
    with pytest.raises(ValueError, match=r"n at least 1, got \(0,\)"):
        expected_calibration_error(torch.zeros(0), torch.zeros(0))
