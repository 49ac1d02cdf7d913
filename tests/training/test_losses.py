"""Losses are what their formulas say, exact where they claim it, and lean."""

import pytest
import torch
from conftest import VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from selfspec.config import parse
from training.exits.losses import LOSSES, LossSchedule, acceptance_rate, agreement, draft_losses

DISTANCES = ("kl", "tv", "acceptance")
SEEDS = st.integers(0, 10_000)
SPREADS = st.floats(0.01, 30)


def logits(*shape, seed=0, spread=2.0, dtype=torch.float64):
    source = torch.Generator().manual_seed(seed)
    return spread * torch.randn(*shape, generator=source, dtype=dtype)


def trimmed(count=VOCAB // 2, seed=3):
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:count]


def spread_out(draft_logits, ids):
    """Draft logits of the whole vocabulary that say what those of a trimmed one do."""
    full = draft_logits.new_full((*draft_logits.shape[:-1], VOCAB), -torch.inf)
    return full.index_copy(-1, ids, draft_logits)


def total(losses):
    return torch.stack(list(losses.values())).sum()


def slope(losses, draft):
    """Gradient of the losses' sum with respect to the draft's logits."""
    return torch.autograd.grad(total(losses), draft)[0]


# What they are


@given(SEEDS, SPREADS, SPREADS)
@settings(deadline=None)
def test_losses_are_their_formulas(seed, spread, other):
    target, draft = logits(5, VOCAB, seed=seed, spread=spread), logits(5, VOCAB, seed=seed + 1)
    draft = draft * other
    tokens = torch.arange(5)
    p, q = target.softmax(-1), draft.softmax(-1)
    found = draft_losses(LOSSES, target, draft, tokens)
    ratio = target.log_softmax(-1) - draft.log_softmax(-1)
    overlap = torch.minimum(p, q).sum(-1)
    torch.testing.assert_close(found["ce"], -draft.log_softmax(-1)[tokens, tokens])
    torch.testing.assert_close(found["kl"], (p * ratio).sum(-1))
    torch.testing.assert_close(found["tv"], (p - q).abs().sum(-1) / 2)
    torch.testing.assert_close(found["acceptance"], -overlap.log())
    torch.testing.assert_close(acceptance_rate(target, draft), overlap)


@given(SEEDS, SPREADS)
@settings(deadline=None)
def test_acceptance_is_bounded_by_the_divergence(seed, spread):
    """Pinsker's inequality: tv² ≤ KL / 2, so α ≥ 1 - √(KL / 2)."""
    target = logits(8, VOCAB, seed=seed)
    draft = target + logits(8, VOCAB, seed=seed + 1, spread=spread)
    divergence = draft_losses(["kl"], target, draft)["kl"]
    rate = acceptance_rate(target, draft)
    assert (rate >= 1 - (divergence / 2).sqrt() - 1e-12).all()
    assert ((rate > 0) & (rate <= 1)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_draft_that_is_the_target_loses_nothing_and_is_always_accepted(dtype):
    same = logits(3, 4, VOCAB).to(dtype)
    for name, loss in draft_losses(DISTANCES, same, same).items():
        assert loss.shape == (3, 4), name
        assert ((loss >= 0) & (loss < 1e-5)).all(), name
    torch.testing.assert_close(acceptance_rate(same, same), torch.ones(3, 4), check_dtype=False)
    assert agreement(same, same).all()


@pytest.mark.parametrize("name", DISTANCES)
def test_the_target_is_where_a_distance_has_no_slope(name):
    target = logits(4, VOCAB)
    draft = target.clone().requires_grad_()
    assert slope(draft_losses([name], target, draft), draft).abs().max() < 1e-12


# Gradients


@pytest.mark.parametrize("ids", [None, trimmed()], ids=["whole", "trimmed"])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_agree_with_finite_differences(name, ids):
    target = logits(3, VOCAB)
    draft = logits(3, VOCAB if ids is None else len(ids), seed=1).requires_grad_()
    tokens = torch.tensor([1, int(trimmed()[0]), 5])

    def loss(draft):
        return draft_losses([name], target, draft, tokens, ids)[name]

    assert torch.autograd.gradcheck(loss, draft)


def test_gradients_reach_the_draft_alone():
    target, draft = logits(3, VOCAB).requires_grad_(), logits(3, VOCAB, seed=1).requires_grad_()
    total(draft_losses(DISTANCES, target, draft)).backward()
    assert target.grad is None and draft.grad is not None


def test_acceptance_goes_where_total_variation_goes_at_the_speed_of_one_over_alpha():
    target, draft = logits(6, VOCAB), logits(6, VOCAB, seed=1).requires_grad_()
    along, slow = (slope(draft_losses([n], target, draft), draft) for n in ("acceptance", "tv"))
    torch.testing.assert_close(along * acceptance_rate(target, draft)[:, None], slow)


@pytest.mark.parametrize("name", DISTANCES)
def test_following_a_loss_raises_acceptance(name):
    target, draft = logits(6, VOCAB), logits(6, VOCAB, seed=1).requires_grad_()
    before = acceptance_rate(target, draft).mean()
    for _ in range(20):
        step = 0.5 * slope(draft_losses([name], target, draft), draft)
        draft = (draft - step).detach().requires_grad_()
    assert acceptance_rate(target, draft).mean() > before


# Trimmed vocabularies


def test_over_a_trimmed_vocabulary_the_draft_is_zero_outside():
    ids, target, draft = trimmed(), logits(40, VOCAB), logits(40, VOCAB // 2, seed=1)
    full = spread_out(draft, ids)
    part = draft_losses(["tv", "acceptance"], target, draft, vocab_ids=ids)
    whole = draft_losses(["tv", "acceptance"], target, full)
    torch.testing.assert_close(part, whole)
    torch.testing.assert_close(acceptance_rate(target, draft, ids), acceptance_rate(target, full))
    assert torch.equal(agreement(target, draft, ids), agreement(target, full))
    outside = 1 - target.softmax(-1)[:, ids].sum(-1)
    assert (part["tv"] >= outside).all()


def test_divergence_over_a_trimmed_vocabulary_is_from_the_target_within_it():
    ids, target, draft = trimmed(), logits(9, VOCAB), logits(9, VOCAB // 2, seed=1)
    part = draft_losses(["kl"], target, draft, vocab_ids=ids)["kl"]
    torch.testing.assert_close(part, draft_losses(["kl"], target[:, ids], draft)["kl"])


def test_cross_entropy_leaves_out_tokens_that_are_none_or_outside():
    ids = trimmed()
    tokens = torch.tensor([*range(VOCAB), -100])
    inside = torch.isin(tokens, ids)
    target, draft = logits(VOCAB + 1, VOCAB), logits(VOCAB + 1, len(ids), seed=1)
    part = draft_losses(["ce"], target, draft, tokens, ids)["ce"]
    whole = -spread_out(draft, ids).log_softmax(-1)
    torch.testing.assert_close(part[inside], whole[inside].gather(-1, tokens[inside, None])[:, 0])
    assert (part[~inside] == 0).all()
    assert draft_losses(["ce"], target, logits(VOCAB + 1, VOCAB), tokens)["ce"][-1] == 0


def test_a_trimmed_vocabulary_that_leaves_nothing_out_is_the_whole_one():
    ids, target, draft = trimmed(VOCAB), logits(7, VOCAB), logits(7, VOCAB, seed=1)
    tokens = torch.arange(7)
    whole = draft_losses(LOSSES, target, draft, tokens)
    torch.testing.assert_close(draft_losses(LOSSES, target, draft[:, ids], tokens, ids), whole)


# Numbers


@pytest.mark.parametrize("name", DISTANCES)
def test_losses_and_gradients_stay_finite_where_the_distributions_hardly_meet(name):
    """Σ min(p, q) is far below the least float32 here."""
    target, draft = logits(1, VOCAB).float(), logits(1, VOCAB, seed=1).float()
    target[0, 0] = draft[0, 1] = 300.0
    draft.requires_grad_()
    losses = draft_losses([name], target, draft)
    gradient = slope(losses, draft)
    assert losses[name].isfinite().all() and gradient.isfinite().all()
    if name == "acceptance":
        assert losses[name].item() > 200 and gradient.abs().max() > 0.1


@pytest.mark.parametrize("name", LOSSES)
def test_tokens_that_target_and_draft_exclude_change_nothing(name):
    target, draft = logits(3, VOCAB), logits(3, VOCAB, seed=1)
    more = torch.full((3, 5), -torch.inf, dtype=torch.float64)
    wide = torch.cat([draft, more], -1).requires_grad_()
    tokens = torch.arange(3)
    expected = draft_losses([name], target, draft, tokens)
    found = draft_losses([name], torch.cat([target, more], -1), wide, tokens)
    torch.testing.assert_close(found, expected)
    assert slope(found, wide).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_read_in_float32_under_autocast_too(dtype):
    target, draft = logits(5, VOCAB).to(dtype), logits(5, VOCAB, seed=1).to(dtype)
    tokens = torch.arange(5)
    expected = draft_losses(LOSSES, target.float(), draft.float(), tokens)
    with torch.autocast("cpu", torch.bfloat16):
        found = draft_losses(LOSSES, target, draft.requires_grad_(), tokens)
        assert slope(found, draft).dtype == dtype
    assert all(loss.dtype == torch.float32 for loss in found.values())
    torch.testing.assert_close(found, expected)


class Buffers(TorchDispatchMode):
    """Counts the tensors as large as `inputs` that were made besides them and are still held."""

    def __init__(self, *inputs):
        super().__init__()
        self.size = min(tensor.nbytes for tensor in inputs)
        self.inputs = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        self.made = {}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        results = function(*arguments, **(options or {}))
        for result in results if isinstance(results, tuple | list) else [results]:
            if isinstance(result, torch.Tensor) and result.nbytes >= self.size:
                storage = result.untyped_storage()
                if storage.data_ptr() not in self.inputs:
                    self.made[storage.data_ptr()] = StorageWeakRef(storage)
        return results

    def held(self):
        return sum(not storage.expired() for storage in self.made.values())


@pytest.mark.parametrize("wanted", [["kl"], ["acceptance"], ["kl", "acceptance"], list(LOSSES)])
def test_between_the_passes_two_buffers_are_held_however_many_losses_are_wanted(wanted):
    target = logits(32, VOCAB, dtype=torch.float32)
    draft = logits(32, VOCAB, seed=1, dtype=torch.float32).requires_grad_()
    with Buffers(target, draft) as buffers:
        losses = draft_losses(wanted, target, draft, torch.arange(32))
    assert buffers.made and losses
    assert buffers.held() <= 2


# Schedules


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_weight_moves_from_the_first_loss_to_the_second(switch, blend, progress):
    schedule = LossSchedule(then="acceptance", switch=switch, blend=blend * (1 - switch))
    weights = schedule.weights(progress)
    assert sum(weights.values()) == pytest.approx(1)
    assert all(0 < weight <= 1 for weight in weights.values())
    later = schedule.weights(min(1.0, progress + 0.1))
    assert later.get("acceptance", 0) >= weights.get("acceptance", 0)
    assert schedule.weights(0.0) == {"kl": 1.0} or switch == 0
    assert "acceptance" in schedule.weights(1.0) or switch == 1


def test_a_blend_is_linear_and_none_is_a_step():
    blended = LossSchedule(then="acceptance", switch=0.5, blend=0.2)
    assert blended.weights(0.55) == pytest.approx({"kl": 0.75, "acceptance": 0.25})
    assert blended.weights(0.8) == {"acceptance": 1.0}
    stepped = LossSchedule(loss="ce", then="acceptance", switch=0.5, blend=0)
    assert stepped.weights(0.4999) == {"ce": 1.0}
    assert stepped.weights(0.5) == {"acceptance": 1.0}
    assert LossSchedule(loss="tv").weights(0.99) == {"tv": 1.0}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"loss": "kll"}, "loss: .*'kl'"),
        ({"then": "kl"}, "then: .*'acceptance'"),
        ({"loss": "acceptance", "then": "acceptance"}, "then must differ"),
        ({"then": "acceptance", "switch": 0.9, "blend": 0.2}, "at most 1, got 0.9"),
        ({"swich": 0.5}, "did you mean 'switch'"),
    ],
)
def test_a_schedule_that_cannot_be_meant_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        parse(LossSchedule, config, "losses")


@pytest.mark.parametrize(
    ("wanted", "draft", "tokens", "ids", "message"),
    [
        (["klm"], logits(3, VOCAB), None, None, "did you mean 'kl'"),
        (["kl"], logits(3, 5), None, None, r"must be \(3, 64\) .* no vocab_ids, got \(3, 5\)"),
        (["kl"], logits(3, 5), None, trimmed(6), r"must be \(3, 6\)"),
        (["kl"], logits(4, VOCAB), None, None, r"got \(4, 64\)"),
        (["ce"], logits(3, VOCAB), None, None, r"next_tokens of shape \(3,\), got None"),
        (["ce"], logits(3, VOCAB), torch.arange(4), None, r"shape \(3,\), got \(4,\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(wanted, draft, tokens, ids, message):
    with pytest.raises(ValueError, match=message):
        draft_losses(wanted, logits(3, VOCAB), draft, tokens, ids)


@given(SEEDS)
@settings(deadline=None)
def test_tokens_that_a_head_never_drafts_are_as_outside_a_trimmed_vocabulary(seed):
    target, ids = logits(5, VOCAB, seed=seed), trimmed(seed=seed)
    few = logits(5, len(ids), seed=seed + 1)
    tokens = torch.arange(5)
    expected = draft_losses(LOSSES, target, few.requires_grad_(), tokens, ids)
    found = draft_losses(LOSSES, target, spread_out(few, ids), tokens)
    for name, loss in found.items():
        torch.testing.assert_close(loss, expected[name])
    torch.testing.assert_close(slope(found, few), slope(expected, few))
