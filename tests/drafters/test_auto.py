"""The drafter that chooses: exact whatever it chooses, and what it learns outlives the call."""

import itertools

import pytest
import torch
from conftest import AGREEMENT, EXIT, contrary, greedy, prompt, tiny_llama
from head_tools import assert_reads_as_forced, close_in_double, own_head, record

from selfspec import DraftConfig, SelfSpecModel
from selfspec.decoder import Decoder
from selfspec.drafters.auto import Auto
from selfspec.heads import Calibrator
from selfspec.schedule.rounds import Batch

IDS, MASK = prompt(4, 11, 7)


def take_turns(monkeypatch, kinds):
    """Every kind of way is chosen in turn; the list of what was."""
    used, order = [], itertools.cycle(kinds)

    def choose(batch, ways):
        kind = next(order)
        way = {"chain": batch.chain, "plain": batch.plain, "copy": batch.copying(1)}[kind]
        used.append(kind)
        return way

    monkeypatch.setattr(Batch, "choose", choose)
    return used


def fitted(model, kinds):
    decoder = Decoder(model)
    return [own_head(decoder, kind, layer) for kind, layer in kinds]


AUTO = DraftConfig(drafter="auto")
HEADS = [("fused", EXIT), ("block", 1), ("lens", 3)]


@pytest.mark.matrix
@pytest.mark.parametrize("agreement", AGREEMENT)
@pytest.mark.parametrize("rows", [slice(0, 1), slice(0, 3)], ids=["one row", "ragged"])
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2}], ids=["plain", "penalised"])
@pytest.mark.parametrize("head", HEADS)
def test_greedy_tokens_are_the_models_own_whatever_drafts(
    monkeypatch, agreement, rows, options, head
):
    model = tiny_llama(agreement)
    used = take_turns(monkeypatch, ["chain", "plain", "copy", "chain", "copy"])
    spec = SelfSpecModel(model, fitted(model, [head]))
    ids, mask = IDS[rows], MASK[rows]
    out = spec.generate(ids, attention_mask=mask, max_new_tokens=40, draft="auto", **options)
    assert torch.equal(out, greedy(model, ids, mask, max_new_tokens=40, **options))
    assert len(set(used)) == 3


@pytest.mark.matrix
@pytest.mark.parametrize("agreement", AGREEMENT)
@pytest.mark.parametrize("rows", [slice(0, 1), slice(0, 3)], ids=["one row", "ragged"])
def test_greedy_tokens_are_the_models_own_whatever_the_clock_says(agreement, rows):
    model = tiny_llama(agreement)
    spec = SelfSpecModel(model, fitted(model, HEADS))
    ids, mask = IDS[rows], MASK[rows]
    for _ in range(2):
        out = spec.generate(ids, attention_mask=mask, max_new_tokens=40, draft="auto")
        assert torch.equal(out, greedy(model, ids, mask, max_new_tokens=40))


@pytest.mark.parametrize("kind", [("fused", 0), ("fused", EXIT), ("block", 1)])
def test_a_head_reads_what_others_drafted_as_fitting_read_it(monkeypatch, kind):
    model = tiny_llama("sometimes")
    (head,) = fitted(model, [kind])
    seen = record(monkeypatch)
    take_turns(monkeypatch, ["plain", "plain", "chain", "copy", "chain"])
    spec = SelfSpecModel(model, [head])
    spec.generate(IDS, attention_mask=MASK, max_new_tokens=30, draft="auto")
    assert_reads_as_forced(spec.decoder, head, seen, close_in_double)


@pytest.mark.parametrize("sampled", [True, False])
def test_what_is_learned_outlives_the_call(monkeypatch, sampled):
    take_turns(monkeypatch, ["chain", "plain", "copy"])
    model = tiny_llama("sometimes")
    spec = SelfSpecModel(model, fitted(model, [("block", EXIT)]))
    known = spec.engine.rounds(AUTO, head=spec.heads[0])
    for _ in range(2):
        spec.generate(IDS, attention_mask=MASK, max_new_tokens=20, draft="auto", do_sample=sampled)
    assert spec.engine.rounds(AUTO, head=spec.heads[0]) is known
    batch = known.batch(3, sampled)
    assert batch.verification.step.seen and batch.chain.draft.seen
    fresh = known.batch(8, sampled)
    assert batch.copying(1).acceptance.rate(0) != fresh.copying(1).acceptance.rate(0)
    assert not known.batch(3, not sampled).verification.step.seen


def test_a_head_that_is_always_wrong_is_hardly_asked():
    spec = contrary(tiny_llama("sometimes"), EXIT)
    draft = {"drafter": "auto", "exit_layer": EXIT}
    spec.generate(IDS[:1], max_new_tokens=20, draft=draft)
    spec.generate(IDS[:1], max_new_tokens=100, draft=draft)
    drafted = sum(step.accepted < len(step.drafted) for step in spec.last_trace.rows[0])
    assert drafted < 50


def test_the_head_that_is_expected_to_be_fastest_drafts():
    model = tiny_llama("sometimes")
    heads = fitted(model, [("block", EXIT), ("lens", 1)])
    spec = SelfSpecModel(model, heads)
    drafter = Auto.from_config(spec.engine, AUTO)
    assert drafter.reader.head is heads[1], "it runs fewer layers"
    known = spec.engine.rounds(AUTO, head=heads[1])
    for _ in range(50):
        for sampled in (False, True):
            known.acceptance[sampled].learn(0, accepted=False)
    drafter = Auto.from_config(spec.engine, AUTO)
    assert drafter.reader.head is heads[0]


@pytest.mark.parametrize("asked", [None, 2, 20])
@pytest.mark.parametrize("kind", ["lens", "medusa"])
def test_a_chain_is_judged_by_the_drafts_that_it_may_have(kind, asked):
    model = tiny_llama("sometimes")
    spec = SelfSpecModel(model, fitted(model, [(kind, 0 if kind == "medusa" else EXIT)]))
    config = DraftConfig(drafter="auto", num_draft_tokens=asked)
    drafter = Auto.from_config(spec.engine, config)
    most = min(config.most_tokens, spec.heads[0].longest or config.most_tokens)
    assert drafter.stop.rounds.batch(1, False).chain.longest == drafter.longest == most


def test_one_head_may_be_asked_for():
    model = tiny_llama("sometimes")
    heads = fitted(model, [("block", EXIT), ("lens", 1)])
    spec = SelfSpecModel(model, heads)
    for head in heads:
        config = DraftConfig(drafter="auto", exit_layer=head.exit_layer)
        assert Auto.from_config(spec.engine, config).reader.head is head


def test_priors_follow_from_the_head():
    """Its share of the weights, and what its calibrators expect on average."""
    model = tiny_llama("sometimes")
    near, far = fitted(model, [("block", 1), ("block", 3)])
    far.calibrators["greedy"] = Calibrator()
    far.calibrators["greedy"].bias.fill_(2.0)
    spec = SelfSpecModel(model, [near, far])
    known = [spec.engine.rounds(AUTO, head=head) for head in (near, far)]
    costs = [rounds.batch(1, False).chain.marginal for rounds in known]
    assert 0 < costs[0] < costs[1] < 1.1
    assert known[0].acceptance[False].rate(0) == known[1].acceptance[True].rate(0) == 0.5
    assert known[1].acceptance[False].rate(0) == pytest.approx(0.88, abs=0.01)


@pytest.mark.parametrize("drafter", ["tree", "lookahead"])
def test_a_lossy_rule_for_chains_is_refused_where_drafts_are_trees(drafter):
    spec = SelfSpecModel(tiny_llama("sometimes"))
    with pytest.raises(ValueError, match="verifies chains"):
        spec.generate(IDS[:1], draft={"drafter": drafter, "rule": "typical_lossy"})


@pytest.mark.parametrize("rule", ["block", "token", "coupled", "typical_lossy"])
@pytest.mark.parametrize("do_sample", [True, False])
def test_stats_say_whether_the_output_is_the_targets(rule, do_sample):
    spec = SelfSpecModel(tiny_llama("sometimes"))
    spec.generate(IDS[1:2], max_new_tokens=5, do_sample=do_sample, draft={"rule": rule})
    assert spec.last_stats.lossless is (rule != "typical_lossy" or not do_sample)
    assert spec.last_stats.to_dict()["lossless"] is spec.last_stats.lossless
