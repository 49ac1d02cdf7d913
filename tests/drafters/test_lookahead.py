"""Lookahead decoding: both branches leave every text as it is, and say what the target says."""

import distribution_tools as distribution
import pytest
import torch
from conftest import greedy, prompt, tiny_llama
from distribution_tools import exact, follows
from distribution_tools import target as target
from lookup_tools import collect, foresee_ngrams

from selfspec import DraftConfig, SelfSpecModel
from selfspec.drafters.lookahead import Lookahead, NgramPool, Row

IDS, MASK = prompt(3, 8, 5)
SIZES = {"window": 3, "ngram": 3, "guesses": 3}
DRAFT = {"drafter": "lookahead", "lookahead": SIZES}


@pytest.fixture(scope="module")
def model():
    return tiny_llama("sometimes")


def test_guesses_that_are_right_are_kept(model, monkeypatch):
    """The lookahead branch is verified like the other."""
    own = greedy(model, IDS, MASK, max_new_tokens=30)
    rows = {
        tuple(text[m.bool()].tolist()): out for text, m, out in zip(IDS, MASK, own, strict=True)
    }
    made, width = Row.of, IDS.shape[1]

    def knowing(text, config, source):
        row = made(text, config, source)
        row.window[0] = rows[tuple(text)][width + 1 :][: config.window].tolist()
        return row

    monkeypatch.setattr(Row, "of", knowing)
    spec = SelfSpecModel(model)
    text = spec.generate(IDS, attention_mask=MASK, max_new_tokens=30, draft="lookahead")
    assert torch.equal(text, own)
    first = [row[1] for row in spec.last_trace.rows]  # behind the prefill's
    assert [step.accepted for step in first] == [8, 8, 8]


def test_the_window_moves_on_by_what_the_target_says(model, monkeypatch):
    """What is foretold is the target's greedy token behind the guess's own branch."""
    commit, checked = Lookahead.commit, []

    def checking(self, state, draft, verified, verdict):
        texts = [list(state.context.text[row]) for row in state.context.rows]
        before = [row.window for row in self._rows]
        full = bool(self._newest)
        commit(self, state, draft, verified, verdict)
        for text, window, row in zip(texts, before, self._rows, strict=True):
            assert row.window[:-1] == window[1:] if full else row.window == window
            for i, foretold in enumerate(row.window[-1] if full else []):
                branch = window[0][: i + 1] + [level[i] for level in window[1:]]
                with torch.no_grad():
                    logits = model(torch.tensor([text + branch])).logits
                assert foretold == int(logits[0, -1].argmax())
                ngram = [level[i] for level in window] + [foretold]
                assert tuple(ngram[1:]) in row.pool.after(ngram[0])
                checked.append(foretold)

    monkeypatch.setattr(Lookahead, "commit", checking)
    SelfSpecModel(model).generate(IDS, attention_mask=MASK, max_new_tokens=10, draft=DRAFT)
    assert len(set(checked)) > 5


def test_trees_are_in_order_and_no_deeper_than_the_limit(model, monkeypatch):
    drafts, limits, propose = collect(monkeypatch), [], Lookahead.propose

    def noting(self, state, limit):
        limits.append(limit)
        return propose(self, state, limit)

    monkeypatch.setattr(Lookahead, "propose", noting)
    foresee_ngrams(monkeypatch, greedy(model, IDS, MASK, max_new_tokens=14).tolist(), wrong=9)
    SelfSpecModel(model).generate(IDS, attention_mask=MASK, max_new_tokens=14, draft=DRAFT)
    trees = [draft.tree for draft in drafts if draft.tree is not None]
    assert len({(row < 0).sum() for tree in trees for row in tree.parents.unbind()}) > 1
    for draft, limit in zip(drafts, limits, strict=False):
        assert draft.levels <= limit
        if draft.tree is not None:
            parents, tree = draft.tree.parents, draft.tree
            assert bool((parents <= torch.arange(parents.shape[1])).all())
            assert int(tree.depths.max()) == tree.levels
            assert int(tree.ranks[parents >= 0].max()) == tree.siblings - 1
            ends = [
                list(zip(*row, strict=True))
                for row in zip(parents.tolist(), draft.tokens.tolist(), strict=True)
            ]
            real = [[pair for pair in row if pair[0] >= 0] for row in ends]
            assert all(len(set(row)) == len(row) for row in real), "twice the same draft"


def test_a_text_that_repeats_itself_is_foreseen():
    model = tiny_llama("seldom", spread=0.02)
    ids, mask = IDS[::2], MASK[::2]
    own = greedy(model, ids, mask, max_new_tokens=40)
    assert own[:, -20:].unique(dim=1).shape[1] == 1
    spec = SelfSpecModel(model)
    text = spec.generate(ids, attention_mask=mask, max_new_tokens=40, draft="lookahead")
    assert torch.equal(text, own)
    assert spec.last_stats.mean_accepted_length > 1.3


def test_the_pool_is_bounded_and_keeps_the_newest():
    pool = NgramPool(tokens=3, ngrams=2)
    for number in range(40):
        pool.add((number % 3, number, number + 1))
    assert len(pool) == 3 * 2
    assert pool.after(0) == [(39, 40), (36, 37)]
    pool.add((0, 36, 37))
    assert pool.after(0) == [(36, 37), (39, 40)]
    pool.add((7, 1, 2))
    assert len(pool) == 5 and pool.after(1) == [], "the token used longest ago leaves"


def test_a_long_text_does_not_outgrow_the_pool(model, monkeypatch):
    rows, made = [], Row.of
    monkeypatch.setattr(Row, "of", lambda *args: rows.append(made(*args)) or rows[-1])
    draft = DRAFT | {"lookahead": SIZES | {"pool": 5}}
    SelfSpecModel(model).generate(IDS, attention_mask=MASK, max_new_tokens=40, draft=draft)
    assert [len(row.pool) for row in rows] <= [15, 15, 15]
    assert all(5 <= len(row.pool) <= 15 for row in rows)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("options", "total"), [(distribution.POINTWISE, 6_000), (distribution.WARPED, 1_500)], ids=str
)
def test_sampled_text_follows_the_target(target, options, total, monkeypatch):
    if options is distribution.WARPED:
        monkeypatch.setattr(distribution, "BATCH", 50)  # every place is processed alone
    likely = exact(target, options)
    starts = likely.flatten().topk(12).indices
    cells = torch.stack(torch.unravel_index(starts, likely.shape), dim=1)
    foresee_ngrams(monkeypatch, cells.tolist(), wrong=99)
    sizes = {"window": 1, "ngram": 3, "guesses": 4}
    draft = DraftConfig(drafter="lookahead", lookahead=sizes)
    follows(target, options, draft, exactly=likely, total=total)
