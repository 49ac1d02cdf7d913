"""Trees of drafts: what continues what, and the text that is the target's own all the same."""

import pytest
import torch
from conftest import EXIT, VOCAB, equal_to_generate, greedy, prompt, tiny_llama
from head_tools import PARALLEL, assert_reads_as_forced, close_in_double, own_head, record
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec import SelfSpecModel
from selfspec.decoder import Decoder
from selfspec.heads import Calibrator
from selfspec.sampling.draft import Tree

IDS, MASK = prompt(4, 9, 6)
NEW = 14


def tree_of(nodes, levels=4, **options):
    draft = {"drafter": "tree", "num_draft_tokens": levels, "tree": {"nodes": nodes}}
    return {**draft, **options}


# Which draft continues which


@st.composite
def rows_of_parents(draw):
    """Rows of one width: children after their parents, padding anywhere, continued by nothing."""
    drafts = draw(st.integers(1, 9))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        parents, real = [], [0]
        for place in range(1, drafts + 1):
            parents.append(draw(st.sampled_from([-1, *real])))
            if parents[-1] >= 0:
                real.append(place)
        rows.append(parents)
    return rows


def way(parents, place):
    """The places on the way to `place`, its own the last; the pending token left out."""
    walked = []
    while place > 0:
        walked.insert(0, place)
        place = parents[place - 1]
    return walked


@given(rows_of_parents())
@settings(max_examples=60, deadline=None)
def test_a_tree_is_what_a_walk_finds(rows):
    ways = [[way(row, place) for place in range(len(row) + 1)] for row in rows]
    levels = max(len(walked) for row in ways for walked in row)
    most = max(row.count(place) for row in rows for place in range(len(row) + 1))
    tree = Tree(torch.tensor(rows), levels, most)
    for index, (row, walks) in enumerate(zip(rows, ways, strict=True)):
        real = [place for place in range(len(row) + 1) if place == 0 or row[place - 1] >= 0]
        for place in range(len(row) + 1):
            seen = tree.ancestors[index, place].nonzero().flatten().tolist()
            assert seen == ([0, *walks[place]] if place in real else [place])
        assert tree.depths[index, real].tolist() == [len(walks[place]) for place in real]
        for place in real[1:]:
            earlier = [p for p in real[1:] if p < place and row[p - 1] == row[place - 1]]
            assert tree.ranks[index, place - 1] == len(earlier)
        for place in real:
            at = torch.full((len(rows),), place)
            padded = [*walks[place], *[0] * levels][:levels]
            assert tree.branch(at)[index].tolist() == padded
            under = [p for p in real if place in (0, *walks[p])]
            deepest = max(under, key=lambda p, w=walks: (len(w[p]), -p))
            assert tree.below(at)[index] == deepest


# The text


def test_the_laws_of_every_round(watch):
    spec = SelfSpecModel(tiny_llama("sometimes"))
    ledger = watch(spec)
    for do_sample in (False, True):
        spec.generate(
            IDS,
            attention_mask=MASK,
            max_new_tokens=24,
            draft=tree_of(9, exit_layer=EXIT),
            do_sample=do_sample,
            eos_token_id=[5, 9],
            generator=torch.Generator().manual_seed(0),
        )
    assert ledger.rounds > 8


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["block", "fused", *PARALLEL])
@pytest.mark.parametrize("trimmed", [False, True], ids=["whole", "trimmed"])
def test_a_layer_reads_along_each_branch_what_it_was_fitted_on(monkeypatch, kind, trimmed):
    """After rounds of every outcome: its KV of the kept branch is right in the next."""
    model = tiny_llama("sometimes")
    decoder = Decoder(model)
    head = own_head(decoder, kind, 3, trimmed=trimmed, noise=0.06, place=3)
    spec, seen = SelfSpecModel(model, heads=[head]), record(monkeypatch)
    options = {"attention_mask": MASK, "max_new_tokens": 24}
    text = spec.generate(IDS, draft=tree_of(7, levels=3, head=head.kind), **options)
    assert torch.equal(text, greedy(model, IDS, MASK, max_new_tokens=24))
    outcomes = {step.accepted for row in spec.last_trace.rows for step in row}
    assert {0, 1, 3} - ({3} if kind in PARALLEL else set()) <= outcomes
    assert {reading.step for reading in seen} == {0, 1, 2}
    assert_reads_as_forced(decoder, head, seen[::3], close_in_double)


# The shape


@pytest.mark.parametrize("agreement", ["seldom", "sometimes", "always"])
def test_a_tree_of_width_1_is_the_chain(agreement):
    model = tiny_llama(agreement)
    spec = SelfSpecModel(model)
    options = {"attention_mask": MASK, "max_new_tokens": NEW}
    chain = {"exit_layer": EXIT, "num_draft_tokens": 4}
    by_chain = spec.generate(IDS, draft=chain, **options), spec.last_trace
    by_tree = spec.generate(IDS, draft=tree_of(4, exit_layer=EXIT), **options), spec.last_trace
    assert torch.equal(by_chain[0], by_tree[0])
    assert by_chain[1] == by_tree[1]


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_a_head_that_is_the_target_is_always_accepted(do_sample):
    spec = SelfSpecModel(tiny_llama("always"))
    for nodes in (4, 9, 16):
        draft = tree_of(nodes, exit_layer=EXIT)
        options = {"do_sample": do_sample, "generator": torch.Generator().manual_seed(0)}
        spec.generate(IDS, attention_mask=MASK, max_new_tokens=16, draft=draft, **options)
        assert spec.last_stats.acceptance_rate == 1.0
        assert [step.accepted for step in spec.last_trace.rows[0]] == [0, 4, 4, 4]


def test_wider_trees_are_followed_further():
    spec = SelfSpecModel(tiny_llama("sometimes"))
    kept = []
    for nodes in (4, 32):
        draft = tree_of(nodes, exit_layer=EXIT)
        spec.generate(IDS, attention_mask=MASK, max_new_tokens=60, draft=draft)
        kept.append(spec.last_stats.mean_accepted_length)
    assert kept[1] > kept[0] + 0.1


class AcceptanceEstimator(Calibrator):
    """As sure, or as unsure, as a calibrator can be."""

    def __init__(self, bias):
        super().__init__()
        self.weight.zero_()
        self.bias.fill_(bias)


@pytest.mark.parametrize("bias", [-99.0, 0.0, 99.0], ids=["hopeless", "undecided", "sure"])
def test_children_are_the_best_of_their_place_in_order(watch, bias):
    """However little is left of the chance to reach them: a later sibling never comes first."""
    model = tiny_llama("always")
    head = own_head(Decoder(model), "shared", EXIT)
    head.calibrators["greedy"] = AcceptanceEstimator(bias)
    spec = SelfSpecModel(model, heads=[head])
    ledger = watch(spec)
    ids = IDS[1:2]
    spec.generate(ids, max_new_tokens=12, draft=tree_of(60, levels=10))
    (draft,) = ledger.drafts
    text = spec.last_trace.tokens(0)
    emitted = len(spec.last_trace.rows[0][-1].tokens)
    settled = torch.cat([ids[0], torch.tensor(text[:-emitted])])
    parents, tokens = draft.tree.parents[0], draft.tokens[0]
    for place in range(draft.length + 1):
        children = tokens[parents == place]
        if len(children) > 0:
            branch = tokens[draft.tree.ancestors[0, place, 1:]]
            logits = model(torch.cat([settled, branch])[None]).logits[0, -1]
            assert children.tolist() == logits.topk(len(children)).indices.tolist()


def test_a_level_is_no_wider_than_the_vocabulary(watch):
    model = tiny_llama("sometimes")
    spec = SelfSpecModel(model)
    ledger = watch(spec)
    draft = tree_of(2 * VOCAB, levels=1, exit_layer=EXIT)
    equal_to_generate(spec, IDS, MASK, max_new_tokens=5, draft=draft)
    assert ledger.drafts[0].length == VOCAB
    assert spec.last_stats.acceptance_rate == 1.0


def test_fewer_nodes_than_levels_are_refused():
    spec = SelfSpecModel(tiny_llama())
    with pytest.raises(ValueError, match=r"tree.nodes=3 is fewer than num_draft_tokens=4, the dep"):
        spec.generate(IDS, draft=tree_of(3))
