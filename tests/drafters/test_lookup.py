"""Indexes find what brute force finds; drafters that look up leave every text as it is."""

import pytest
import torch
from conftest import EXIT, equal_to_generate, gates, greedy, prompt, tiny_llama
from distribution_tools import target as target
from hypothesis import given, settings
from hypothesis import strategies as st
from lookup_tools import collect, foresee

from selfspec import SelfSpecModel
from selfspec.config import LookupConfig
from selfspec.drafters import Cascade, PromptLookup
from selfspec.drafters.suffix_lookup import Lookup, NgramIndex, SuffixIndex
from selfspec.sampling.context import Context

TEXTS = st.integers(1, 4).flatmap(lambda n: st.lists(st.integers(0, n - 1), max_size=40))
DRAFTERS = pytest.mark.parametrize("drafter", ["prompt_lookup", "cascade"])
SUFFIX = {"shortest": 2, "confident": 2}
NGRAM = {"index": "ngram", **SUFFIX}
IDS, MASK = prompt(3, 8, 5)


# Indexes


def earlier_ends(text, length):
    """Where the last `length` tokens also end, before the end."""
    tail = text[len(text) - length :]
    return [end for end in range(length, len(text)) if text[end - length : end] == tail]


def growing(index, text):
    """The index after each token of the text."""
    for length in range(1, len(text) + 1):
        index.read(text[:length])
        yield text[:length], index.match


@settings(deadline=None)
@given(TEXTS)
def test_the_suffix_index_finds_the_longest_suffix_that_occurred_before(text):
    for seen, match in growing(SuffixIndex(), text):
        lengths = [n for n in range(1, len(seen)) if earlier_ends(seen, n)]
        assert match.length == max(lengths, default=0)
        assert not match.length or match.end in earlier_ends(seen, match.length)


@settings(deadline=None)
@given(TEXTS, st.integers(1, 3), st.integers(0, 3))
def test_the_ngram_index_finds_the_latest_of_the_longest_that_it_tries(text, shortest, more):
    sizes = range(shortest, shortest + more + 1)
    for seen, match in growing(NgramIndex(sizes[0], sizes[-1]), text):
        length = max((n for n in sizes if n < len(seen) and earlier_ends(seen, n)), default=0)
        assert match.length == length
        assert not length or match.end == earlier_ends(seen, length)[-1]


@settings(deadline=None)
@given(TEXTS.map(lambda text: text * 5))
def test_the_suffix_index_grows_no_faster_than_the_text(text):
    index = SuffixIndex()
    index.read(text)
    assert len(index._next) <= 2 * len(text) + 1
    assert sum(map(len, index._next)) <= 3 * len(text)


@pytest.mark.parametrize("make", [SuffixIndex, lambda: NgramIndex(1, 3)], ids=["suffix", "ngram"])
class TestContinuation:
    def test_is_what_followed(self, make):
        index = make()
        index.read([5, 1, 2, 3, 4, 9, 1, 2])
        assert index.match.length == 2
        assert index.continuation(3) == [3, 4, 9]

    def test_of_a_text_that_repeats_itself_repeats_on(self, make):
        index = make()
        index.read([8, 1, 2, 3] + [1, 2, 3] * 2)
        assert index.continuation(7) == [1, 2, 3, 1, 2, 3, 1]

    def test_follows_what_was_last_followed(self, make):
        index = make()
        index.read([1, 2, 3, 9, 1, 2, 4, 8, 1, 2])
        assert index.continuation(2) == [4, 8]

    def test_reading_on_is_reading_at_once(self, make):
        text = torch.randint(3, (200,), generator=torch.Generator().manual_seed(0)).tolist()
        whole, parts = make(), make()
        whole.read(text)
        for length in (0, 7, 7, 50, 200):
            parts.read(text[:length])
        assert (parts.match, parts.continuation(9)) == (whole.match, whole.continuation(9))


def test_rows_draft_on_their_own_and_leave_on_their_own():
    texts = [[1, 2, 3, 1, 2], [1, 2, 3, 4, 5], [7, 7, 7]]
    context = Context(torch.zeros(3, 5, dtype=torch.long), [5, 5, 5], [0, 1, 2], texts)
    lookup = Lookup(LookupConfig())
    draft = lookup.draft(context, 3)
    assert draft.tokens.tolist() == [[3, 1, 2], [0, 0, 0], [7, 7, 7]]
    assert draft.counts is not None and draft.counts.tolist() == [3, 0, 3]
    context.rows = [1, 2]
    texts[1] += [1, 2]
    assert lookup.draft(context, 2).tokens.tolist() == [[3, 4], [7, 7]]
    assert len(lookup.read(context)) == 2
    context.rows, texts[1][-1] = [1], 6
    assert Lookup(LookupConfig()).draft(context, 2).length == 0


@pytest.mark.parametrize(("match", "copied"), [(1, 0), (2, 10), (12, 12), (60, 40)])
def test_a_longer_match_is_followed_for_longer(match, copied):
    text = [*range(1, match + 1), *range(100, 150), *range(1, match + 1)]
    context = Context(torch.zeros(1, len(text), dtype=torch.long), [len(text)], [0], [text])
    assert Lookup(LookupConfig()).draft(context, 50).length == copied
    assert Lookup(LookupConfig(), length=3).draft(context, 50).length == min(copied, 3)
    assert Lookup(LookupConfig()).draft(context, 5).length == min(copied, 5)


def test_a_shortest_ngram_longer_than_the_longest_is_refused():
    spec = SelfSpecModel(tiny_llama())
    lookup = {"index": "ngram", "shortest": 5, "longest": 3}
    with pytest.raises(
        ValueError, match=r"draft: lookup: shortest=5 is more than longest=3.*raise"
    ):
        spec.generate(IDS, draft={"drafter": "prompt_lookup", "lookup": lookup})
    assert LookupConfig(shortest=9).longest == 4  # the suffix index knows no longest


# Drafters that look up


def configured(drafter, lookup=SUFFIX, k=4, **options):
    """A config with an exit for `cascade`."""
    options = {"exit_layer": EXIT} | options if drafter == "cascade" else options
    return {"drafter": drafter, "lookup": lookup, "num_draft_tokens": k, **options}


@pytest.fixture(scope="module")
def model():
    return tiny_llama("sometimes")


@pytest.fixture
def foreseen(model, monkeypatch):
    """The model's own text behind the prompts, which lookups foresee but for some tokens."""
    text = greedy(model, IDS, MASK, max_new_tokens=24)
    foresee(monkeypatch, text.tolist(), wrong=7)
    return text[:, IDS.shape[1] :]


@DRAFTERS
@pytest.mark.parametrize("lookup", [SUFFIX, NGRAM], ids=["suffix", "ngram"])
def test_rounds_keep_their_invariants_and_the_model_is_left_alone(
    model, foreseen, drafter, lookup, watch, monkeypatch
):
    spec, drafts = SelfSpecModel(model), collect(monkeypatch)
    ledger = watch(spec)
    before = gates(model)  # those of `watch`
    draft = configured(drafter, lookup)
    text = spec.generate(IDS, attention_mask=MASK, max_new_tokens=24, draft=draft)
    assert torch.equal(text[:, IDS.shape[1] :], foreseen)
    assert gates(model) == before
    assert ledger.rounds == len(drafts) < 24
    counts = [set(draft.counts.tolist()) for draft in drafts if draft.counts is not None]
    if drafter == "cascade":  # whose exit has the length that was asked for
        assert any(len(found) == 1 and max(found) >= 10 for found in counts)
    else:
        assert {4} in counts and {0, 4} in counts


@DRAFTERS
def test_a_text_that_repeats_itself_is_foreseen(drafter):
    model = tiny_llama("always", spread=0.02)
    spec = SelfSpecModel(model)
    equal_to_generate(spec, IDS, MASK, max_new_tokens=60, draft=configured(drafter, k=None))
    assert spec.last_stats.acceptance_rate > 0.8


def test_with_nothing_to_look_up_it_is_plain_decoding(model, watch):
    spec = SelfSpecModel(model)
    ledger = watch(spec)
    lookup = {"shortest": 50}
    draft = {"drafter": "prompt_lookup", "lookup": lookup}
    equal_to_generate(spec, IDS, MASK, max_new_tokens=15, draft=draft)
    assert spec.last_stats.drafted == 0 and ledger.rounds == 14


@DRAFTERS
@pytest.mark.parametrize("k", [None, 1, 3])
def test_nothing_is_drafted_beyond_the_limit(model, foreseen, drafter, k, monkeypatch):
    made = {"prompt_lookup": PromptLookup, "cascade": Cascade}[drafter]
    propose, seen = made.propose, []

    def noting(self, state, limit):
        draft = propose(self, state, limit)
        seen.append((draft.length, limit))
        return draft

    monkeypatch.setattr(made, "propose", noting)
    draft = configured(drafter, k=k)
    SelfSpecModel(model).generate(IDS, attention_mask=MASK, max_new_tokens=13, draft=draft)
    most = limit_of(drafter, k)
    assert all(length <= min(limit, most) for length, limit in seen)
    assert any(limit < 10 for _, limit in seen)


def limit_of(drafter, k):
    """The most tokens of a draft; a cascade's number is of its exit."""
    return k if k is not None and drafter == "prompt_lookup" else 40
