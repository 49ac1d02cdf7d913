"""The drafter that chooses: exact whatever it chooses, and shown what the others drafted."""

import itertools

import pytest
import torch
from conftest import AGREEMENT, EXIT, contrary, greedy, prompt, tiny_llama
from head_tools import assert_reads_as_forced, close_in_double, own_head, record

from selfspec import SelfSpecModel
from selfspec.decoder import Decoder
from selfspec.drafters import auto
from selfspec.drafters.auto import Auto
from selfspec.drafters.copying import CopyingStop
from selfspec.sampling.draft import Draft, Tree, Verdict
from selfspec.schedule.policy import Policy

IDS, MASK = prompt(4, 11, 7)


def take_turns(monkeypatch):
    """Every way drafts in turn; the list of those that did."""
    used = []

    def choose(policy, ways):
        for name in ways:
            policy.way(name)
        used.append(list(ways)[len(used) % len(ways)])
        return used[-1]

    monkeypatch.setattr(Policy, "choose", choose)
    repeats_everywhere(monkeypatch)
    return used


def repeats_everywhere(monkeypatch):
    """Random texts hardly repeat themselves; a lookup that finds nothing proposes nothing."""
    monkeypatch.setattr(Auto, "_repeats", lambda auto, state: bool(auto.lookup.read(state.context)))


def fitted(model, kinds):
    decoder = Decoder(model)
    return [own_head(decoder, kind, layer) for kind, layer in kinds]


@pytest.mark.parametrize("agreement", AGREEMENT)
@pytest.mark.parametrize("rows", [slice(0, 1), slice(0, 3)], ids=["one row", "ragged"])
def test_greedy_text_is_the_models_own_whoever_drafts(monkeypatch, agreement, rows):
    model = tiny_llama(agreement)
    used = take_turns(monkeypatch)
    spec = SelfSpecModel(model, fitted(model, [("fused", EXIT), ("block", 1), ("lens", 3)]))
    ids, mask = IDS[rows], MASK[rows]
    out = spec.generate(ids, attention_mask=mask, max_new_tokens=40, draft="auto")
    assert torch.equal(out, greedy(model, ids, mask, max_new_tokens=40))
    assert len(set(used)) == 8


def test_heads_not_in_use_see_what_others_drafted(monkeypatch):
    """A head's own layer reads a text that others wrote as fitting read it."""
    model = tiny_llama("sometimes")
    heads = fitted(model, [("fused", EXIT), ("block", 1)])
    seen = record(monkeypatch)
    order = itertools.cycle(["none"] * 2 + ["chain fused@2", "lookup", "chain block@1"])
    monkeypatch.setattr(Policy, "choose", lambda policy, ways: next(order))
    repeats_everywhere(monkeypatch)
    monkeypatch.setattr(Policy, "learn", lambda *args: None)
    spec = SelfSpecModel(model, heads)
    spec.generate(IDS, attention_mask=MASK, max_new_tokens=30, draft="auto")
    for head in heads:
        own = [reading for reading in seen if reading.head is head]
        assert_reads_as_forced(spec.engine.decoder, head, own, close_in_double)


def test_a_head_that_lags_behind_says_how_often_it_would_have_agreed(monkeypatch):
    model = tiny_llama("always")
    spec = SelfSpecModel(model, fitted(model, [("block", EXIT)]))
    monkeypatch.setattr(Policy, "choose", lambda policy, ways: "none")
    monkeypatch.setattr("selfspec.drafters.exit_readers.layer._DEFERRED", 40)
    spec.generate(IDS, attention_mask=MASK, max_new_tokens=90, draft="auto")
    policy = spec.engine.policy("auto", 3, False, False)
    shadow = policy.shadow(f"block@{EXIT}")
    assert shadow.count == 2 * 3 * 32
    text = spec.generate(IDS[:1], max_new_tokens=5, draft="auto")
    assert text.shape == (1, IDS.shape[1] + 5)
    assert policy.way(f"chain block@{EXIT}").shadow is shadow


@pytest.mark.parametrize("way", ["chain", "tree"])
@pytest.mark.parametrize("right", [True, False])
def test_a_head_that_drafts_shows_how_often_its_first_draft_is_right(way, right, monkeypatch):
    model = tiny_llama("always" if right else "sometimes")
    spec = SelfSpecModel(model) if right else contrary(model, EXIT)
    name = f"{spec.heads[0].kind if spec.heads else 'shared'}@{EXIT}"
    monkeypatch.setattr(Policy, "choose", lambda policy, ways: f"{way} {name}")
    for sampled in (True, False):
        draft = {"drafter": "auto", "exit_layer": EXIT}
        spec.generate(IDS[:1], max_new_tokens=30, draft=draft, do_sample=sampled)
    shadow = spec.engine.policy("auto", 1, False, False).shadow(name)
    drafted = sum(bool(step.drafted) for step in spec.last_trace.rows[0])
    assert shadow.count == drafted > 0 and shadow.value == right
    assert not spec.engine.policy("auto", 1, True, False).shadow(name).count


def shown_choices(monkeypatch, seed, way):
    """By the tokens before a round: first choices that were kept, and whether all drafts were."""
    shown, first_choices = [], auto._first_choices
    monkeypatch.setattr(
        auto, "_first_choices", lambda *args: shown.append(first_choices(*args)) or shown[-1]
    )
    monkeypatch.setattr(Auto, "_repeats", lambda auto, state: False)
    monkeypatch.setattr(Policy, "choose", lambda policy, ways: f"{way} shared@{EXIT}")
    monkeypatch.setattr(CopyingStop, "_leads", False)  # copies are no choices of a head
    spec = SelfSpecModel(tiny_llama("sometimes", seed=seed))
    draft = {"drafter": "auto", "exit_layer": EXIT, "num_draft_tokens": 4}
    spec.generate(IDS[:1], max_new_tokens=150, draft=draft)
    assert spec.engine.policy("auto", 1, False, False).firsts(f"shared@{EXIT}", 4).count
    monkeypatch.undo()
    rounds = spec.last_trace.rows[0]
    begins = itertools.accumulate(len(step.tokens) for step in rounds)
    drafted = [(at, step) for at, step in zip(begins, rounds[1:], strict=False) if step.proposed]
    return {
        at: (count, step.accepted == len(step.drafted))
        for (at, step), (count,) in zip(drafted, shown, strict=True)
    }


def test_a_tree_shows_what_the_chain_of_its_head_would_have_kept(monkeypatch):
    compared = 0
    for seed in range(4):
        chain, tree = (shown_choices(monkeypatch, seed, way) for way in ("chain", "tree"))
        for at in chain.keys() & tree.keys():
            (kept, whole), (chosen, _) = chain[at], tree[at]
            assert chosen == kept or (whole and chosen > kept)
            compared += not whole
    assert compared > 10


def test_first_choices_are_counted_up_to_the_first_that_was_another():
    #        0
    #      1   2      places; 1 is the first choice behind 0, 3 behind 1, 5 behind 3
    #    3 4   .
    #    5
    parents = torch.tensor([[0, 0, 1, 1, 3]]).expand(4, -1)
    branch = torch.tensor([[1, 3, 5], [1, 4, 0], [2, 0, 0], [1, 3, 5]])
    accepted = torch.tensor([3, 2, 1, 2])
    tree = Draft(torch.zeros(4, 5, dtype=torch.long), tree=Tree(parents, 3, 2))
    verdict = Verdict(accepted, torch.zeros(4, 4, dtype=torch.long), branch)
    assert auto._first_choices(tree, verdict) == [3, 1, 0, 2]
    chain = Draft(torch.zeros(4, 3, dtype=torch.long))
    assert auto._first_choices(chain, Verdict(accepted, verdict.tokens)) == [3, 2, 1, 2]


def test_plain_decoding_is_judged_by_the_rounds_of_chains(monkeypatch):
    spec = SelfSpecModel(tiny_llama("always"))
    monkeypatch.setattr(Auto, "_repeats", lambda auto, state: False)
    spec.generate(IDS[:1], max_new_tokens=120, draft={"drafter": "auto", "exit_layer": EXIT})
    plain = spec.engine.policy("auto", 1, False, False).way("none")
    assert plain.known and plain.rate > 0
    assert plain.pace.known or spec.engine.pace("auto", f"shared@{EXIT}").fixed_seconds.count


def test_ways_outlive_the_call(monkeypatch):
    model = tiny_llama("sometimes")
    spec = SelfSpecModel(model, fitted(model, [("block", EXIT)]))
    chosen, choose = [], Policy.choose
    monkeypatch.setattr(
        Policy, "choose", lambda policy, ways: chosen.append(choose(policy, ways)) or chosen[-1]
    )
    for _ in range(3):
        spec.generate(IDS, attention_mask=MASK, max_new_tokens=30, draft="auto")
    greedy, drawn = (
        sum(spec.engine.policy("auto", 3, mode, where).rounds for where in (False, True))
        for mode in (False, True)
    )
    # How long a round took is known when the next begins, so not of a call's last.
    assert greedy == len(chosen) - 3 > 0
    assert drawn == 0


def test_one_head_may_be_asked_for():
    model = tiny_llama("sometimes")
    spec = SelfSpecModel(model, fitted(model, [("block", EXIT), ("lens", 1)]))
    draft = {"drafter": "auto", "exit_layer": 1}
    spec.generate(IDS, attention_mask=MASK, max_new_tokens=10, draft=draft)
    ways = spec.engine.policy("auto", 3, False, False).ways
    assert set(ways) == {"chain lens@1", "tree lens@1", "none"}


def test_a_lookup_is_a_way_only_where_the_text_repeats_itself(monkeypatch):
    model = tiny_llama("always")
    spec = SelfSpecModel(model, fitted(model, [("lens", 1)]))
    spec.generate(IDS, attention_mask=MASK, max_new_tokens=60, draft="auto")
    repeats_everywhere(monkeypatch)
    spec.generate(IDS, attention_mask=MASK, max_new_tokens=60, draft="auto")
    elsewhere, repeated = (spec.engine.policy("auto", 3, False, where) for where in (False, True))
    assert "lookup" not in elsewhere.ways
    assert repeated.ways["lookup"].pace.tokens.count >= 2  # rounds, however long they took


@pytest.mark.parametrize("drafter", ["auto", "tree", "lookahead"])
def test_a_lossy_rule_for_chains_is_refused_where_drafts_are_trees(drafter):
    spec = SelfSpecModel(tiny_llama("sometimes"))
    with pytest.raises(ValueError, match="judges chains"):
        spec.generate(IDS[:1], draft={"drafter": drafter, "rule": "typical_lossy"})


@pytest.mark.parametrize("rule", ["block", "token", "coupled", "typical_lossy"])
@pytest.mark.parametrize("do_sample", [True, False])
def test_stats_say_whether_the_output_is_the_targets(rule, do_sample):
    spec = SelfSpecModel(tiny_llama("sometimes"))
    spec.generate(IDS[1:2], max_new_tokens=5, do_sample=do_sample, draft={"rule": rule})
    assert spec.last_stats.lossless is (rule != "typical_lossy" or not do_sample)
    assert spec.last_stats.to_dict()["lossless"] is spec.last_stats.lossless
